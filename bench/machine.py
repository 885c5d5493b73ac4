"""What processes and the machine have used so far, from /proc. Knows nothing of what they do."""

import ctypes
import fcntl
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psutil

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds so far: by role, and by the whole machine."""

    by_role_s: Mapping[str, float]
    machine_s: float

    def since(self, before: "CpuUse") -> "CpuUse":
        by_role = {
            role: used - before.by_role_s.get(role, 0.0) for role, used in self.by_role_s.items()
        }
        return CpuUse(by_role, self.machine_s - before.machine_s)


def cpu_use(roles: Mapping[str, Iterable[int]]) -> CpuUse:
    """The use of these processes, by role; NaN for a role of which one has gone."""
    by_role = {role: sum(map(_used_s, pids)) for role, pids in roles.items()}
    machine = psutil.cpu_times()
    return CpuUse(by_role, sum(machine) - machine.idle - machine.iowait)


def _used_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return math.nan
    return float(times.user + times.system)


def by_role(root_pid: int, role_of: Callable[[list[str]], str]) -> dict[str, list[int]]:
    """The process and all that it has started, by what their command lines say they are."""
    roles: dict[str, list[int]] = {}
    root = psutil.Process(root_pid)
    for process in (root, *root.children(recursive=True)):
        try:
            roles.setdefault(role_of(process.cmdline()), []).append(process.pid)
        except psutil.Error:
            continue
    return roles


def wait_quiet(limit_cores: float, *, patience_s: float) -> float:
    """Wait until the machine uses less than `limit_cores`, or for so long; what it last used."""
    end_s = time.monotonic() + patience_s
    while True:
        busy = psutil.cpu_percent(0.5) / 100 * (os.cpu_count() or 1)
        if busy < limit_cores or time.monotonic() > end_s:
            return busy


def isolate() -> bool:
    """Go on in a network namespace that has nothing but loopback; False where that is refused.

    Some servers open internal ports on all interfaces whatever they are told (Ray).
    """
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    return True
