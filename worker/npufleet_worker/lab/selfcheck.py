"""The command `npufleet selfcheck`. Knows nothing of how a model is checked."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from npufleet_worker.lab.numerics import Difference, Finding, Tolerance
    from npufleet_worker.lab.trial import Room
    from npufleet_worker.repository import ModelConfig

_SEED = 20


def selfcheck(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
    models: Annotated[
        Path | None, typer.Option(help="Folder of the model repository (default: models).")
    ] = None,
    rows: Annotated[int, typer.Option(min=2, max=4096, help="Different rows to make up.")] = 8,
    samples: Annotated[
        list[Path] | None,
        typer.Option(help="File of rows to use instead: .npy, .npz or a picture; repeatable."),
    ] = None,
    tolerance: Annotated[
        tuple[float, float],
        typer.Option(metavar="REL ABS", help="What is as good as equal: relative and absolute."),
    ] = (1e-4, 1e-5),
    as_json: Annotated[bool, typer.Option("--json", help="JSON rather than a table.")] = False,
) -> None:
    """Check that a row's answer does not depend on the batch it is in.

    Loads the model on this machine's device and runs the same rows alone and in every position of
    every gear, beside different neighbours and beside padding. Reports the largest differences.

    Exit code: 0 when all are within the tolerance, 1 when not or when the model cannot be run.

    Examples:

      npufleet selfcheck efficientnet-lite0

      npufleet selfcheck bert --samples rows.npz --tolerance 1e-2 1e-3

      npufleet selfcheck double --rows 16 --json
    """
    import uvloop

    from npufleet.settings import load
    from npufleet_worker.lab.numerics import Tolerance
    from npufleet_worker.lab.trial import Room, find

    settings = load({"models": models})
    config = find(settings.models, model)
    limits = Tolerance(*tolerance)
    room = Room(settings.arena_mb << 20, settings.max_image_pixels, settings.batch_timeout_s)
    findings, count = uvloop.run(_findings(config, room, samples or rows, limits))
    good = all(finding.good for finding in findings)
    if as_json:
        document = {
            "model": config.name,
            "version": config.version,
            "rows": count,
            "tolerance": asdict(limits),
            "good": good,
            "gears": [{**asdict(finding), "good": finding.good} for finding in findings],
        }
        print(json.dumps(_finite(document), indent=2))
    else:
        _print_table(findings)
        print(_verdict(findings, limits, f"{config.name}/{config.version}: {count} rows"))
    if not good:
        raise typer.Exit(1)


async def _findings(
    config: "ModelConfig", room: "Room", given: Sequence[Path] | int, tolerance: "Tolerance"
) -> "tuple[list[Finding], int]":
    from npufleet.errors import ConfigurationError
    from npufleet_worker.lab import numerics
    from npufleet_worker.lab.progress import bar
    from npufleet_worker.lab.samples import from_files, made_up
    from npufleet_worker.lab.trial import open_trial

    async with open_trial(config, room) as trial:
        if isinstance(given, int):
            found = made_up(trial.signature, image=config.image, count=given, seed=_SEED)
        else:
            found = from_files(trial.signature, given)
        if len(found) < 2:
            raise ConfigurationError("a row has no neighbours: give at least two")
        placed = trial.place(found)
        with bar(numerics.runs(trial.gears, len(placed))) as advance:
            findings = await numerics.examine(trial, placed, tolerance=tolerance, advance=advance)
    return findings, len(placed)


def _print_table(findings: "Sequence[Finding]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("gear", "output", "rows", "abs", "rel", "neighbours", "padding", "NaN/Inf", "")
    for finding in findings:
        table.add_row(
            str(finding.gear),
            escape(finding.output),
            str(finding.compared),
            _number(finding.alone.absolute),
            _number(finding.alone.relative),
            _number(finding.neighbours.absolute),
            _number(finding.padding.absolute),
            str(finding.not_finite),
            "ok" if finding.good else "DIFFERS",
        )
    Console().print(table)


def _number(value: float) -> str:
    return f"{value:.2g}"


def _verdict(findings: "Sequence[Finding]", tolerance: "Tolerance", what: str) -> str:
    allowed = f"rtol {tolerance.relative:g}, atol {tolerance.absolute:g}"
    bad = [f for f in findings if not f.good]
    lines = [
        f"{what}; the same in every position of every gear ({allowed})"
        if not bad
        else f"{what}; DIFFERENT in gears {sorted({f.gear for f in bad})} ({allowed})",
        _influence("neighbours", [f.neighbours for f in findings]),
        _influence("padding", [f.padding for f in findings]),
    ]
    if any(f.not_finite for f in findings):
        lines.append("some answers are NaN or infinite; the table counts them")
    return "\n".join(lines)


def _influence(of: str, seen: "Sequence[Difference]") -> str:
    worst = max(d.absolute for d in seen)
    if worst == 0:
        return f"rows do not depend on {of}: equal bit for bit"
    if not any(d.outside for d in seen):
        return f"rows depend on {of} within the tolerance only: by at most {_number(worst)}"
    return f"rows DEPEND on {of}: by up to {_number(worst)}"


def _finite(value: object) -> object:
    """For JSON, which has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return "Infinity" if value == float("inf") else value
