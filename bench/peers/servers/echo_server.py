"""Not a peer: the smallest possible epoll server, which answers a raw request with its own body.
It gives the load generator's ceiling (the `identity` model's answer is its input)."""

import os
import select
import socket

listener = socket.create_server(("127.0.0.1", int(os.environ["BENCH_PORT"])), backlog=1024)
listener.setblocking(False)
poll = select.epoll()
poll.register(listener, select.EPOLLIN)
conns = {}
while True:
    for fd, _event in poll.poll():
        if fd == listener.fileno():
            sock, _ = listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            conns[sock.fileno()] = (sock, bytearray())
            poll.register(sock, select.EPOLLIN)
            continue
        sock, buf = conns[fd]
        try:
            data = sock.recv(262144)
        except OSError:
            data = b""
        if not data:
            del conns[fd]
            sock.close()
            continue
        buf += data
        end = buf.find(b"\r\n\r\n")
        if end < 0:
            continue
        head = bytes(buf[:end]).lower()
        at = head.find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n")[0]) if at >= 0 else 0
        if len(buf) >= end + 4 + size:
            sock.send(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
                + buf[end + 4 : end + 4 + size]
            )
            buf.clear()
