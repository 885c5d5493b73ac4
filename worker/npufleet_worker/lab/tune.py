"""The command `npufleet tune`. Knows nothing of how a model is measured or a setting is chosen."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from npufleet_worker.lab.experiment import Findings
    from npufleet_worker.lab.tuning import Verdict


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
    slo_p99_ms: Annotated[
        float, typer.Option("--slo-p99-ms", min=0.1, help="What the slowest 1% may take.")
    ],
    models: Annotated[
        Path | None, typer.Option(help="Folder of the model repository (default: models).")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write/--dry-run", help="Put the setting into model.toml, or do not.")
    ] = True,
    chart: Annotated[Path | None, typer.Option(help="Draw the curves to this SVG file.")] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Largest batch to try (default: the gears, or 32)."),
    ] = None,
    samples: Annotated[
        list[Path] | None,
        typer.Option(help="File of rows to measure with: .npy, .npz or a picture; repeatable."),
    ] = None,
    window_s: Annotated[
        float, typer.Option(min=0.001, max=60, help="Length of a measuring window.")
    ] = 0.5,
    agreement: Annotated[
        float, typer.Option(min=0, help="How far three windows in a row may be apart.")
    ] = 0.1,
    limit_s: Annotated[
        float, typer.Option(min=0.01, max=3600, help="Limit on measuring one gear.")
    ] = 15.0,
    requests: Annotated[
        int, typer.Option(min=200, max=1_000_000, help="Requests of one simulation.")
    ] = 4000,
    rehearse_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Length of the proof in real time; 0: none.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON rather than tables.")] = False,
) -> None:
    """Find the batching settings that serve most within a latency bound, and write them down.

    Measures the model on this machine's device, gear by gear, then simulates the batcher under
    random arrivals with every max_batch_size and max_wait_ms, takes the setting with the largest
    rate whose p99 stays within the bound, and proves it in real time. Latency counts from the
    arrival in the worker to the end of the run.

    Exit code: 0 when a setting was found, 1 when none meets the bound.

    Examples:

      npufleet tune efficientnet-lite0 --slo-p99-ms 50

      npufleet tune bert --slo-p99-ms 20 --samples rows.npz --dry-run --chart curve.svg

      npufleet tune double --slo-p99-ms 5 --max-rows 128 --json
    """
    import uvloop

    from npufleet.settings import load
    from npufleet_worker.lab import experiment, report
    from npufleet_worker.lab.measuring import Care
    from npufleet_worker.lab.progress import bar
    from npufleet_worker.lab.trial import Room, find
    from npufleet_worker.lab.tuning import Goal

    settings = load({"models": models})
    config = find(settings.models, model)
    plan = experiment.Plan(
        Goal(slo_p99_ms, requests),
        Care(window_s, agreement, limit_s),
        max_rows,
        tuple(samples or ()),
        rehearse_s,
    )
    room = Room(settings.arena_mb << 20, settings.max_image_pixels, settings.batch_timeout_s)
    findings = uvloop.run(experiment.tune(config, plan, room, bar))
    chosen = _taken(findings)
    path = settings.models / config.name / "model.toml"
    if not as_json:
        report.show(config, findings, plan.goal)  # first: writing may fail
    if chart is not None and findings.choice is not None:
        chart.write_text(report.chart(config, findings, plan.goal), encoding="utf-8")
    if chosen and write:
        _write(path, chosen)
    if as_json:
        written = str(path) if chosen and write else None
        print(json.dumps(report.document(config, findings, plan.goal, written=written), indent=2))
    elif chosen:
        print(f"written to {path}" if write else f"nothing was written to {path} (--dry-run)")
    if chosen is None:
        raise typer.Exit(1)


def _taken(findings: "Findings") -> "Verdict | None":
    """The chosen setting, where it did in real time what it promised."""
    if findings.rehearsal is not None and findings.rehearsal.confirmed is None:
        return None
    return findings.choice.chosen if findings.choice else None


def _write(path: Path, chosen: "Verdict") -> None:
    from npufleet_worker.lab import batching_section

    policy = chosen.policy
    batching_section.write(
        path, max_batch_size=policy.max_batch_size, max_wait_ms=policy.max_wait_ms
    )
