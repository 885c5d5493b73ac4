"""The examples in the documentation: found by the language of their fence, and run."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_MARK = "\x1e"


def blocks(document: str, language: str) -> list[str]:
    """The contents of all ```language fences of a document of this repository."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, f"{document} has no {language} example any more"
    return found


@dataclass(frozen=True)
class Step:
    """A command after `$ `, and what it must print; `...` stands for anything."""

    command: str
    output: str

    def matches(self, printed: str) -> bool:
        pattern = ".*".join(re.escape(part) for part in self.output.strip().split("..."))
        return re.fullmatch(pattern + r"\s*", printed, re.DOTALL) is not None


def steps(session: str) -> list[Step]:
    """The commands of a console session."""
    parts = re.split(r"^\$ ", session, flags=re.MULTILINE)
    assert not parts[0].strip(), "a session begins with a command"
    return [Step(*(*part.split("\n", 1), "")[:2]) for part in parts[1:]]


def run_session(session: list[Step], *, cwd: Path, environ: Mapping[str, str]) -> None:
    """Runs the commands in one shell; fails on the first that prints something else."""
    script = "".join(f"{step.command}\nprintf '{_MARK}'\n" for step in session)
    done = subprocess.run(
        ["bash", "-c", script], cwd=cwd, env=dict(environ), capture_output=True, timeout=100
    )
    printed = done.stdout.decode(errors="replace").split(_MARK)
    for step, output in zip(session, printed, strict=False):
        assert step.matches(output), (
            f"$ {step.command}\nshould print\n{step.output}\nand printed\n{output}\n"
            f"{done.stderr.decode(errors='replace')}"
        )
    assert len(printed) == len(session) + 1
