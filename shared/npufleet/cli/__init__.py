"""The command `npufleet`: finds the commands and prints their errors as one line.

A command is a function with typer's annotations. Those of this package stand in `OWN`; those of
other layers are entry points, so that this layer imports none of them. Only the command that
was asked for is imported, and command modules import what is heavy inside their functions. Knows
nothing of what the commands do.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

from npufleet import __version__
from npufleet.errors import NpufleetError

GROUP = "npufleet.commands"
OWN = tuple(
    EntryPoint(name, f"npufleet.cli.{name}:{name}", GROUP) for name in ("up", "demo", "submit")
)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 when it worked, 1 on an error of ours, 2 on wrong usage.

    `NPUFLEET_DEBUG=1` shows the traceback of an error.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        import typer  # noqa: F401  # only to see whether the extra is there
    except ImportError:
        sys.exit("error: the command line needs an extra: pip install 'npufleet[cli]'")
    try:
        _app(words)(args=words, prog_name="npufleet")
    except (NpufleetError, ModuleNotFoundError) as error:
        if os.environ.get("NPUFLEET_DEBUG") == "1" or _is_ours(error):
            raise
        sys.exit(f"error: {_sentence(error, words)}")


def _app(words: list[str]) -> Callable[..., Any]:
    """The typer application; with the one command that `words` names, else with all of them."""
    import typer

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    def show(asked: bool) -> None:
        if asked:
            typer.echo(f"npufleet {__version__}")
            raise typer.Exit

    @app.callback()
    def _options(
        version: Annotated[
            bool, typer.Option("--version", callback=show, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """Model inference as a fleet of workers on a Redis queue."""

    commands = _commands()
    if words and words[0] in commands:
        app.command(words[0])(commands[words[0]].load())
    else:
        for name, entry in sorted(commands.items()):
            app.command(name)(_listed(entry))
    return app


def _commands() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in (*OWN, *entry_points(group=GROUP))}


def _listed(entry: EntryPoint) -> Callable[..., None]:
    """The command for `--help`, where one that lacks its extra is listed as such."""
    try:
        command: Callable[..., None] = entry.load()
    except ModuleNotFoundError:

        def command() -> None:
            """Never called: the one that is asked for is loaded in earnest."""

        command.__doc__ = f"Not installed: pip install 'npufleet\\[{_extra(entry)}]'."
    return command


def _is_ours(error: Exception) -> bool:
    """Whether a module of npufleet itself is missing, which no extra will bring."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("npufleet")


def _sentence(error: Exception, words: list[str]) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return str(error)
    entry = _commands().get(words[0] if words else "")
    return f"{error}, which comes with an extra: pip install 'npufleet[{_extra(entry)}]'"


def _extra(entry: EntryPoint | None) -> str:
    """The extra that a command needs: `worker` for those of npufleet_worker, and so on."""
    if entry is None or entry in OWN:
        return "cli"
    return entry.module.partition(".")[0].removeprefix("npufleet_")
