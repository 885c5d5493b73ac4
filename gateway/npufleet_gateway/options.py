"""What a caller asks besides the content: which model and version, how urgent, under which id.

The same options come as JSON members, as form fields and as a query string. Knows nothing of HTTP
or of which models exist.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npufleet import keys, wire
from npufleet.errors import InvalidParameter
from npufleet_gateway import fields

NAMES = ("model", "version", "priority", "timeout_ms", "request_id")
AUTO = "auto"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Options:
    """`request_id` is None where the gateway is to make one."""

    model: str | None = None
    version: str | None = None
    lane: str = keys.DEFAULT_LANE
    timeout_ms: int | None = None
    request_id: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """The options among the fields given. Raises InvalidParameter, InvalidId, ModelNotFound."""
        model = fields.text(given, "model")
        request_id = fields.text(given, "request_id")
        lane = fields.text(given, "priority") or keys.DEFAULT_LANE
        if lane not in keys.LANES:
            raise InvalidParameter(
                f"priority must be one of {', '.join(keys.LANES)}, got {fields.shown(lane)}"
            )
        return cls(
            model=None if model is None else keys.check_model(model),
            version=_version(given.get("version")) if "version" in given else None,
            lane=lane,
            timeout_ms=fields.whole(given, "timeout_ms", least=1, most=wire.MAX_TIMEOUT_MS),
            request_id=None if request_id in (None, AUTO) else keys.check_id(request_id),
        )

    def model_or(self, path_model: str | None) -> str | None:
        """The model, which the URL may name too, but not differently."""
        if path_model is None or self.model == path_model:
            return self.model
        if self.model is not None:
            raise InvalidParameter(
                f"the URL names the model {path_model[:80]!r} and the request {self.model!r}"
            )
        return keys.check_model(path_model)


def _version(value: Any) -> str:
    """A version's number or label, as the wire carries it."""
    if type(value) is int and value >= 1:
        return str(value)
    if isinstance(value, str) and _VERSION.fullmatch(value):
        return value
    raise InvalidParameter(
        "version must be a number from 1 or a label of 1 to 64 characters of A-Z a-z 0-9 _ . -, "
        f"got {fields.shown(value)}"
    )
