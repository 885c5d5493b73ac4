"""The HTTP/1.1 load generator: plain sockets and epoll in one thread, since its CPU is not free.

Keep-alive connections send one row each, wait for the answer, check it and go on with another row.
Knows nothing of what serves it.
"""

import select
import socket
import sys
import time
from collections import deque
from urllib.parse import urlsplit

import numpy as np

from bench.loads import Load, Report, Tally, Window, counted_from_s
from bench.wires import Checker, requests

_POLL_S = 0.02
_AGAIN_S = 0.02
_STEP = 7
"""Connections begin this many rows apart, so that neighbours in a batch differ."""
_RECEIVE_BYTES = 1 << 18
_CHUNKED = -1
_LAST_CHUNK = b"0\r\n\r\n"


class _Connection:
    __slots__ = ("begun_s", "buffer", "head_bytes", "need", "row", "sent", "sock", "writing")

    def __init__(self, address: tuple[str, int], *, row: int, timeout_s: float) -> None:
        self.sock = socket.create_connection(address, timeout_s)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.row, self.sent, self.begun_s = row, 0, 0.0
        self.buffer = bytearray()
        self.head_bytes = 0
        self.need: int | None = None
        self.writing = False


class HttpLoad:
    """One load, run once."""

    def __init__(self, load: Load) -> None:
        data = np.load(load.vectors)
        to = urlsplit(load.target)
        self._load = load
        self._address = (to.hostname or "", to.port or 80)
        self._requests = requests(load.target, data["inputs"], load.wire)
        self._right = Checker(data["outputs"], load.wire)
        self._tally = Tally()
        self._poll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self._idle: list[_Connection] = []
        self._again: deque[float] = deque()  # when closed-loop clients that failed come back
        self._heads: dict[bytes, int] = {}
        self._opened = 0
        self._over = False

    def run(self) -> Report:
        if self._load.rate_s is None:
            # Before the window: a server whose backlog is short lets a crowd wait for a second.
            for _ in range(self._load.clients):
                self._connect(time.monotonic())
        window = Window(self._load)
        arrivals = self._arrivals(window.begun_s)
        now_s = window.begun_s
        while not window.closed(now_s):
            self._start_due(arrivals, now_s)
            ahead_s = min(_POLL_S, arrivals[0] - now_s) if arrivals else _POLL_S
            self._serve(max(0.0, ahead_s))
            now_s = time.monotonic()
        self._drain()
        assert window.start_s is not None
        assert window.end_s is not None
        return self._tally.report(window.start_s, window.end_s, unfinished=len(self._open))

    def _arrivals(self, begun_s: float) -> deque[float]:
        if self._load.rate_s is None:
            return deque()
        return deque(begun_s + at_s for at_s in self._load.arrivals_s())

    def _start_due(self, arrivals: deque[float], now_s: float) -> None:
        while self._again and self._again[0] <= now_s:
            self._again.popleft()
            self._connect(now_s)
        while arrivals and arrivals[0] <= now_s:
            begun_s = counted_from_s(arrivals.popleft(), now_s)
            if self._idle:
                self._send(self._idle.pop(), begun_s)
            else:
                self._connect(begun_s)

    def _serve(self, wait_s: float) -> None:
        for fd, event in self._poll.poll(wait_s, 256):
            connection = self._open[fd]
            if event & select.EPOLLOUT:
                self._push(connection)
            if event & ~select.EPOLLOUT and fd in self._open:
                self._receive(connection)

    def _drain(self) -> None:
        """Let what is under way end: whether it was answered counts, though not for the rate."""
        self._over = True
        end_s = time.monotonic() + self._load.timeout_s
        for connection in self._idle:
            self._drop(connection)
        while self._open and time.monotonic() < end_s:
            self._serve(_POLL_S)

    def _connect(self, begun_s: float) -> None:
        self._opened += 1
        row = self._opened * _STEP % len(self._requests)
        try:
            connection = _Connection(self._address, row=row, timeout_s=self._load.timeout_s)
        except OSError as error:
            self._failed("connect", str(error))
            return
        fd = connection.sock.fileno()
        self._open[fd] = connection
        self._poll.register(fd, select.EPOLLIN)
        self._send(connection, begun_s)

    def _drop(self, connection: _Connection) -> None:
        del self._open[connection.sock.fileno()]
        connection.sock.close()

    def _failed(self, kind: str, detail: str = "") -> None:
        self._tally.failed(kind, detail)
        if self._load.rate_s is None and not self._over:
            self._again.append(time.monotonic() + _AGAIN_S)

    def _send(self, connection: _Connection, begun_s: float) -> None:
        connection.row = (connection.row + 1) % len(self._requests)
        connection.sent, connection.begun_s = 0, begun_s
        connection.buffer, connection.need = bytearray(), None
        self._push(connection)

    def _push(self, connection: _Connection) -> None:
        request = self._requests[connection.row]
        try:
            connection.sent += connection.sock.send(memoryview(request)[connection.sent :])
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(connection)
            self._failed("reset", str(error))
            return
        if (connection.sent < len(request)) != connection.writing:
            connection.writing = not connection.writing
            wanted = select.EPOLLOUT if connection.writing else 0
            self._poll.modify(connection.sock.fileno(), select.EPOLLIN | wanted)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            if connection not in self._idle:
                self._failed("reset")
            else:
                self._idle.remove(connection)
            return
        connection.buffer += data
        if connection.need is None and not self._head(connection):
            return
        body = _body(connection)
        if body is not None:
            self._answer(connection, body)

    def _head(self, connection: _Connection) -> bool:
        """Whether the head is here; heads repeat, so each is parsed once."""
        end = connection.buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            return False
        head = bytes(connection.buffer[:end])
        size = self._heads.get(head)
        if size is None:
            low = head.lower()
            at = low.find(b"\ncontent-length:")
            size = int(low[at + 16 : low.index(b"\r\n", at + 1)]) if at >= 0 else _CHUNKED
            if len(self._heads) < 1000:
                self._heads[head] = size
        connection.head_bytes, connection.need = end, size
        return True

    def _answer(self, connection: _Connection, body: bytes) -> None:
        now_s = time.monotonic()
        head = bytes(connection.buffer[: connection.head_bytes])
        status = head[9:12]
        if status != b"200" or not self._right(connection.row, body, head):
            self._drop(connection)
            kind = "wrong answer" if status == b"200" else status.decode(errors="replace")
            self._failed(kind, repr(body[:300]))
            return
        self._tally.answered(connection.begun_s, now_s)
        if self._over or b"\nconnection: close" in head.lower():
            self._drop(connection)
            if not self._over and self._load.rate_s is None:
                self._connect(now_s)
        elif self._load.rate_s is None:
            self._send(connection, now_s)
        else:
            self._idle.append(connection)


def _body(connection: _Connection) -> bytes | None:
    """The body, once it is whole."""
    assert connection.need is not None
    if connection.need != _CHUNKED:
        whole = connection.head_bytes + connection.need
        if len(connection.buffer) < whole:
            return None
        return bytes(connection.buffer[connection.head_bytes : whole])
    if not connection.buffer.endswith(_LAST_CHUNK):
        return None
    body, rest = b"", bytes(connection.buffer[connection.head_bytes :])
    while True:
        line, rest = rest.split(b"\r\n", 1)
        size = int(line, 16)
        if not size:
            return body
        body, rest = body + rest[:size], rest[size + 2 :]


if __name__ == "__main__":
    print(HttpLoad(Load.from_json(sys.argv[1])).run().to_json(), flush=True)
