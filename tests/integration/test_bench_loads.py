"""The load generators against real servers, and the benchmark as a command."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from bench.http_load import HttpLoad
from bench.loads import Load
from tests.support.fleets import ROOT
from tests.support.waiting import wait_until


def quick(url: str, vectors: Path, *, clients: int = 1, rate_s: float | None = None) -> Load:
    return Load(
        target=url,
        vectors=str(vectors),
        clients=clients,
        rate_s=rate_s,
        seconds=0.4,
        warm_up_s=0.1,
        timeout_s=5.0,
    )


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    rows = np.arange(64, dtype=np.float32).reshape(16, 4)
    np.savez(tmp_path / "x.npz", inputs=rows, outputs=rows)
    return tmp_path / "x.npz"


def _accepts(port: int) -> bool:
    with closing(socket.socket()) as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def echo_server() -> Iterator[str]:
    """The smallest server there is, which answers with what it was asked."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    script = ROOT / "bench/peers/servers/echo_server.py"
    process = subprocess.Popen(
        [sys.executable, script], env={**os.environ, "BENCH_PORT": str(port)}
    )
    try:
        wait_until(lambda: _accepts(port), what="the echo server")
        yield f"http://127.0.0.1:{port}/infer"
    finally:
        process.kill()
        process.wait(timeout=10)


@contextmanager
def stubborn_server(answer: bytes) -> Iterator[str]:
    """Gives every request the same answer, whole, and closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/infer"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(timeout=10)


def test_a_closed_loop_gets_right_answers_on_all_its_connections(vectors: Path) -> None:
    """Each is asked again as soon as it has answered."""
    with echo_server() as url:
        load = quick(url, vectors, clients=8)
        report = HttpLoad(load).run()
    assert report.errors == {}
    assert report.answered > 8
    assert report.unfinished == 0


def test_an_open_loop_asks_as_often_as_it_was_told(vectors: Path) -> None:
    """However fast the answers come; all but the last are there at the end."""
    with echo_server() as url:
        load = quick(url, vectors, rate_s=200.0)
        report = HttpLoad(load).run()
    arrivals = [at_s for at_s in load.arrivals_s() if at_s >= load.warm_up_s]
    assert report.errors == {}
    assert len(arrivals) - 20 <= report.answered <= len(arrivals) + 20


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope", "wrong answer"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", "503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\nhalf", "reset"),
    ],
)
def test_a_wrong_answer_is_never_counted_as_an_answer(
    vectors: Path, answer: bytes, kind: str
) -> None:
    """It is counted as what it is, with the first of them in words."""
    with stubborn_server(answer) as url:
        load = quick(url, vectors, clients=2)
        report = HttpLoad(load).run()
    assert report.answered == 0
    assert report.errors[kind] > 0
    assert report.first_error.startswith(kind)


def test_the_benchmark_runs_a_fleet_checks_its_answers_and_writes_them_down(tmp_path: Path) -> None:
    """One scenario, quick: the table, the JSON and the chart; nothing is left running."""
    command = [sys.executable, "-m", "bench", "--quick", "--scenario", "device_busy"]
    done = subprocess.run(
        [*command, "--peers", "", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device busy share" in done.stdout
    document = json.loads((tmp_path / "bench-results.json").read_text())
    [row] = document["rows"]
    assert row["rate_s"] > 0
    assert row["wrong"] == 0
    assert 0 < row["more"]["busy_share"] <= 1.001
    assert {"server", "supervisor", "executor", "generator"} <= set(row["cpu_us"])
    assert (tmp_path / "bench-results.svg").read_text().startswith("<svg")
