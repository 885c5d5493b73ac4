"""A child process on the other end of a control channel: its messages, its words and its end.

Knows nothing of what the messages mean, and nothing of models.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from npufleet_worker.channel import Channel, Closed, Message

logger = logging.getLogger(__name__)

_GONE_LIMIT_S = 2.0
"""How long a process is waited for that closed its channel or was killed: a driver may hang."""

_LAST_WORDS_LIMIT_S = 0.2

_TAIL_CHARACTERS = 4000


class ChildProcess:
    """One child; made by `start`. All methods belong to the event loop's thread.

    `gone` completes with the exit code (negative: a signal; None: not known) once the process has
    ended and every message that it sent before has been given to `on_message`.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.pid = process.pid
        self.on_message: Callable[[Message], None] = self._ignore
        self.gone: asyncio.Future[int | None] = loop.create_future()
        self._process = process
        self._channel = channel
        self._said = ""
        self._hung_up = asyncio.Event()
        self._listener = loop.create_task(self._listen())
        self._watcher = loop.create_task(self._watch())
        loop.add_reader(channel.fileno(), self._receive)

    @classmethod
    async def start(cls, name: str, module: str, descriptors: Sequence[int]) -> Self:
        """Run `python -m module PID CONTROL DESCRIPTORS…`, all of these inherited.

        Call it in the main thread: the child dies with the thread that started it.
        """
        channel, theirs = Channel.pair()
        with theirs:
            inherited = (theirs.fileno(), *descriptors)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-P", "-m", module),
                *map(str, (os.getpid(), *inherited)),
                pass_fds=inherited,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        return cls(name, process, channel)

    @property
    def said(self) -> str:
        """The end of what the process has printed."""
        return self._said

    def send(self, message: Message) -> None:
        """Send a message; lost where the process is going, of which `gone` tells.

        Raises ValueError for a message too large, and BlockingIOError where too many wait.
        """
        with suppress(Closed):
            self._channel.send(message)

    def kill(self) -> None:
        """SIGKILL."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, *, limit_s: float) -> None:
        """Let it finish what it was sent, then end; SIGKILL after `limit_s`. May be repeated."""
        if not self.gone.done():
            with suppress(OSError):
                self._channel.finish()
            await asyncio.wait([self.gone], timeout=limit_s)
        if not self.gone.done():
            logger.warning("killing %s, which does not end", self.name, extra={"pid": self.pid})
            self.kill()
            self._hung_up.set()
        await self._watcher

    def _receive(self) -> None:
        """Give on every message that is there."""
        try:
            while (message := self._channel.receive(wait=False)) is not None:
                self.on_message(message)
        except Closed:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._hung_up.set()

    async def _watch(self) -> None:
        """Until the process is gone, by its exit or by the end of its channel."""
        exited = asyncio.ensure_future(self._process.wait())
        hung_up = asyncio.ensure_future(self._hung_up.wait())
        await asyncio.wait([exited, hung_up], return_when=asyncio.FIRST_COMPLETED)
        hung_up.cancel()
        await asyncio.wait([exited], timeout=_GONE_LIMIT_S)
        if not exited.done():
            self.kill()
            await asyncio.wait([exited], timeout=_GONE_LIMIT_S)
        # Its last words; a grandchild may hold the pipe open.
        await asyncio.wait([self._listener], timeout=_LAST_WORDS_LIMIT_S)
        self._listener.cancel()
        self._receive()
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        code = exited.result() if exited.done() else None
        exited.cancel()
        self.gone.set_result(code)

    async def _listen(self) -> None:
        """Log what it prints, which is the words of drivers and of other people's code."""
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(8192):
            text = chunk.decode(errors="replace")
            self._said = (self._said + text)[-_TAIL_CHARACTERS:]
            for line in text.splitlines():
                logger.info("%s says: %s", self.name, line, extra={"pid": self.pid})

    def _ignore(self, message: Message) -> None:
        logger.debug("%s: nobody waits for %s", self.name, type(message).__name__)


def how_it_ended(code: int | None) -> str:
    """`was killed by SIGKILL`, for example."""
    if code is None:
        return "does not answer"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
