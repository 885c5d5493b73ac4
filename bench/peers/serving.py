"""Installs a peer, starts it, waits for a right answer, and stops it with all that it has started.

Everything is on 127.0.0.1. Knows nothing of loads.
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from bench import models
from bench.fleet import role_of
from bench.machine import by_role
from bench.peers.catalog import OURS, Peer
from bench.wires import Checker, requests

HERE = Path(__file__).resolve().parent

_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 15.0
_POLL_S = 0.1
_PORTS = 4
"""Ports in a row: some servers take those after the one that they are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a peer is to serve: model processes, threads in each, batches, our gateways."""

    folder: Path
    workers: int = 1
    threads: int = 1
    max_batch: int = 32
    max_wait_ms: float = 5.0
    gateways: int = 1


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A peer that has answered. Its processes are those with its mark in their environment."""

    pid: int
    url: str
    wire: str
    peer: Peer
    mark: str

    def roles(self) -> dict[str, list[int]]:
        """Its processes: ours by what they do, of others all together."""
        if self.peer.name == OURS:
            return by_role(self.pid, role_of)
        return {"peer": [process.pid for process in marked(self.mark)]}


def install(peer: Peer, folder: Path) -> Path:
    """The Python of the peer's own environment, made when it is not there or its pins changed."""
    if peer.requirements is None:
        return Path(sys.executable)
    environment = folder / "peers" / peer.requirements
    python, stamp = environment / "bin/python", environment / "installed.txt"
    file = HERE / "requirements" / f"{peer.requirements}.txt"
    if not stamp.exists() or stamp.read_text() != file.read_text():
        print(f"installing {peer.name} ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, "-r", file], check=True)
        stamp.write_text(file.read_text())
    return python


@contextmanager
def serving(peer: Peer, model: str, wire: str, how: Serving) -> Iterator[RunningPeer]:
    """The peer, ready; RuntimeError naming its log when it is not ready in time."""
    python = install(peer, how.folder)
    port, mark = _free_port(), f"BENCH_MARK={uuid.uuid4().hex}"
    log = how.folder / "logs" / f"{peer.name}-{model}-{wire}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="npufleet-bench-") as scratch:
        environ = _environ(peer, model, wire, how) | {
            "BENCH_PORT": str(port),
            "BENCH_SCRATCH": scratch,
            "BENCH_MARK": mark.partition("=")[2],
        }
        with log.open("wb") as said:
            process = subprocess.Popen(
                [python, HERE / "servers" / peer.script],
                env=environ,
                stdout=said,
                stderr=said,
                cwd=scratch,
                start_new_session=True,
            )
        running = RunningPeer(process.pid, f"http://127.0.0.1:{port}{peer.path}", wire, peer, mark)
        try:
            _wait_ready(running, process, models.vectors(how.folder / "models", model), log)
            yield running
        finally:
            _stop(process, mark)


def marked(mark: str) -> list[psutil.Process]:
    """The live processes with this word in their environment, however they were forked."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if mark.encode() in words and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _environ(peer: Peer, model: str, wire: str, how: Serving) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NPUFLEET_")}
    return {
        **kept,
        "BENCH_WIRE": wire,
        "BENCH_WORKERS": str(how.workers),
        "BENCH_THREADS": str(how.threads),
        "BENCH_MAX_BATCH": str(how.max_batch),
        "BENCH_MAX_WAIT_MS": str(how.max_wait_ms),
        "BENCH_GATEWAYS": str(how.gateways),
        "BENCH_MODEL": str(models.model_file(how.folder / "models", model).resolve()),
        "OMP_NUM_THREADS": "1",
        **peer.environ,
    }


def _free_port() -> int:
    """The first of some free ports in a row, below those that the kernel hands out."""
    for first in range(18_000 + os.getpid() % 5_000, 30_000, _PORTS):
        with suppress(OSError):
            for port in range(first, first + _PORTS):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise RuntimeError("there are no free ports")


def _wait_ready(
    running: RunningPeer, process: "subprocess.Popen[bytes]", vectors: Path, log: Path
) -> None:
    data = np.load(vectors)
    [request] = requests(running.url, data["inputs"][:1], running.wire)
    right = Checker(data["outputs"][:1], running.wire)
    end_s = time.monotonic() + _START_LIMIT_S
    while not _answers(running, request, right):
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"{running.peer.name} gave no right answer; see {log}")
        time.sleep(_POLL_S)


def _answers(running: RunningPeer, request: bytes, right: Checker) -> bool:
    to = urlsplit(running.url)
    try:
        with closing(socket.create_connection((to.hostname or "", to.port or 80), 10)) as sock:
            sock.sendall(request)
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            body = answer.read()
    except (OSError, http.client.HTTPException):
        return False
    head = "".join(f"\r\n{name}: {value}" for name, value in answer.getheaders()) + "\r\n"
    return answer.status == 200 and right(0, body, head.encode())


def _stop(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """SIGTERM to what was started, and SIGKILL to whatever of it is left after a while."""
    process.terminate()
    end_s = time.monotonic() + _STOP_LIMIT_S
    while marked(mark) and time.monotonic() < end_s:
        process.poll()
        time.sleep(_POLL_S)
    for left in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(left.pid, signal.SIGKILL)
    process.wait(_STOP_LIMIT_S)
