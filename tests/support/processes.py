"""Real processes for the tests: started, watched and never left behind."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.support.waiting import wait_until


@contextmanager
def running_python(code: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python process that runs `code`; its output is a pipe of text. Killed at the end."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_gone(pid: int, *, limit_s: float = 10.0) -> None:
    """Wait until no process has this id (a zombie counts as gone)."""
    wait_until(lambda: not is_alive(pid), what=f"process {pid} to end", limit_s=limit_s)


def is_alive(pid: int) -> bool:
    """Whether a process with this id runs."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
