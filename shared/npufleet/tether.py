"""Ties a process to its parent, so that no child outlives a parent that was killed.

    python -m npufleet.tether PARENT_PID COMMAND...    for programs that are not ours
    tether(parent_pid)                                 for our own, first thing in the child

The kernel sends the signal, even when the parent got SIGKILL. It watches the *thread* that forked:
start tethered children from a thread that lives as long as the process does, such as the main one.
Linux alone can do it; elsewhere nothing is tied, which the log says. Knows nothing of what it ties.
"""

import ctypes
import logging
import os
import signal
import sys

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def tether(parent_pid: int, sig: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `sig` to this process when its parent, `parent_pid`, dies.

    The setting survives exec and is not inherited by children. Where the parent has died already,
    the signal comes at once. Raises OSError when the kernel refuses.
    """
    if sys.platform != "linux":
        logger.warning("cannot be tied to the parent: only Linux can", extra={"parent": parent_pid})
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call above: then nobody would send the signal.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)


def tethered(*command: str) -> list[str]:
    """`command` as a command line that ties itself to the calling process."""
    # -P: a folder in the working folder must not stand in for a module.
    return [sys.executable, "-P", "-m", "npufleet.tether", str(os.getpid()), *command]


if __name__ == "__main__":
    tether(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
