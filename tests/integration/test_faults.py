"""Kills under load on real processes: all that was accepted is answered, and once."""

import asyncio
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import redis

from npufleet.keys import GROUP
from npufleet.tether import tethered
from npufleet.wire import Reply
from tests.integration.test_gateway_processes import gateway
from tests.support.plain_backends import HOLD
from tests.support.valkey import connect, server_binary
from tests.support.waiting import wait_until
from tests.support.workers import Producer, RunningWorker, running_worker

ROOT = Path(__file__).parents[2]
LEASE_S = 2


class Server:
    """A server that keeps what it has: kill it, start it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder / 'redis.sock'}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            tethered(
                server_binary(),
                *("--port", "0", "--unixsocket", str(self.folder / "redis.sock")),
                *("--dir", str(self.folder), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "everysec"),
                *("--maxmemory-policy", "noeviction"),
            ),
            stdout=subprocess.DEVNULL,
        )
        wait_until(self._answers, what="the server to answer")

    def _answers(self) -> bool:
        try:
            with connect(self.url) as client:
                return bool(client.ping())
        except redis.ConnectionError:  # LOADING, too
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)


@pytest.fixture
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="npufleet-test-", dir="/tmp"))
    server = Server(folder)
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model, `obedient`, that can be held."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "obedient/1").mkdir(parents=True)
    (tmp_path / "obedient/1/model.onnx").touch()
    (tmp_path / "obedient/model.toml").write_text(
        "[batching]\nmax_batch_size = 8\nmax_wait_ms = 20\n"
        '[executor]\nbackend = "tests.support.plain_backends:Obedient"\n'
    )
    return tmp_path


def ask_many(producer: Producer, count: int, *, start: int = 200) -> dict[str, float]:
    """Ids of requests that were accepted, and what each should be answered."""
    asked = {}
    for n in range(start, start + count):
        asked[producer.ask({"x": np.array([[n, 1]], np.float32)})] = 2.0 * n
    return asked


def first(reply: Reply) -> float:
    assert reply.error is None, reply.error
    return float(np.frombuffer(reply.outputs["y"]["data"], np.float32)[0])


def check_each_answered_once(producer: Producer, asked: dict[str, float]) -> None:
    answers = {wire_id: first(producer.reply(wire_id)) for wire_id in asked}

    assert answers == asked
    assert producer.client.keys(f"{producer.keys.base}reply:*") == [], "nothing is answered twice"
    wait_until(
        lambda: not any(producer.client.xlen(lane) for lane in producer.keys.lanes),
        what="the lanes to be empty",
    )
    assert producer.client.xpending(producer.keys.lane("normal"), GROUP)["pending"] == 0
    assert producer.client.exists(producer.keys.dead) == 0


def test_redis_killed_under_load_loses_and_doubles_nothing(
    server: Server, prefix: str, repository: Path
) -> None:
    """kill -9 twice with the append-only file on: what was accepted is answered, once."""
    with running_worker(server.url, prefix, repository, lease_s=LEASE_S) as worker:
        asked: dict[str, float] = {}
        for round_at in (1000, 2000):
            with connect(server.url) as client:
                asked |= ask_many(Producer(client, prefix, "obedient"), 400, start=round_at)
            server.kill()
            server.start()

        with connect(server.url) as client:
            check_each_answered_once(Producer(client, prefix, "obedient"), asked)
        assert worker.process.poll() is None


def test_a_worker_whose_connections_are_killed_again_and_again_answers_everything(
    redis_url: str, redis_client: redis.Redis, prefix: str, repository: Path
) -> None:
    """CLIENT KILL of each of them under load: orphans of lost answers come back within leases."""
    producer = Producer(redis_client, prefix, "obedient")
    with running_worker(redis_url, prefix, repository, name=prefix, lease_s=LEASE_S) as worker:
        asked: dict[str, float] = {}
        for n in range(20):
            asked |= ask_many(producer, 25, start=1000 + 25 * n)
            killed = wait_until(lambda: kill_clients(redis_client, prefix), what="a connection")
            assert killed

        check_each_answered_once(producer, asked)
        assert worker.process.poll() is None


def kill_clients(client: redis.Redis, name: str) -> int:
    clients: Any = client.client_list()
    mine = [row for row in clients if row["name"].startswith(f"{name}.")]
    return sum(client.client_kill_filter(_id=row["id"]) for row in mine)


def test_a_zombie_changes_no_answer(
    redis_url: str, redis_client: redis.Redis, prefix: str, repository: Path
) -> None:
    """Stopped past its lease, it wakes to a dead executor: its error reaches nobody."""
    producer = Producer(redis_client, prefix, "obedient")
    settings: dict[str, Any] = {"lease_s": LEASE_S, "max_suspicions": 1}
    with running_worker(redis_url, prefix, repository, name="zombie", **settings) as zombie:
        asked = ask_many(producer, 1, start=HOLD) | ask_many(producer, 10)
        wait_until((repository / "obedient/1/started").exists, what="the batch to run")
        zombie.process.send_signal(signal.SIGSTOP)
        try:
            executor_of(zombie).kill()
            (repository / "obedient/1/go").touch()
            with running_worker(redis_url, prefix, repository, name="heir", **settings):
                answers = {wire_id: first(producer.reply(wire_id)) for wire_id in asked}
                zombie.process.send_signal(signal.SIGCONT)
                wait_until(lambda: "SIGKILL" in zombie.log.read_text(), what="it to wake")
                wait_until(lambda: "leases were lost" in zombie.log.read_text(), what="it to know")
        finally:
            zombie.process.send_signal(signal.SIGCONT)

        assert answers == asked
        again = ask_many(producer, 20, start=500)
        check_each_answered_once(producer, again)


def executor_of(worker: RunningWorker) -> psutil.Process:
    return next(p for p in worker.executors() if "executor" in " ".join(p.cmdline()))


async def test_a_gateway_killed_under_load_leaves_nothing_behind(
    redis_url: str, redis_client: redis.Redis, prefix: str, repository: Path
) -> None:
    """What it had submitted is run all the same, and the replies nobody fetches expire."""
    producer = Producer(redis_client, prefix, "obedient")
    lane = producer.keys.lane("normal")
    with (
        running_worker(redis_url, prefix, repository),
        gateway(redis_url, prefix, REPLY_TTL_S="1") as front,
    ):
        url = f"{front.url()}/v1/models/obedient/infer"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

            async def ask(value: float) -> int:
                async with http.post(url, json={"inputs": {"x": [[value, 1]]}}) as response:
                    return response.status

            calls = [asyncio.create_task(ask(value)) for value in (HOLD, *range(200, 300))]
            await asyncio.to_thread(
                wait_until, lambda: redis_client.xlen(lane) == len(calls), what="all to be there"
            )
            front.process.kill()
            results = await asyncio.gather(*calls, return_exceptions=True)
            (repository / "obedient/1/go").touch()

        assert all(isinstance(result, aiohttp.ClientError) for result in results)
        wait_until(lambda: redis_client.xlen(lane) == 0, what="all to be run")
        kept = [*producer.keys.lanes, producer.keys.signature, producer.keys.workers]
        wait_until(
            lambda: set(redis_client.keys(f"{producer.keys.base}*")) <= {k.encode() for k in kept},
            what="the replies to expire",
        )
