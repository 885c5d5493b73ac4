"""Control messages between a supervisor and one executor, over a SOCK_SEQPACKET socket pair.

A message is one packet: a msgpack array of its kind and its fields. The end of either process is
the end of the stream. Knows nothing of what the messages do.
"""

import socket
from dataclasses import dataclass
from typing import Any

import msgpack

from npufleet.signature import TensorSpec

MAX_MESSAGE_BYTES = 128 << 10
"""Fits the kernel's default buffers, and thousands of requests in one batch."""


@dataclass(frozen=True, slots=True)
class Load:
    """To the executor, first of all: load this and warm it up with batches of these sizes."""

    path: str
    backend: str | None
    threads: int
    warm_up: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; `execute_ms` holds (gear, milliseconds) of the warm-up's last runs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    gears: tuple[int, ...]
    execute_ms: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The model cannot be loaded, in a sentence; the executor ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Run:
    """One batch: `requests` holds (rows, an arena offset per input), in the order of the rows.

    `shapes` are the row shapes of the inputs, the same for all requests. The outputs go to the
    region of that number.
    """

    generation: int
    region: int
    gear: int
    shapes: tuple[tuple[int, ...], ...]
    requests: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        return sum(request[0] for request in self.requests)


@dataclass(frozen=True, slots=True)
class Output:
    """One output in its region: wire dtype, shape with the rows of the batch, offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Done:
    """The batch of that generation is in its region, of which `region_bytes` are in use."""

    generation: int
    outputs: tuple[Output, ...]
    region_bytes: int
    execute_ms: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The batch of that generation has failed; the executor goes on."""

    generation: int
    code: str
    message: str


Message = Load | Ready | Refused | Run | Done | Failed

_KINDS: dict[int, type[Message]] = dict(enumerate((Load, Ready, Refused, Run, Done, Failed)))
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


class Closed(Exception):
    """The other process has closed its end, or is no more."""


class Channel:
    """One end; messages are sent whole or not at all. `socket.setblocking` decides who waits."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple["Channel", socket.socket]:
        """A non-blocking end to keep, and the socket to hand to the child process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message. Raises ValueError for one too large, Closed, or BlockingIOError."""
        packet = encode(message)
        if len(packet) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a {type(message).__name__} message of {len(packet)} bytes is larger than "
                f"{MAX_MESSAGE_BYTES}: the batch has too many requests"
            )
        try:
            self._socket.send(packet)
        except (BrokenPipeError, ConnectionResetError):
            raise Closed from None

    def receive(self, *, wait: bool) -> Message | None:
        """The next message; None when there is none and `wait` is off. Raises Closed at the end.

        On a non-blocking socket it never waits.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            packet = self._socket.recv(MAX_MESSAGE_BYTES, flags)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise Closed from None
        if not packet:
            raise Closed
        return decode(packet)

    def finish(self) -> None:
        """Say that nothing more will be sent; what the other side still says can be received."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def encode(message: Message) -> bytes:
    """One packet; records inside become arrays of their fields."""
    packed: bytes = msgpack.packb((_NUMBERS[type(message)], *_fields(message)), default=_fields)
    return packed


def decode(packet: bytes) -> Message:
    """The message again, its arrays as tuples."""
    number, *fields = msgpack.unpackb(packet, use_list=False)
    kind = _KINDS[number]
    if kind is Ready:
        inputs, outputs, *rest = fields
        return Ready(_specs(inputs), _specs(outputs), *rest)
    if kind is Done:
        generation, outputs, *rest = fields
        return Done(generation, tuple(Output(*output) for output in outputs), *rest)
    return kind(*fields)


def _fields(record: Any) -> list[Any]:
    """Not dataclasses.astuple, which copies every tuple inside, item by item."""
    return [getattr(record, name) for name in record.__slots__]


def _specs(fields: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(*spec) for spec in fields)
