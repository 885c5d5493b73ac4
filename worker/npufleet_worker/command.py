"""The command `npufleet worker`. Knows nothing of what a worker does."""

from pathlib import Path
from typing import Annotated

import typer


def worker(
    models: Annotated[
        Path | None, typer.Option(help="Folder of the model repository (default: models).")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(help="URL of the Redis server (default: redis://127.0.0.1:6379/0)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Stable name of this worker (default: the host name).")
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(help="Port of /livez, /readyz and /metrics; 0: any (default: 9100)."),
    ] = None,
) -> None:
    """Take requests off the queue, batch them and run them on this machine's device.

    Every option is a setting, too: NPUFLEET_MODELS in the environment, models in npufleet.toml.

    Examples:

      npufleet worker --redis redis://queue.example:6379/0

      npufleet worker --models /srv/models --name rack1-npu0 --http-port 9101
    """
    import uvloop

    from npufleet import logs
    from npufleet.process import calm_collector
    from npufleet.settings import load
    from npufleet_worker.supervisor import run

    settings = load(
        {"models": models, "redis_url": redis, "worker_name": name, "worker_http_port": http_port}
    )
    logs.setup(settings.log_level, settings.log_format)
    calm_collector()
    uvloop.run(run(settings, redis_url=settings.server_url))
