"""`npufleet submit`: files onto the queue, one result per file, resumable."""

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from npufleet.client import Client
    from npufleet.signature import Signature
    from npufleet.submission import Record


def submit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Files, folders or quoted patterns."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Append one JSON line per file; what it holds already is not sent again."
        ),
    ] = None,
    priority: Annotated[str, typer.Option(help="high, normal or low.")] = "normal",
    in_flight: Annotated[
        int, typer.Option(min=1, max=10_000, help="Files under way at once.")
    ] = 64,
    redis: Annotated[
        str | None,
        typer.Option(help="URL of the queue; else that of `npufleet up` in this folder."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Without --out: JSON lines rather than a table.")
    ] = False,
) -> None:
    """Send files to a model over the queue; no gateway is needed.

    Pictures go to models that take one, .npy files to any model (the first axis counts the rows).
    Folders are searched for such files. Started again with the same --out, it sends what is
    missing and what had failed.

    Exit code: 0 when every file was answered, 1 when some failed, 2 for wrong usage.

    Examples:

      npufleet submit efficientnet-lite0 photos/

      npufleet submit efficientnet-lite0 'photos/**/*.jpg' --out results.jsonl --priority low

      npufleet submit double rows.npy --json --redis redis://queue.example:6379/0
    """
    from npufleet.client import Client
    from npufleet.keys import LANES
    from npufleet.submission import Submission, find, suffixes

    if priority not in LANES:
        raise typer.BadParameter(f"{priority!r} is not one of {', '.join(LANES)}")
    url, prefix = _queue(redis)
    with Client(url, prefix=prefix) as client, _sink(out, as_json=as_json) as (done, put):
        signature = _signature(client, model)
        try:
            found = find(files, suffixes(signature))
        except FileNotFoundError as error:
            raise typer.BadParameter(str(error)) from None
        wanted = [file for file in found if file not in done]
        run = Submission(signature, put, skipped=len(found) - len(wanted))
        values = run.values(wanted)
        results = client.map(model, values, in_flight=in_flight, priority=priority)
        try:
            with _progress(len(wanted)) as advance:
                for index, result in results:
                    run.answered(index, result)
                    advance(str(run))
        except KeyboardInterrupt:
            print(f"interrupted: {run}", file=sys.stderr)
            if out is not None:
                print("started again with the same --out, it goes on from here", file=sys.stderr)
            raise typer.Exit(130) from None
    print(run, file=sys.stderr)
    if run.failed:
        raise typer.Exit(1)


def _queue(redis: str | None) -> tuple[str, str]:
    """URL and key prefix: as the settings say, else of the fleet that runs in this folder."""
    from npufleet.embedded import running_url
    from npufleet.errors import ConfigurationError
    from npufleet.settings import load

    settings = load({"redis_url": redis})
    url = settings.redis_url or running_url(settings.state)
    if url is None:
        raise ConfigurationError(
            f"no fleet runs on {settings.state}: start one with `npufleet up`, or name its queue "
            "with --redis"
        )
    return url, settings.prefix


def _signature(client: "Client", model: str) -> "Signature":
    from npufleet.errors import ModelNotFound

    models = client.models()
    if model not in models:
        raise ModelNotFound(f"there is no model {model!r}; models: {', '.join(sorted(models))}")
    return models[model].signature


@contextlib.contextmanager
def _sink(
    out: Path | None, *, as_json: bool
) -> Iterator[tuple[Collection[str], Callable[["Record"], None]]]:
    """The files that need not be sent, and where the records go."""
    if out is not None:
        from npufleet.journal import Journal

        with Journal(out) as journal:
            yield journal.done, journal.append
    elif as_json:
        yield (), lambda record: print(json.dumps(record, ensure_ascii=False), flush=True)
    else:
        records: list[Record] = []
        try:
            yield (), records.append
        finally:
            _print_table(records)


def _print_table(records: "Sequence[Record]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("file", "prediction")
    for line in sorted(records, key=lambda line: str(line["file"])):
        table.add_row(escape(line["file"]), escape(shown(line)))
    if records:
        Console().print(table)


def shown(line: "Record") -> str:
    """What a person wants to see of a record, in a line."""
    if not line["ok"]:
        return f"{line['code']}: {line['error']}"
    rows = line["predictions"]
    classes = [row[0] for row in rows if isinstance(row, list) and row and isinstance(row[0], dict)]
    if classes and len(classes) == len(rows):
        return "; ".join(f"{top['label']} {top['probability']:.3f}" for top in classes)
    text = json.dumps(rows)
    return text if len(text) <= 60 else f"{text[:60]}…"


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)
