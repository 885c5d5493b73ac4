"""The command `npufleet gateway`: settings and logs, then one process or several.

Knows nothing of what a gateway does.
"""

from typing import Annotated

import typer


def gateway(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes on that one port.")] = None,
    redis: Annotated[str | None, typer.Option(help="redis://, rediss:// or unix:// URL.")] = None,
) -> None:
    """Serve HTTP: requests go onto the queue, replies come back from it.

    What is not given here comes from NPUFLEET_* and from npufleet.toml.

    Example: npufleet gateway --redis redis://127.0.0.1:6379/0 --port 8080 --processes 2
    """
    # Here, so that `npufleet --help` need not import the whole of it
    from npufleet import logs, settings

    found = settings.load({"host": host, "port": port, "gateways": processes, "redis_url": redis})
    logs.setup(found.log_level, found.log_format)
    if found.gateways > 1:
        from npufleet_gateway import processes as several

        several.run(found)
    else:
        from npufleet_gateway import process

        process.run(found)
