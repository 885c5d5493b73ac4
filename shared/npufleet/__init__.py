"""The client, the wire format and the command line of npufleet: what every part may import."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npufleet.aio import AsyncClient
    from npufleet.client import Client
    from npufleet.result import Result

__all__ = ["AsyncClient", "Client", "Result", "__version__"]

__version__ = "0.1.0"

_HOMES = {"AsyncClient": "aio", "Client": "client", "Result": "result"}


def __getattr__(name: str) -> Any:
    """The client's classes on first use: importing the package loads neither numpy nor redis."""
    if name not in _HOMES:
        raise AttributeError(f"module 'npufleet' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"npufleet.{_HOMES[name]}"), name)
