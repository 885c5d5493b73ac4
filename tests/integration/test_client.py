"""The Python clients on a real server, with a stand-in for the worker."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npufleet import AsyncClient, Client, errors
from npufleet.errors import (
    DeadlineExceeded,
    IdConflict,
    InvalidDtype,
    InvalidId,
    InvalidImage,
    InvalidInput,
    InvalidParameter,
    InvalidShape,
    ModelFailed,
    ModelNotFound,
    NoWorkers,
    NpufleetError,
    Unavailable,
)
from tests.support.standin import StandIn, standing_in
from tests.support.valkey import connect, free_port, running_server
from tests.support.waiting import wait_until, wait_until_async

if TYPE_CHECKING:
    import redis

ROW = np.array([1, 2, 3, 4], np.float32)


@pytest.fixture
def worker(redis_url: str, prefix: str) -> Iterator[StandIn]:
    with standing_in(redis_url, prefix) as worker:
        yield worker


@pytest.fixture
def client(worker: StandIn) -> Iterator[Client]:
    with Client(worker.url, prefix=worker.prefix) as client:
        yield client


@pytest.fixture
async def aio(worker: StandIn) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(worker.url, prefix=worker.prefix) as client:
        yield client


def test_arrays_go_in_and_come_out(client: Client) -> None:
    """Rows by the first dimension; an array of a rank less is one row."""
    result = client.infer("double", {"x": np.stack([ROW, 10 * ROW])})
    np.testing.assert_array_equal(result.outputs["y"], [[3, 5, 7, 9], [21, 41, 61, 81]])
    assert result.output.dtype == np.float32
    assert (result.model, result.version, result.batch_size) == ("double", 1, 1)
    assert (result.worker, result.attempt, result.ok) == ("stand-in", 1, True)
    assert result.timing_ms == {"executed": 0.5}

    np.testing.assert_array_equal(client.infer("double", ROW).output, [[3, 5, 7, 9]])
    np.testing.assert_array_equal(client.infer("double", [1, 2, 3, 4]).output, [[3, 5, 7, 9]])


def test_several_inputs_go_by_name(client: Client) -> None:
    """Text included, which comes back as bytes."""
    result = client.infer("both", {"ids": [[1, -2]], "words": [["grüße"]]})

    assert result.outputs["ids"].tolist() == [[1, -2]]
    assert result.outputs["words"].tolist() == [["grüße".encode()]]
    with pytest.raises(ValueError, match="ids, words"):
        _ = result.output


def test_pictures_are_bytes_or_files(client: Client, tmp_path: Path) -> None:
    """Encoded bytes, a Path or a text naming a file; never decoded on this side."""
    file = tmp_path / "a.jpg"
    file.write_bytes(b"x" * 100)

    assert client.infer("measure", b"12345").prediction[0]["index"] == 5
    for value in (file, str(file), memoryview(b"x" * 100), {"image": file}):
        assert client.infer("measure", value).prediction[0]["index"] == 100
    # An image input takes decoded pixels, too: these are a tensor, not an encoded image.
    assert client.infer("measure", np.zeros((8, 8, 3), np.uint8)).prediction[0]["index"] == 0


BAD: dict[str, tuple[str, Any, type[NpufleetError], str]] = {
    "model": ("nothing", ROW, ModelNotFound, "models: both, double, measure"),
    "model name": ("a b", ROW, ModelNotFound, "model name"),
    "input name": ("double", {"z": ROW}, InvalidInput, "no input 'z'; it takes 'x'"),
    "not by name": ("both", ROW, InvalidInput, "pass a dict"),
    "missing": ("both", {"ids": [[1, 2]]}, InvalidInput, "'words' is missing"),
    "dtype": ("double", ROW.astype(np.float64), InvalidDtype, "expected FP32, got FP64"),
    "no such dtype": ("double", ROW.astype(complex), InvalidDtype, "complex128"),
    "shape": ("double", ROW[:3], InvalidShape, "expected shape [N, 4], got [1, 3]"),
    "rank": ("double", np.zeros((1, 1, 4), np.float32), InvalidShape, "got [1, 1, 4]"),
    "no row": ("double", np.zeros((0, 4), np.float32), InvalidShape, "at least one row"),
    "ragged": ("double", [[1, 2], [3]], InvalidShape, "ragged"),
    "text": ("double", ["a", "b", "c", "d"], InvalidDtype, "expected FP32"),
    "fraction": ("both", {"ids": [[1.5, 2]], "words": [["a"]]}, InvalidDtype, "INT64"),
    "too large": (
        "both",
        {"ids": [[1 << 63, 1 << 63]], "words": [["a"]]},
        errors.InvalidData,
        "fit",
    ),
    "bytes": ("double", b"abc", InvalidInput, "takes an array, not bytes"),
    "no file": ("measure", Path("/nowhere/a.jpg"), InvalidImage, "/nowhere/a.jpg"),
    "a folder": ("measure", "/", InvalidImage, "cannot read the image"),
}


@pytest.mark.parametrize(("model", "inputs", "error", "said"), BAD.values(), ids=BAD)
def test_wrong_inputs_are_refused_before_they_are_sent(
    client: Client,
    worker: StandIn,
    model: str,
    inputs: Any,
    error: type[NpufleetError],
    said: str,
) -> None:
    """Typed, naming what was expected; nothing goes onto the queue."""
    with pytest.raises(error) as caught:
        client.infer(model, inputs)
    assert type(caught.value) is error
    assert said in caught.value.message
    assert worker.served == []


@pytest.mark.parametrize(
    "options",
    [{"priority": "urgent"}, {"timeout_ms": 0}, {"timeout_ms": 1 << 40}, {"colour": 1}],
    ids=str,
)
def test_wrong_options_are_refused(client: Client, options: Any) -> None:
    """By name, everywhere alike."""
    word = next(iter(options))
    with pytest.raises(InvalidParameter, match=word):
        client.infer("double", ROW, **options)
    with pytest.raises(InvalidParameter, match=word):
        client.submit("double", ROW, **options)
    with pytest.raises(InvalidParameter, match=word):
        list(client.map("double", [ROW], **options))


def test_options_travel_with_the_request(client: Client, worker: StandIn) -> None:
    """Deadline, lane, version and parameters; without options the model's own deadline."""
    seen: list[Any] = []
    worker.refuse = lambda _entry, body: seen.append(body.parameters)
    client.infer("double", ROW, timeout_ms=5000, version="stable", parameters={"a": [1]})
    client.infer("double", ROW, priority="low")

    first, second = worker.served
    assert (first.timeout_ms, first.version, first.reply_ttl_s) == (5000, "stable", 60)
    assert second.timeout_ms == 10_000
    assert seen == [{"a": [1]}, {}]


def test_an_error_reply_is_raised_as_its_class(client: Client, worker: StandIn) -> None:
    """With the worker's own words."""
    worker.refuse = lambda _entry, _body: ModelFailed("the device said no")

    with pytest.raises(ModelFailed, match="the device said no"):
        client.infer("double", ROW)


def test_no_answer_in_time_is_a_deadline(client: Client, worker: StandIn) -> None:
    """The caller waits no longer than it said."""
    worker.hold()

    with pytest.raises(DeadlineExceeded):
        client.infer("double", ROW, timeout_ms=50)


def test_without_a_worker_infer_fails_at_once_and_submit_queues(
    redis_url: str, redis_client: "redis.Redis", prefix: str
) -> None:
    """A synchronous caller need not wait for its deadline; a queue is there to be filled."""
    StandIn(redis_url, prefix).register(redis_client, alive=False)

    with Client(redis_url, prefix=prefix) as client:
        with pytest.raises(NoWorkers, match="double"):
            client.infer("double", ROW)
        client.submit("double", ROW)

    assert redis_client.xlen(StandIn(redis_url, prefix).keys("double").lane("normal")) == 1


def test_a_submitted_request_is_answered_later_and_again(
    client: Client, worker: StandIn, redis_client: "redis.Redis"
) -> None:
    """By its handle, from any client, as often as asked; it has no deadline and is kept a day."""
    handle = client.submit("double", ROW)
    assert client.result(handle).output.tolist() == [[3, 5, 7, 9]]
    assert client.result(handle).output.tolist() == [[3, 5, 7, 9]]

    with Client(worker.url, prefix=worker.prefix) as other:
        assert other.result(handle, timeout_s=5).output.tolist() == [[3, 5, 7, 9]]
    model, wire_id = handle.split("~")
    assert model == "double"
    assert redis_client.ttl(worker.keys("double").reply(wire_id)) > 86_000
    assert worker.served[0].timeout_ms is None


def test_an_unknown_handle_is_waited_for_and_a_wrong_one_refused(client: Client) -> None:
    """The answer may yet come; a handle without a model cannot."""
    with pytest.raises(DeadlineExceeded):
        client.result("double~" + "0" * 32, timeout_s=0.05)
    for wrong in ("", "abc", "~abc", "double~", "a b~c", "double~a b"):
        with pytest.raises((InvalidId, ModelNotFound)):
            client.result(wrong, timeout_s=0.05)


def test_the_same_id_runs_once(client: Client, worker: StandIn) -> None:
    """Repeating is safe, and another body under the same id is refused."""
    first = client.infer("double", ROW, id="order-17")
    again = client.infer("double", ROW, id="order-17")

    assert first.id == again.id
    assert len(worker.served) == 1
    with pytest.raises(IdConflict):
        client.infer("double", 2 * ROW, id="order-17")
    with pytest.raises(InvalidId):
        client.infer("double", ROW, id="a b")


def test_large_bodies_travel_beside_the_stream(client: Client, worker: StandIn) -> None:
    """Above 64 KB the entry holds a key."""
    rows = np.arange(40_000, dtype=np.float32).reshape(-1, 4)

    result = client.infer("double", rows)

    np.testing.assert_array_equal(result.output, 2 * rows + 1)
    assert worker.served[0].body is None
    assert worker.served[0].body_key is not None


def test_infer_leaves_nothing_behind(
    client: Client, worker: StandIn, redis_client: "redis.Redis"
) -> None:
    """The reply of an id that nobody else knows is deleted once it was read."""
    client.infer("double", ROW)
    [entry] = worker.served

    wait_until(
        lambda: not redis_client.exists(worker.keys("double").reply(entry.id)),
        what="the reply to be deleted",
    )


async def test_lost_hints_cost_time_but_no_answer(aio: AsyncClient, worker: StandIn) -> None:
    """The reply key is the truth, and it is looked at long before the deadline."""
    worker.hint = False

    async with asyncio.timeout(20):
        result = await aio.infer("double", ROW, timeout_ms=60_000)

    assert result.output.tolist() == [[3, 5, 7, 9]]


def test_models_tells_what_there_is(client: Client) -> None:
    """Signatures, live workers and queue lengths by name."""
    models = client.models()

    assert set(models) == {"double", "measure", "both"}
    assert models["double"].signature.inputs[0].shape == (-1, 4)
    assert models["double"].workers == ("stand-in",)


def test_map_yields_every_item_once(client: Client) -> None:
    """With its index; each answer is the answer to its own question."""
    rows = [np.full(4, n, np.float32) for n in range(500)]

    found = dict(client.map("double", iter(rows), in_flight=16))

    assert sorted(found) == list(range(500))
    assert all(found[n].output.tolist() == [[2 * n + 1] * 4] for n in found)


@pytest.mark.parametrize("in_flight", [1, 7])
def test_map_draws_no_more_than_it_may_have_under_way(client: Client, in_flight: int) -> None:
    """A generator of a million items is never read ahead; it runs in the caller's thread."""
    drawn, yielded, threads = 0, 0, set()

    def rows() -> Iterator[Any]:
        nonlocal drawn
        for _ in range(40):
            drawn += 1
            assert drawn - yielded <= in_flight + 1
            threads.add(threading.current_thread())
            yield ROW

    for _ in client.map("double", rows(), in_flight=in_flight):
        yielded += 1

    assert (drawn, yielded) == (40, 40)
    assert threads == {threading.current_thread()}


def test_an_item_that_fails_ends_nothing(client: Client, worker: StandIn) -> None:
    """Refused here or by the worker, it is a result with its typed error."""
    worker.refuse = lambda entry, _body: ModelFailed("no") if entry.version == "9" else None

    found = dict(client.map("double", [ROW, ROW[:2], {"z": ROW}, ROW]))
    assert [found[n].ok for n in range(4)] == [True, False, False, True]
    assert isinstance(found[1].error, InvalidShape)
    assert isinstance(found[2].error, InvalidInput)

    [(_, failed)] = client.map("double", [ROW], version=9)
    assert isinstance(failed.error, ModelFailed)


def test_map_of_an_unknown_model_fails_at_once(client: Client) -> None:
    """Rather than a million times."""
    with pytest.raises(ModelNotFound):
        next(client.map("nothing", [ROW]))


def test_what_the_iterable_raises_reaches_the_caller(client: Client) -> None:
    """As it is."""

    def rows() -> Iterator[Any]:
        yield ROW
        raise LookupError("the file ended")

    with pytest.raises(LookupError, match="the file ended"):
        list(client.map("double", rows()))


def test_leaving_map_cancels_what_is_under_way(
    client: Client, worker: StandIn, redis_client: "redis.Redis"
) -> None:
    """Workers need not run what nobody waits for."""
    worker.hold()
    cancelled = worker.keys("double").cancelled
    results = client.map("double", [ROW] * 10, in_flight=5, timeout_ms=60_000)

    def wait_for_one() -> None:
        with contextlib.suppress(CancelledError):
            next(results)

    thread = threading.Thread(target=wait_for_one, daemon=True)
    thread.start()
    wait_until(
        lambda: redis_client.xlen(worker.keys("double").lane("normal")) == 5, what="5 under way"
    )

    client.close()
    thread.join(10)

    assert not thread.is_alive()
    assert redis_client.zcard(cancelled) == 5


async def test_a_full_queue_is_waited_for(aio: AsyncClient, worker: StandIn) -> None:
    """`submit` says so at once, `map` goes on when there is room."""
    worker.hold()
    requests = (aio.submit("double", ROW) for _ in range(1500))
    with pytest.raises(errors.Overloaded):
        await asyncio.gather(*requests)
    await aio.submit("double", ROW, priority="low")  # lanes have bounds of their own

    asyncio.get_running_loop().call_later(0.1, worker.held.clear)
    found = [pair async for pair in aio.map("double", [ROW] * 3)]
    assert [result.ok for _, result in found] == [True] * 3


async def test_map_takes_an_asynchronous_iterable(aio: AsyncClient) -> None:
    """And yields what is ready while the next item is not there yet."""
    answered = asyncio.Event()

    async def rows() -> AsyncIterator[Any]:
        yield ROW
        await answered.wait()
        yield 2 * ROW

    seen = []
    async with asyncio.timeout(10):
        async for index, result in aio.map("double", rows()):
            seen.append((index, result.output.tolist()))
            answered.set()

    assert seen == [(0, [[3, 5, 7, 9]]), (1, [[5, 9, 13, 17]])]


async def test_a_cancelled_call_is_marked_cancelled(
    aio: AsyncClient, worker: StandIn, redis_client: "redis.Redis"
) -> None:
    """A caller that goes away takes its request along."""
    worker.hold()
    keys = worker.keys("double")
    call = asyncio.create_task(aio.infer("double", ROW))
    await wait_until_async(
        lambda: asyncio.to_thread(redis_client.xlen, keys.lane("normal")), what="the request"
    )

    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    await wait_until_async(
        lambda: asyncio.to_thread(redis_client.zcard, keys.cancelled), what="the mark"
    )


async def test_a_thousand_at_once_get_their_own_answers(aio: AsyncClient) -> None:
    """On one client, checked value by value."""
    results = await asyncio.gather(
        *(aio.infer("double", np.full(4, n, np.float32)) for n in range(1000))
    )

    assert [r.output[0, 0] for r in results] == [2 * n + 1 for n in range(1000)]


async def test_map_does_not_wait_for_ever_for_what_may_never_have_been_queued(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies over a submit leaves open what became of it: the item says so."""
    monkeypatch.setattr("npufleet.aio._LOST_WAIT_S", 0.2)
    with running_server() as url, standing_in(url, prefix) as worker:
        with connect(url) as plain:
            process_id = plain.info("server")["process_id"]
        async with AsyncClient(url, prefix=prefix) as client:
            await client.infer("double", ROW)
            worker.stop.set()  # it would not like what comes
            worker.stopped.wait(10)
            os.kill(process_id, signal.SIGSTOP)

            async def under_way() -> int:
                return client._exchange.waiting

            results = client.map("double", [ROW])
            first = asyncio.ensure_future(anext(results))
            await wait_until_async(under_way, what="the request")
            for _ in range(10):  # a few turns of the loop later it is written, and nobody reads it
                await asyncio.sleep(0)
            os.kill(process_id, signal.SIGKILL)
            async with asyncio.timeout(20):
                _, result = await first

    assert isinstance(result.error, errors.ConnectionLost)
    assert result.error.retryable


def test_a_client_without_a_server_says_so() -> None:
    """At once, with the address, and without leaving a thread."""
    before = threading.active_count()

    with pytest.raises(Unavailable, match=r"/nowhere/redis\.sock"):
        Client("unix:///nowhere/redis.sock")
    with pytest.raises(errors.ConfigurationError, match="http://x"):
        Client("http://x")

    assert threading.active_count() == before


def test_a_closed_client_is_closed(worker: StandIn) -> None:
    """Twice is fine; use afterwards is an error, not a hang."""
    client = Client(worker.url, prefix=worker.prefix)
    client.close()
    client.close()

    with pytest.raises(RuntimeError, match="closed"):
        client.infer("double", ROW)


def test_the_client_works_over_tcp_with_a_password(prefix: str) -> None:
    """`redis://` with a database and a password."""
    port = free_port()
    url = f"redis://:secret%20words@127.0.0.1:{port}/3"
    with running_server("--port", str(port), "--bind", "127.0.0.1") as socket_url:
        with connect(socket_url) as plain:
            plain.config_set("requirepass", "secret words")
        with standing_in(url, prefix) as worker, Client(url, prefix=prefix) as client:
            assert client.infer("double", ROW).ok
            assert worker.served
        with pytest.raises(Unavailable, match="AUTH"):
            Client(f"redis://127.0.0.1:{port}", prefix=prefix)


def test_importing_the_package_is_cheap() -> None:
    """Command lines and workers need not load numpy for a version number."""
    code = (
        "import npufleet, sys; assert 'numpy' not in sys.modules and 'redis' not in sys.modules;"
        "from npufleet import Client, AsyncClient, Result; Client"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
