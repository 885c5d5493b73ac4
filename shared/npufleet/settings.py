"""The settings of every process: `NPUFLEET_*` environment over `npufleet.toml` over defaults.

Every default of npufleet stands here once. Built once at the top of a process and passed down;
nothing else reads the environment. Needs the extra `cli`. Knows nothing of what the settings do.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from npufleet.errors import ConfigurationError

PREFIX = "NPUFLEET_"
FILE = "npufleet.toml"
DEFAULT_URL = "redis://127.0.0.1:6379/0"

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"

_OWN_WORDS = re.compile(r"NPUFLEET_(DEBUG|TEST_.*)")
"""Switches that are not settings: read where they are used, by the tests or the launcher."""

_KUBERNETES = re.compile(
    r"NPUFLEET(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP)(_\w+)?)"
)
"""What Kubernetes injects for services whose name starts with npufleet, but for `…_PORT`."""


class Settings(BaseSettings):
    """All settings; the field's upper-case name after `NPUFLEET_` is its environment name."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, protected_namespaces=()
    )

    # Redis
    redis_url: str | None = Field(
        None, description="redis://, rediss:// or unix:// URL; unset: the embedded server"
    )
    prefix: str = Field(
        "npufleet",
        pattern=_NAME,
        description="what every key starts with",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="limit on connecting to Redis")
    state: Path = Field(Path(".npufleet"), description="folder of the embedded server's data")
    redis_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="TCP port of the embedded server on 127.0.0.1; unset: unix socket only",
    )
    redis_maxmemory_mb: int = Field(1024, ge=64, description="memory bound of the embedded server")

    # HTTP front
    host: str = Field("127.0.0.1", description="address the gateway listens on")
    port: int = Field(8080, ge=0, le=65535, description="port the gateway listens on; 0: any")
    gateways: int = Field(1, ge=1, le=256, description="gateway processes on that one port")
    max_request_mb: int = Field(32, ge=1, description="largest request body")
    max_in_flight: int = Field(
        10_000, ge=1, description="requests one gateway process waits for at once"
    )
    reply_ttl_s: int = Field(60, ge=1, description="life of the reply to a synchronous request")

    # workers
    models: Path = Field(Path("models"), description="folder of the model repository")
    workers: int = Field(1, ge=0, le=1024, description="workers that `npufleet up` starts")
    worker_name: str | None = Field(
        None,
        pattern=_NAME,
        description="stable name of a worker; unset: the host name",
    )
    worker_http_host: str = Field("127.0.0.1", description="address of a worker's own HTTP port")
    worker_http_port: int = Field(
        9100, ge=0, le=65535, description="a worker's own HTTP port; 0: any"
    )
    decode_threads: int = Field(
        2, ge=1, le=256, description="threads that decode images and check tensors"
    )
    arena_mb: int = Field(
        256, ge=1, description="shared memory for the decoded rows of one model; used as needed"
    )
    batch_timeout_s: float = Field(
        120.0, gt=0, description="how long a batch may run before its executor is killed"
    )
    max_suspicions: int = Field(
        3, ge=1, description="executors that may die under a request before it is buried"
    )
    max_image_pixels: int = Field(
        50_000_000, ge=1, description="largest picture, in pixels, before decoding"
    )
    direct_reply_ttl_s: int = Field(
        24 * 3600, ge=1, description="life of a reply when the entry does not say"
    )
    max_reply_ttl_s: int = Field(
        7 * 24 * 3600, ge=1, description="ceiling of reply_ttl_s in an entry"
    )
    lease_s: float = Field(15.0, ge=1, description="how long an entry is held without renewal")
    max_deliveries: int = Field(10, ge=1, description="deliveries after which an entry is buried")
    max_dead: int = Field(10_000, ge=1, description="dead letters kept per model")

    # every process
    drain_s: float = Field(20.0, ge=0, description="limit on finishing what was begun at SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def server_url(self) -> str:
        """The server of a process that is started by itself, without `npufleet up`."""
        return self.redis_url or DEFAULT_URL

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` passes in counts: it has read file and environment itself."""
        return (init_settings,)


def load(
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """The settings of this process: `overrides` (command line) over environment over file.

    `file` defaults to `npufleet.toml` in the working folder, which need not exist. Raises
    ConfigurationError that names the setting, where it came from and the nearest known name.
    """
    values = _from_file(file) | _from_environment(os.environ if environ is None else environ)
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    try:
        return Settings(**values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}"
            for e in error.errors(include_url=False)
        ]
        raise ConfigurationError("settings: " + "; ".join(lines)) from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or _OWN_WORDS.fullmatch(name):
            continue
        # A service called "npufleet" makes Kubernetes set NPUFLEET_PORT, too: to tcp://…
        if _KUBERNETES.fullmatch(name) or text.startswith(("tcp://", "udp://")):
            continue
        field = name.removeprefix(PREFIX).lower()
        _check_known(field, f"environment variable {name}", PREFIX, upper=True)
        values[field] = text
    return values


def _from_file(file: Path | None) -> dict[str, Any]:
    path = Path(FILE) if file is None else file
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file is None:
            return {}
        raise ConfigurationError(f"settings file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"settings file {path} cannot be read: {error}") from None
    for name in values:
        _check_known(name, f"{path}: {name}", "")
    return values


def _check_known(field: str, what: str, prefix: str, *, upper: bool = False) -> None:
    if field in Settings.model_fields:
        return
    near = difflib.get_close_matches(field, Settings.model_fields, n=1, cutoff=0.5)
    hint = ""
    if near:
        hint = f"; did you mean {prefix}{near[0].upper() if upper else near[0]}?"
    raise ConfigurationError(f"{what} is not a setting{hint}")
