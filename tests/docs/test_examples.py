"""What README.md and docs/ show is run on a real fleet, and does what it says there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.examples import Step, blocks, run_session, steps
from tests.support.fleets import RunningFleet


def test_the_python_example_of_the_readme_runs(
    fleet: RunningFleet, folder: Path, environ: dict[str, str]
) -> None:
    """Its assertions hold."""
    for code in blocks("README.md", "python"):
        code = code.replace("redis://localhost:6379", fleet.redis_url)
        subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environ, check=True, timeout=60
        )


@pytest.mark.system
def test_the_console_examples_of_the_readme_print_what_they_show(
    fleet: RunningFleet, folder: Path, environ: dict[str, str]
) -> None:
    """curl and `npufleet submit`, as a reader would paste them."""
    session = [
        Step(step.command.replace("http://127.0.0.1:8080", fleet.url), step.output)
        for block in blocks("README.md", "console")
        for step in steps(block)
    ]

    run_session(session, cwd=folder, environ=environ)


@pytest.mark.system
def test_the_redis_cli_session_of_the_protocol_prints_what_it_shows(
    folder: Path, environ: dict[str, str]
) -> None:
    """Somebody without Python can follow it line by line."""
    session = [step for block in blocks("docs/protocol.md", "console") for step in steps(block)]

    run_session(session, cwd=folder, environ=environ)


@pytest.mark.system
def test_the_javascript_producer_of_the_protocol_gets_its_answer(
    fleet: RunningFleet, folder: Path
) -> None:
    """A producer in another language, with nothing of ours but the document."""
    [code] = blocks("docs/protocol.md", "js")
    (folder / "producer.mjs").write_text(code, encoding="utf-8")

    done = subprocess.run(
        ["node", "producer.mjs", fleet.redis_url.removeprefix("unix://")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout == "[ 3, 5, 7, 9 ]\n", done.stderr
