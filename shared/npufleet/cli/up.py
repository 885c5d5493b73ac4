"""`npufleet up`: everything on this machine, with one command, until Ctrl-C."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from npufleet.settings import Settings

# The sample model of the repository, and a picture of its own to try it with.
_SAMPLE_MODEL = "efficientnet-lite0"
_SAMPLE_IMAGE = Path("images/coffee.png")


def up(
    models: Annotated[
        Path | None, typer.Option(help="Folder of the model repository (default: models).")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0: any free one (default: 8080).")
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(help="Gateway processes on that port (default: 1).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers to start (default: 1).")] = None,
    redis: Annotated[
        str | None,
        typer.Option(help="URL of a Redis or Valkey server to use, rather than an embedded one."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder of the embedded server's data (default: .npufleet)."),
    ] = None,
) -> None:
    """Start the queue, workers and gateways on this machine; Ctrl-C stops them all.

    Every option is a setting, too: NPUFLEET_PORT in the environment, port in npufleet.toml.

    Examples:

      npufleet up

      npufleet up --models /srv/models --workers 2 --port 9000

      npufleet up --redis redis://queue.example:6379/0
    """
    from npufleet import logs
    from npufleet.errors import ConfigurationError
    from npufleet.fleet import Fleet, free_port
    from npufleet.settings import load

    options = {"models": models, "host": host, "port": port, "gateways": gateways}
    options |= {"workers": workers, "redis_url": redis, "state": state}
    settings = load(options)
    logs.setup(settings.log_level, settings.log_format)
    if not any(settings.models.glob("*/*/model.*")):
        raise ConfigurationError(
            f"no model in {settings.models}: --models names a folder that holds "
            "<name>/<version>/model.onnx"
        )
    chosen_port = free_port(settings)
    fleet = Fleet(settings, port=chosen_port, on_line=_printer(json=settings.log_format == "json"))
    begun = time.monotonic()
    print(_starting(settings), file=sys.stderr, flush=True)

    def on_ready() -> None:
        print(f"ready after {time.monotonic() - begun:.1f} s\n", file=sys.stderr)
        print(welcome(settings, port=chosen_port, redis_url=fleet.redis_url), flush=True)

    asyncio.run(fleet.run(on_ready))
    print("stopped", file=sys.stderr)


def welcome(settings: "Settings", *, port: int, redis_url: str) -> str:
    """What a person needs to know about a fleet that is ready, with a line to paste."""
    from npufleet.endpoint import shown
    from npufleet.fleet import reachable

    address = reachable(settings.host)
    base = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    lines = [
        f"npufleet serves {settings.models} on {base}",
        f"  infer    {base}/v1/infer",
        f"  health   {base}/health",
        f"  metrics  {base}/metrics",
        f"  queue    {shown(redis_url)}",
    ]
    image = settings.models / _SAMPLE_MODEL / _SAMPLE_IMAGE
    if image.is_file():
        target = f"{base}/v1/models/{_SAMPLE_MODEL}/infer"
        lines += ["", "Try it:"]
        lines += [f"  curl -s --data-binary @{image} -H 'Content-Type: image/png' {target}"]
    return "\n".join([*lines, "", "Ctrl-C stops everything."])


def _starting(settings: "Settings") -> str:
    queue = "" if settings.redis_url else "the queue (Valkey), "
    return (
        f"starting {queue}{_count(settings.workers, 'worker')} and "
        f"{_count(settings.gateways, 'gateway')} for the models in {settings.models} ..."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _printer(*, json: bool) -> Callable[[str, str], None]:
    """Shows the lines of the children on stderr: as they are where they are JSON."""

    def show(name: str, line: str) -> None:
        print(line if json else f"{name} | {line}", file=sys.stderr, flush=True)

    return show
