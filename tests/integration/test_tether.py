"""No child outlives a parent that was killed."""

import signal
import subprocess
import sys

import pytest

from tests.support.processes import running_python, wait_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child")

START_FOREIGN = """
import subprocess, time
from npufleet.tether import tethered
print(subprocess.Popen(tethered("sleep", "600")).pid, flush=True)
time.sleep(600)
"""

START_OWN = """
import os, time
from npufleet.tether import tether
parent = os.getpid()
child = os.fork()
if child == 0:
    tether(parent)
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("code", [START_FOREIGN, START_OWN], ids=["foreign program", "own child"])
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_child_ends_with_its_parent(code: str, sig: signal.Signals) -> None:
    """Whatever ends the parent, SIGKILL included, the kernel ends the child."""
    with running_python(code) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())

        parent.send_signal(sig)
        parent.wait(timeout=10)

        wait_gone(child)


def test_a_child_whose_parent_died_first_ends_at_once() -> None:
    """The gap between fork and prctl is closed: here the expected parent is long gone."""
    gone = subprocess.Popen(["true"])
    gone.wait(timeout=10)

    late = subprocess.run(
        [sys.executable, "-m", "npufleet.tether", str(gone.pid), "sleep", "600"],
        timeout=10,
        check=False,
    )

    assert late.returncode == -signal.SIGTERM


def test_the_command_keeps_its_arguments_and_its_exit_code() -> None:
    """Tying is all that it does."""
    code = "import os; from npufleet.tether import tethered; c = tethered('sh', '-c', 'exit 7'); "
    with running_python(
        code + "os._exit(os.waitstatus_to_exitcode(os.spawnv(os.P_NOWAIT, c[0], c) "
        "and os.wait()[1]))"
    ) as parent:
        assert parent.wait(timeout=10) == 7
