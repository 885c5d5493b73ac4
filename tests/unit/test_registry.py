"""The registry's reading side, on fakeredis: plain reads of plain keys, where it is faithful."""

from collections.abc import AsyncIterator
from typing import Any

import fakeredis
import pytest

from npufleet.errors import ModelNotFound, Unavailable
from npufleet.keys import FleetKeys
from npufleet.registry import ModelState, Registry
from npufleet.signature import Limits, Signature, TensorSpec

SIGNATURE = Signature(
    model="m",
    version=3,
    inputs=(TensorSpec("x", "FP32", (-1, 4)),),
    outputs=(TensorSpec("y", "FP32", (-1, 4)),),
    limits=Limits(timeout_ms=1234),
)
KEYS = FleetKeys("t")


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    client = fakeredis.FakeAsyncRedis(version=(7,))
    yield client
    await client.aclose()


async def publish(server: Any, signature: Signature = SIGNATURE, **beats_ago_s: float) -> None:
    keys = KEYS.model(signature.model)
    await server.sadd(KEYS.models, signature.model)
    await server.hset(keys.signature, "signature", signature.to_json())
    seconds, micros = await server.time()
    for worker, ago_s in beats_ago_s.items():
        await server.zadd(keys.workers, {worker: seconds * 1000 + micros / 1000 - ago_s * 1000})


async def test_a_published_model_is_read_as_it_was_published(server: Any) -> None:
    """Signature, limits, live workers and the length of every lane."""
    await publish(server, alive=1, silent=60)
    await server.xadd(KEYS.model("m").lane("low"), {"v": 1})

    state = await Registry(server, prefix="t").get("m")

    assert state.signature == SIGNATURE
    assert state.workers == ("alive",)
    assert state.queued == {"high": 0, "normal": 0, "low": 1}


async def test_a_model_that_came_later_is_found_when_it_is_asked_for(server: Any) -> None:
    """A miss reads again, so that a new model need not wait for the next refresh."""
    registry = Registry(server, prefix="t")
    assert await registry.all() == {}
    await publish(server)
    registry._read_at_s = float("-inf")  # as if the last look were longer ago than the pause

    assert (await registry.get("m")).signature.version == 3


async def test_an_unknown_model_is_refused_and_those_that_exist_are_named(server: Any) -> None:
    """The message is enough to correct the request."""
    await publish(server)

    with pytest.raises(ModelNotFound, match="no model 'n'; models: m"):
        await Registry(server, prefix="t").get("n")


async def test_one_unreadable_signature_does_not_hide_the_other_models(server: Any) -> None:
    """What a broken or newer worker has written is left out, with a warning."""
    await publish(server)
    await server.sadd(KEYS.models, "broken")
    await server.hset(KEYS.model("broken").signature, "signature", "{}")

    assert set(await Registry(server, prefix="t").all()) == {"m"}


async def test_a_server_that_is_away_is_unavailable() -> None:
    """One error of our tree for whatever the library raises."""
    away = fakeredis.FakeAsyncRedis(connected=False)
    registry = Registry(away, prefix="t")

    with pytest.raises(Unavailable, match="cannot read from Redis"):
        await registry.refresh()
    await away.aclose()


async def test_what_nobody_can_read_hides_no_model_and_is_told_once(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Names that are none, broken signatures and keys of a wrong type: the others are served."""
    await publish(server)
    await server.sadd(KEYS.models, "bad name", b"\xff", "list", "number", "stranger", "string")
    for name, text in (
        ("list", "[]"),
        ("number", '{"model": "number", "version": 1, "inputs": [], "outputs": [], "limits": 5}'),
        ("stranger", SIGNATURE.to_json()),
    ):
        await server.hset(KEYS.model(name).signature, "signature", text)
    await server.set(KEYS.model("string").signature, "not a hash")
    registry = Registry(server, prefix="t")

    await registry.refresh()
    await registry.refresh()

    assert list(await registry.all()) == ["m"]
    complaints = [r for r in caplog.records if "unreadable" in r.message]
    assert len(complaints) == 6


async def test_the_rate_of_a_model_is_that_of_its_live_workers(server: Any) -> None:
    """Workers that have gone count no more, and nonsense counts for nothing."""
    await publish(server, one=1, two=2, silent=60)
    rates = {"rate:one": "10.5", "rate:two": "x", "rate:silent": "99"}
    await server.hset(KEYS.model("m").signature, mapping=rates)

    assert (await Registry(server, prefix="t").get("m")).rate_per_s == 10.5


def test_what_cannot_meet_its_deadline_is_refused_with_a_true_retry_after() -> None:
    """Work ahead over the measured rate, lanes served before its own included."""
    state = ModelState(SIGNATURE, ("w",), {"high": 10, "normal": 90, "low": 5000}, rate_per_s=20.0)

    refusal = state.refusal("normal", timeout_ms=4000)

    assert refusal is not None
    assert "100 requests are ahead and take about 5.0 s" in refusal.message
    assert refusal.retry_after_s == 1.0
    assert state.refusal("normal", timeout_ms=6000) is None
    assert state.refusal("high", timeout_ms=4000) is None, "low never refuses live traffic"
    assert ModelState(SIGNATURE, ("w",), {"high": 10**6}).refusal("high", timeout_ms=1) is None


def test_a_lane_that_holds_too_many_bytes_is_refused() -> None:
    """The bound in bytes is per lane, like the one in requests."""
    limit = SIGNATURE.limits.max_queue_bytes
    state = ModelState(SIGNATURE, ("w",), queued_bytes={"normal": limit + 1})

    refusal = state.refusal("normal", timeout_ms=1000)

    assert refusal is not None
    assert "512 MB" in refusal.message
    assert state.refusal("low", timeout_ms=1000) is None
