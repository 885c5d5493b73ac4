"""Every Redis key and channel name of npufleet, and what may stand in one.

All keys of one model carry the hash tag `{model}`, so that they share a slot on Redis Cluster.
Knows nothing of Redis itself.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from npufleet.errors import InvalidId, ModelNotFound

GROUP = "workers"
"""The consumer group of every lane."""

RETURNED = "returned"
"""The reserved consumer that entries are given back to: takers look there first."""

LANES = ("high", "normal", "low")
"""The request lanes, in the order in which they are served."""

DEFAULT_LANE = "normal"

MAX_ID_LENGTH = 128

_ID = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_ID_LENGTH}}}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_NOTIFY = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_id(value: str) -> str:
    """The id itself, or InvalidId: 1 to 128 of letters, digits and `_ . : -`."""
    if not _ID.fullmatch(value):
        raise InvalidId(
            f"an id is 1 to {MAX_ID_LENGTH} characters of A-Z a-z 0-9 _ . : - ; got {_shown(value)}"
        )
    return value


def check_model(value: str) -> str:
    """The model name itself, or ModelNotFound when no model can have such a name."""
    if not _MODEL.fullmatch(value):
        raise ModelNotFound(
            "a model name is 1 to 128 characters of A-Z a-z 0-9 _ . - and starts with a letter "
            f"or digit; got {_shown(value)}"
        )
    return value


def is_notify(value: str) -> bool:
    """Whether a name may be used under `notify:`."""
    return _NOTIFY.fullmatch(value) is not None


def _shown(value: str) -> str:
    return repr(value if len(value) <= 40 else value[:40] + "…") + f" ({len(value)} characters)"


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """The keys of one model."""

    prefix: str
    model: str
    base: str = field(init=False)
    lanes: tuple[str, str, str] = field(init=False)

    def __post_init__(self) -> None:
        check_model(self.model)
        base = f"{self.prefix}:{{{self.model}}}:"
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "lanes", tuple(base + lane for lane in LANES))

    def lane(self, name: str) -> str:
        return self.base + name

    def reply(self, wire_id: str) -> str:
        return f"{self.base}reply:{wire_id}"

    def seen(self, wire_id: str) -> str:
        return f"{self.base}seen:{wire_id}"

    def body(self, wire_id: str) -> str:
        return self.body_prefix + wire_id

    @property
    def body_prefix(self) -> str:
        """Every `body_key` must start with this, so that an entry can name no other key."""
        return self.base + "body:"

    @property
    def cancelled(self) -> str:
        return self.base + "cancelled"

    @property
    def dead(self) -> str:
        return self.base + "dead"

    @property
    def signature(self) -> str:
        return self.base + "model"

    @property
    def workers(self) -> str:
        return self.base + "workers"

    @property
    def control(self) -> str:
        return self.base + "control"


RATE_FIELD = "rate:"
"""Field of the model's hash, before a worker's name: the requests a second that it can end."""


_model_keys = lru_cache(maxsize=1024)(ModelKeys)
"""Asked for several times per request: one object per model."""


@dataclass(frozen=True, slots=True)
class FleetKeys:
    """The keys that belong to no single model."""

    prefix: str

    def model(self, name: str) -> ModelKeys:
        return _model_keys(self.prefix, name)

    @property
    def models(self) -> str:
        """Set of the names of all models that a worker has ever registered."""
        return f"{self.prefix}:models"

    def worker(self, name: str) -> str:
        return f"{self.prefix}:worker:{name}"

    def notify(self, name: str) -> str:
        return self.notify_prefix + name

    @property
    def notify_prefix(self) -> str:
        return f"{self.prefix}:notify:"
