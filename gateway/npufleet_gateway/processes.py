"""Several gateway processes on one port, kept alive by a parent that serves nothing itself.

The kernel spreads connections over them (SO_REUSEPORT). Knows nothing of what they serve.
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping

from npufleet.child import Child, Program
from npufleet.errors import NpufleetError
from npufleet.fleet import free_port
from npufleet.settings import PREFIX, Settings
from npufleet_gateway.metrics import FOLDER_VARIABLE

_STOP_MARGIN_S = 5.0
_COMMAND = (sys.executable, "-P", "-m", "npufleet_gateway")


def run(settings: Settings) -> None:
    """Run as many processes as the settings say until a signal; a second one ends them at once.

    Raises ConfigurationError when the port is in use, NpufleetError when a process keeps failing.
    """
    port = free_port(settings)
    metrics_folder = tempfile.mkdtemp(prefix="npufleet-metrics-")
    try:
        with _reserved(settings.host, port):
            asyncio.run(_keep(settings, _environ(settings, port, metrics_folder)))
    finally:
        shutil.rmtree(metrics_folder, ignore_errors=True)


def _reserved(host: str, port: int) -> socket.socket:
    """A socket that is bound and never listens: the port stays ours while children come and go."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, port))
    return reserved


def _environ(settings: Settings, port: int, metrics_folder: str) -> Mapping[str, str]:
    given = settings.model_dump(mode="json", include=settings.model_fields_set) | {"port": port}
    own = {
        f"{PREFIX}{name.upper()}": str(value) for name, value in given.items() if value is not None
    }
    return {**os.environ, **own, FOLDER_VARIABLE: metrics_folder}


async def _keep(settings: Settings, environ: Mapping[str, str]) -> None:
    children = [
        Child(Program(f"gateway-{number}", _COMMAND, environ), _print)
        for number in range(1, settings.gateways + 1)
    ]
    stop = asyncio.Event()

    def on_signal() -> None:
        for child in children:
            child.kill() if stop.is_set() else child.stop()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    keepers = [asyncio.create_task(child.keep()) for child in children]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    failed = [task.exception() for task in done if task is not stopped and not task.cancelled()]
    await _end(children, keepers, limit_s=settings.drain_s + _STOP_MARGIN_S)
    for error in failed:
        if error is not None:
            raise error if isinstance(error, NpufleetError) else NpufleetError(str(error))


async def _end(children: list[Child], keepers: list[asyncio.Task[None]], *, limit_s: float) -> None:
    for child in children:
        child.stop()
    _, late = await asyncio.wait(keepers, timeout=limit_s)
    for child in children if late else ():
        child.kill()
    if late:
        await asyncio.wait(late, timeout=_STOP_MARGIN_S)


def _print(_: str, line: str) -> None:
    print(line, file=sys.stderr, flush=True)
