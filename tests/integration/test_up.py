"""`npufleet up`, whole: real processes from the first to the last."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from npufleet import keys, tensors, wire
from tests.support.fleets import ROOT, RunningFleet, running_fleet
from tests.support.valkey import connect, running_server
from tests.support.waiting import wait_until

MODEL = ROOT / "models" / "efficientnet-lite0"


def _post(url: str, body: bytes, content_type: str) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": content_type})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def _double(fleet: RunningFleet, rows: list[list[float]]) -> Any:
    body = {"inputs": {"x": rows}}
    return _post(
        f"{fleet.url}/v1/models/double/infer", json.dumps(body).encode(), "application/json"
    )


def _words(process: psutil.Process) -> list[str]:
    """Its command line; a server puts all of it into one word, followed by what it listens on."""
    return [Path(word).name for word in " ".join(process.cmdline()).split()]


def _end(fleet: RunningFleet, sig: signal.Signals, *, limit_s: float = 30.0) -> int:
    """The exit code after the signal; fails if any process of the fleet is left."""
    family = fleet.family()
    fleet.process.send_signal(sig)
    code = fleet.process.wait(timeout=limit_s)
    _, left = psutil.wait_procs(family, timeout=30)
    assert left == []
    return code


def test_the_line_it_prints_answers_for_the_sample_picture(tmp_path: Path) -> None:
    """Pasted, it names the picture's content with the expected probability; Ctrl-C ends it all."""
    expected = json.loads((MODEL / "expected.json").read_text())["coffee.png"][0]
    with running_fleet(tmp_path) as fleet:
        curl = fleet.curl
        image = ROOT / curl[curl.index("--data-binary") + 1].removeprefix("@")

        answer = _post(curl[-1], image.read_bytes(), curl[curl.index("-H") + 1].split(": ")[1])

        best = answer["prediction"][0]
        assert best["label"] == expected["label"] == "espresso"
        assert best["probability"] == pytest.approx(expected["probability"], abs=5e-4)
        assert len(fleet.family()) >= 4  # queue, gateway, worker, executors
        assert _end(fleet, signal.SIGINT) == 0


def test_several_workers_serve_side_by_side(tmp_path: Path) -> None:
    """Each has a name and a port of its own, so that all of them are live at once."""
    with running_fleet(tmp_path, "--workers", "2") as fleet:

        def both() -> bool:
            with urllib.request.urlopen(f"{fleet.url}/health", timeout=10) as response:
                return len(json.load(response)["models"]["double"]["workers"]) == 2

        wait_until(both, what="both workers in /health")
        assert _end(fleet, signal.SIGINT) == 0


def test_nothing_outlives_kill_9(tmp_path: Path) -> None:
    """Every process that it started ends with it, those of the second generation included."""
    with running_fleet(tmp_path, "--gateways", "2") as fleet:
        assert _end(fleet, signal.SIGKILL) == -signal.SIGKILL


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """A worker that hangs holds it up until somebody loses patience, and is gone then."""
    with running_fleet(tmp_path, environ={"NPUFLEET_DRAIN_S": "600"}) as fleet:
        (worker,) = (p for p in fleet.family() if p.cmdline()[-1:] == ["worker"])
        worker.suspend()
        fleet.process.send_signal(signal.SIGINT)
        wait_until(lambda: "gateway stopped" in fleet.log.read_text(), what="the gateway to end")
        assert fleet.process.poll() is None

        assert _end(fleet, signal.SIGINT, limit_s=20) == 0


@pytest.mark.parametrize("kind", ["worker", "gateway", "valkey-server"])
def test_what_dies_is_started_again(tmp_path: Path, kind: str) -> None:
    """After kill -9 of any part, questions are answered again without anybody doing anything."""
    with running_fleet(tmp_path) as fleet:
        assert _double(fleet, [[1, 2, 3, 4]])["model"] == "double"
        (victim,) = (p for p in fleet.family() if kind in _words(p))

        victim.kill()
        psutil.wait_procs([victim], timeout=10)

        def answers() -> bool:
            try:
                return bool(_double(fleet, [[1, 2, 3, 4]])["model"] == "double")
            except OSError:  # refused, or an HTTP error that says to come back
                return False

        wait_until(answers, what="an answer", limit_s=60)
        assert _end(fleet, signal.SIGTERM) == 0


def test_queued_work_survives_a_restart(tmp_path: Path) -> None:
    """A request queued while no worker runs is answered by the next fleet on the same folder."""
    row = np.array([[1, 2, 3, 4]], dtype=np.float32)
    body = wire.pack_body(wire.Body({"x": tensors.encode(row)}))
    model = keys.FleetKeys("npufleet").model("double")
    with running_fleet(tmp_path, "--workers", "0") as fleet, connect(fleet.redis_url) as client:
        fields = wire.entry_fields(wire.Entry(id="later", body=body))
        client.execute_command("XADD", model.lane("normal"), "*", *fields)
        assert _end(fleet, signal.SIGINT) == 0

    with running_fleet(tmp_path) as fleet, connect(fleet.redis_url) as client:
        popped = client.blpop([model.reply("later")], timeout=8)

        assert popped is not None
        reply = wire.unpack_reply(popped[1])
        assert reply.ok
        np.testing.assert_array_equal(tensors.decode(reply.outputs["y"]), 2 * row + 1)


def test_a_named_redis_is_used_instead(tmp_path: Path) -> None:
    """No server of our own is started then, and the state folder stays untouched."""
    state = tmp_path / "state"
    with running_server() as url, running_fleet(state, "--redis", url) as fleet:
        assert fleet.redis_url == url
        assert _double(fleet, [[0, 0, 0, 0]])["model"] == "double"
        assert not any("valkey" in word for p in fleet.family() for word in p.cmdline())
        assert not state.exists()
        assert _end(fleet, signal.SIGTERM) == 0


def _refused(*options: str, environ: dict[str, str] | None = None) -> str:
    """What a fleet that does not start says; it exits with 1 and without a traceback."""
    ended = subprocess.run(
        [sys.executable, "-m", "npufleet", "up", *options],
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    """The error says which port and what to do; not even the state folder is made."""
    state = tmp_path / "state"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        said = _refused("--state", str(state), "--port", str(port))

    assert f"error: port {port} on 127.0.0.1 is in use" in said
    assert f"--port {port + 1}" in said
    assert not state.exists()


def test_a_redis_that_would_lose_work_is_refused(tmp_path: Path) -> None:
    """The check happens before anything starts and names the line to change."""
    with running_server("--maxmemory-policy", "allkeys-lru") as url:
        said = _refused("--state", str(tmp_path), "--port", "0", "--redis", url)

    assert "CONFIG SET maxmemory-policy noeviction" in said
    assert "started" not in said


def test_a_part_that_cannot_start_ends_it_with_the_reason(tmp_path: Path) -> None:
    """It does not restart for ever: the last lines of the part are the error; nothing is left."""
    code = (
        "import sys, npufleet.fleet as fleet; from npufleet.cli import main;"
        "fleet._PYTHON = (sys.executable, '-c', 'import sys; sys.exit(\"no such device\")');"
        f"main(['up', '--port', '0', '--state', {str(tmp_path)!r}])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 1
    assert "keeps failing (exit code 1); its last lines:\n  no such device" in ended.stderr
    assert "stopped the embedded server" in ended.stderr


def test_a_workers_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    """Where the port of a worker's pages was asked for, no other is taken in silence."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = {"NPUFLEET_WORKER_HTTP_PORT": str(port)}

        said = _refused("--state", str(tmp_path), "--port", "0", environ=environ)

    assert f"error: port {port} on 127.0.0.1 is in use" in said
    assert "NPUFLEET_WORKER_HTTP_PORT" in said


def test_two_fleets_run_side_by_side(tmp_path: Path) -> None:
    """Each has a queue, workers and ports of its own, though nobody chose any."""
    with running_fleet(tmp_path / "a") as first, running_fleet(tmp_path / "b") as second:
        assert first.redis_url != second.redis_url
        for fleet in (first, second):
            assert _double(fleet, [[0, 0, 0, 0]])["model"] == "double"
        assert _end(first, signal.SIGINT) == _end(second, signal.SIGINT) == 0
