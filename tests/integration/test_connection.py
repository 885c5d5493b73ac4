"""The thin connection against a real server: whose answer is whose, and how it comes back."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from npufleet.connection import Link
from npufleet.endpoint import resolve


@pytest.fixture
async def link(redis_url: str) -> AsyncIterator[Link]:
    link = Link(resolve(redis_url), name="test")
    await link.start()
    yield link
    await link.close()


async def test_a_command_that_cannot_be_sent_moves_nobody_elses_answer(link: Link) -> None:
    """It fails by itself, before it takes a place among those that wait for an answer."""
    with pytest.raises(UnicodeEncodeError):
        await link.call("ECHO", "\ud800")

    echoes = await asyncio.gather(*(link.call("ECHO", f"{n}") for n in range(10)))

    assert echoes == [f"{n}".encode() for n in range(10)]


async def test_waiting_for_a_connection_that_is_just_closing_lets_it_come_back(link: Link) -> None:
    """Between the end of a socket and its notice nothing spins, and the next one is waited for."""
    link.drop()
    assert not link.connected

    async with asyncio.timeout(5):
        await link.wait_connected()

    assert await link.call("PING") == b"PONG"
