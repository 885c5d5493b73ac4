"""The command `npufleet gateway`, as real processes: start, one port for several, stop."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import redis

from npufleet import wire
from npufleet.keys import FleetKeys
from tests.support.gateway import MODELS
from tests.support.processes import wait_gone
from tests.support.scripted_worker import ScriptedWorker, scripted_worker
from tests.support.valkey import running_server
from tests.support.waiting import wait_until, wait_until_async

LISTENING = re.compile(r"gateway listening on (http://\S+)")
COUNTED = 'npufleet_gateway_requests_total{code="ok",model="double"} 60.0'
QUESTION = {"inputs": [1, 2, 3, 4]}


class Process:
    """A gateway's process and what it has printed so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def url(self, processes: int = 1) -> str:
        """Where it listens, once as many processes say so."""

        def found() -> list[str]:
            assert self.process.poll() is None, self.text
            urls = LISTENING.findall(self.text)
            return urls if len(urls) >= processes else []

        urls = wait_until(found, what=f"{processes} to listen", limit_s=30)
        assert len(set(urls)) == 1
        return urls[0]

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]


@contextmanager
def gateway(redis_url: str, prefix: str, *options: str, **settings: str) -> Iterator[Process]:
    """`npufleet gateway` on a free port; whatever is left of it is killed at the end."""
    own = {"REDIS_URL": redis_url, "PREFIX": prefix, "PORT": "0", **settings}
    environ = os.environ | {f"NPUFLEET_{name}": value for name, value in own.items()}
    command = [sys.executable, "-m", "npufleet", "gateway", *options]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        running = Process(process)
        left: list[int] = []
        try:
            yield running
            left = running.children() if process.poll() is None else []
        finally:
            process.kill()
            for pid in left:
                wait_gone(pid)


@pytest.fixture
async def worker(redis_url: str, prefix: str) -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker(redis_url, prefix, MODELS) as worker:
        yield worker


async def _ask(http: aiohttp.ClientSession, url: str, model: str = "double") -> Any:
    async with http.post(f"{url}/v1/models/{model}/infer", json=QUESTION) as response:
        return response.status, await response.json()


async def test_sigterm_finishes_what_was_begun_and_exits_with_0(
    redis_url: str, prefix: str, worker: ScriptedWorker, redis_client: "redis.Redis"
) -> None:
    """The port closes at once, the request in flight still gets its answer."""
    with gateway(redis_url, prefix) as running:
        url = running.url()
        async with aiohttp.ClientSession() as http:
            question = {**QUESTION, "timeout_ms": 30_000}
            call = asyncio.create_task(http.post(f"{url}/v1/models/stuck/infer", json=question))

            async def taken() -> bool:
                return bool(worker.entries)

            await wait_until_async(taken, what="the request to reach the worker")
            running.process.send_signal(signal.SIGTERM)

            async def closed() -> bool:
                try:
                    async with http.get(f"{url}/livez"):
                        return False
                except aiohttp.ClientConnectionError:
                    return True

            await wait_until_async(closed, what="the port to close")
            assert running.process.poll() is None
            entry = worker.entries[0][1]
            reply = wire.pack_reply(wire.Reply(id=entry.id, model="stuck", predictions=[["late"]]))
            keys = FleetKeys(prefix)
            redis_client.rpush(keys.model("stuck").reply(entry.id), reply)
            redis_client.publish(keys.notify(str(entry.notify)), reply)
            async with await call as response:
                assert (await response.json())["prediction"] == ["late"]
        assert running.process.wait(timeout=20) == 0
        assert "gateway stopped" in wait_until(lambda: running.text, what="its log")


async def test_a_second_signal_ends_it_at_once(
    redis_url: str, prefix: str, worker: ScriptedWorker
) -> None:
    """Even while a request is in flight."""
    with gateway(redis_url, prefix) as running:
        url = running.url()
        async with aiohttp.ClientSession() as http:
            question = {**QUESTION, "timeout_ms": 60_000}
            call = asyncio.create_task(http.post(f"{url}/v1/models/stuck/infer", json=question))

            async def taken() -> bool:
                return bool(worker.entries)

            await wait_until_async(taken, what="the request to reach the worker")
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "draining" in running.text, what="it to drain")
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(timeout=10) == 1
            with pytest.raises(aiohttp.ClientError):
                await call


async def test_several_processes_share_one_port_and_one_page_of_metrics(
    redis_url: str, prefix: str, worker: ScriptedWorker
) -> None:
    """Each process answers some of the connections, and /metrics counts them all."""
    with gateway(redis_url, prefix, "--processes", "3") as running:
        url = running.url(3)
        pids = set()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            for _ in range(60):
                assert (await _ask(http, url))[0] == 200
                async with http.get(f"{url}/health") as response:
                    pids.add((await response.json())["gateway"]["pid"])

            async def counted() -> bool:
                async with http.get(f"{url}/metrics") as response:
                    return COUNTED in await response.text()

            await wait_until_async(counted, what="all 60 answers on one page")
        assert len(pids) == 3
        folder = _metrics_folder(pids)
        running.process.terminate()
        assert running.process.wait(timeout=30) == 0
        for pid in pids:
            wait_gone(pid)
        assert not folder.exists()


async def test_a_process_that_dies_is_started_again(
    redis_url: str, prefix: str, worker: ScriptedWorker
) -> None:
    """The others serve meanwhile, and its place is taken."""
    with gateway(redis_url, prefix, "--processes", "2") as running:
        url = running.url(2)
        victim = running.children()[0]
        os.kill(victim, signal.SIGKILL)
        assert running.url(3) == url
        wait_gone(victim)
        async with aiohttp.ClientSession() as http:
            assert (await _ask(http, url))[1]["prediction"] == [3, 5, 7, 9]


def test_no_process_outlives_a_killed_parent(redis_url: str, prefix: str) -> None:
    """SIGKILL to the parent ends every one of them."""
    with gateway(redis_url, prefix, "--processes", "2") as running:
        running.url(2)
        children = running.children()
        assert len(children) >= 2
        running.process.kill()
        for child in children:
            wait_gone(child)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_port_in_use_is_one_clear_line(redis_url: str, prefix: str, processes: str) -> None:
    """With the way out, and exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--port", str(port), "--processes", processes)
        with gateway(redis_url, prefix, *options) as running:
            assert running.process.wait(timeout=30) == 1
            wait_until(lambda: "in use" in running.text, what="the reason")
    assert f"error: port {port} on 127.0.0.1 is in use" in running.text
    assert "Traceback" not in running.text


def test_bytes_that_are_no_http_leave_no_trace_in_the_log(redis_url: str, prefix: str) -> None:
    """They are refused, and whatever secret they held is quoted nowhere."""
    with gateway(redis_url, prefix) as running:
        host, port = running.url().removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"GET / HTTP/1.1\r\nAuthorization: " + b"secret" * 2000 + b"\r\n\r\n"
            )
            assert connection.recv(100).startswith(b"HTTP/1.0 400 ")
        running.process.terminate()
        assert running.process.wait(timeout=20) == 0
        wait_until(lambda: "gateway stopped" in running.text, what="its log")
    assert "secret" not in running.text
    assert "Traceback" not in running.text


def test_it_waits_for_redis_and_outlives_its_absence(prefix: str, tmp_path: Path) -> None:
    """It starts once the server is there, says 503 while it is away, and mends by itself."""
    with running_server() as url:
        there, away = Path(url.removeprefix("unix://")), tmp_path / "away.sock"
        there.rename(away)
        with gateway(url, prefix) as running:
            wait_until(lambda: "cannot be reached" in running.text, what="it to say so")
            away.rename(there)
            base = running.url()
            assert _status(f"{base}/readyz") == 200
            there.rename(away)
            with redis.Redis(unix_socket_path=str(away), protocol=2) as client:
                client.client_kill_filter(_type="normal")
                client.client_kill_filter(_type="pubsub")
            wait_until(lambda: _status(f"{base}/readyz") == 503, what="it to be not ready")
            assert _status(f"{base}/livez") == 200
            assert _status(f"{base}/health") == 503
            wait_until(lambda: _post_code(base) == (503, "unavailable"), what="a clear 503")
            away.rename(there)
            wait_until(lambda: _status(f"{base}/readyz") == 200, what="it to be ready", limit_s=20)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def _post_code(base: str) -> tuple[int, str]:
    """Status and code of the refusal of a question."""
    request = urllib.request.Request(
        f"{base}/v1/models/double/infer",
        data=json.dumps(QUESTION).encode(),
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as error:
        return error.code, json.load(error)["code"]


def _metrics_folder(pids: set[int]) -> Path:
    environ = psutil.Process(min(pids)).environ()
    return Path(environ["PROMETHEUS_MULTIPROC_DIR"])
