"""The gateway over HTTP, a real server and a worker of few lines: what callers are promised."""

import asyncio
import base64
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest
import redis

from npufleet.keys import FleetKeys
from tests.support.gateway import PNG, Running, running_gateway
from tests.support.waiting import wait_until_async

RAW = "application/octet-stream"


@pytest.fixture
async def fleet(redis_url: str, prefix: str) -> AsyncIterator[Running]:
    async with running_gateway(redis_url, prefix) as running:
        yield running


async def test_a_json_question_gets_its_own_answer(fleet: Running) -> None:
    """Rows in, rows out, with the particulars of the run."""
    question = {"inputs": {"x": [[1, 2, 3, 4], [0.5, 0, -1, 1e3]]}, "model": "double"}
    async with fleet.http.post("/v1/infer", json=question) as response:
        answer = await response.json()

    assert response.status == 200
    assert answer["predictions"] == [[3, 5, 7, 9], [2, 1, -1, 2001]]
    assert response.headers["X-Request-Id"] == answer["request_id"]
    assert answer["latency_ms"] > 0
    kept = ("model", "version", "timing_ms", "batch_size", "worker", "attempt")
    assert {name: answer[name] for name in kept} == {
        "model": "double",
        "version": 1,
        "timing_ms": {"queued": 0.5, "executed": 1.25},
        "batch_size": 1,
        "worker": "scripted",
        "attempt": 1,
    }


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        ("double", [1, 2, 3, 4], {"prediction": [3, 5, 7, 9]}),
        ("double", [[1, 2, 3, 4]], {"predictions": [[3, 5, 7, 9]]}),
        (
            "double",
            {"x": {"shape": [2, 4], "data": [0, 0, 0, 0, 1, 1, 1, 1], "dtype": "FP32"}},
            {"predictions": [[1, 1, 1, 1], [3, 3, 3, 3]]},
        ),
        (
            "double",
            {
                "dtype": "FP32",
                "shape": [1, 4],
                "base64": base64.b64encode(np.arange(4, dtype="<f4").tobytes()).decode(),
            },
            {"predictions": [[1, 3, 5, 7]]},
        ),
        ("words", ["a", "é"], {"predictions": ["A", "É"]}),
        ("words", "one", {"prediction": "ONE"}),
        ("flags", [[True, False]], {"predictions": [[False, True]]}),
        ("pair", {"a": [1, 2], "n": 7}, {"prediction": {"sum": 3, "n": 7}}),
        (
            "pair",
            {"a": [[1, 2], [3, 4]], "n": [7, -8]},
            {"predictions": [{"sum": 3, "n": 7}, {"sum": 7, "n": -8}]},
        ),
    ],
)
async def test_every_form_of_a_value_is_understood(
    fleet: Running, model: str, inputs: object, expected: dict[str, object]
) -> None:
    """Nested lists, one bare row, flat data with a shape, base64, text and truth values."""
    async with fleet.http.post(f"/v1/models/{model}/infer", json={"inputs": inputs}) as response:
        answer = await response.json()

    assert response.status == 200, answer
    assert {name: answer[name] for name in answer if name.startswith("prediction")} == expected


async def test_a_photo_is_answered_in_every_form(fleet: Running) -> None:
    """Base64 JSON, the bare body, octet-stream and a form; no model named: the only image model."""
    form = aiohttp.FormData()
    form.add_field("image", PNG, filename="photo.png", content_type="image/png")
    form.add_field("priority", "high")
    posts = [
        {"json": {"image_base64": base64.b64encode(PNG).decode(), "request_id": "auto"}},
        {"json": {"image_base64": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}},
        {"data": PNG, "headers": {"Content-Type": "image/png"}},
        {"data": form},
    ]
    for post in posts:
        async with fleet.http.post("/v1/infer", **post) as response:  # type: ignore[arg-type]  # a dict of keyword arguments
            answer = await response.json()
        assert response.status == 200, answer
        assert answer["model"] == "photo"
        assert answer["prediction"] == [{"label": "seen", "index": len(PNG), "probability": 0.5}]
    async with fleet.http.post(
        "/v1/models/photo/infer", data=PNG, headers={"Content-Type": RAW}
    ) as response:
        assert (await response.json())["prediction"][0]["index"] == len(PNG)
    assert [lane for lane, _ in fleet.worker.entries] == [*["normal"] * 3, "high", "normal"]


async def test_a_photo_larger_than_an_entry_may_be_arrives_whole(fleet: Running) -> None:
    """Large bodies travel under a key of their own."""
    photo = PNG + bytes(300_000)
    async with fleet.http.post(
        "/v1/infer", data=photo, headers={"Content-Type": "image/png"}
    ) as response:
        answer = await response.json()

    assert answer["prediction"][0]["index"] == len(photo)
    assert fleet.worker.entries[0][1].body_key is not None


async def test_raw_bytes_in_give_raw_bytes_out(fleet: Running) -> None:
    """The shape follows from the size, and headers describe the answer."""
    x = np.arange(8, dtype="<f4").reshape(2, 4)
    async with fleet.http.post(
        "/v1/models/double/infer?priority=low&timeout_ms=5000&request_id=r-1",
        data=x.tobytes(),
        headers={"Content-Type": RAW, "Accept": RAW},
    ) as response:
        body = await response.read()

    assert np.array_equal(np.frombuffer(body, "<f4").reshape(2, 4), x * 2 + 1)
    assert response.content_type == RAW
    assert response.headers["X-Tensor-Name"] == "y"
    assert response.headers["X-Tensor-Dtype"] == "FP32"
    assert response.headers["X-Tensor-Shape"] == "2,4"
    assert response.headers["X-Request-Id"] == "r-1"
    lane, entry = fleet.worker.entries[0]
    assert (lane, entry.timeout_ms) == ("low", 5000)


async def test_raw_bytes_of_free_shape_come_with_their_shape(fleet: Running) -> None:
    """Where the size alone cannot tell, the query string does."""
    async with fleet.http.post(
        "/v1/models/free/infer?shape=1,3", data=b"\x01\x02\x03", headers={"Content-Type": RAW}
    ) as response:
        assert (await response.json())["predictions"] == [[-1, -2, -3]]


async def test_a_brought_id_is_echoed_and_asked_once(fleet: Running) -> None:
    """The second question of the same id gets the first one's answer; another body is refused."""
    question = {"inputs": [1, 2, 3, 4], "request_id": "order:7"}
    for _ in range(2):
        async with fleet.http.post("/v1/models/double/infer", json=question) as response:
            assert (await response.json())["request_id"] == "order:7"
            assert response.status == 200
    other = question | {"inputs": [9, 9, 9, 9]}
    async with fleet.http.post("/v1/models/double/infer", json=other) as response:
        answer = await response.json()

    assert (response.status, answer["code"]) == (409, "id_conflict")
    assert answer["request_id"] == response.headers["X-Request-Id"] == "order:7"
    assert len(fleet.worker.entries) == 1
    assert fleet.worker.entries[0][1].brought


async def test_the_entry_carries_what_the_request_asked(fleet: Running) -> None:
    """Deadline, life of the reply, version, parameters' fellow travellers and trace context."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    question = {"inputs": [1, 2, 3, 4], "version": 3, "priority": "high"}
    for header in (trace, "00-nonsense"):
        async with fleet.http.post(
            "/v1/models/double/infer", json=question, headers={"traceparent": header}
        ) as response:
            assert response.status == 200

    lane, entry = fleet.worker.entries[0]
    assert lane == "high"
    assert (entry.timeout_ms, entry.reply_ttl_s, entry.version) == (30_000, 60, "3")
    assert entry.traceparent == trace
    assert fleet.worker.entries[1][1].traceparent is None


async def test_a_thousand_questions_at_once_get_their_own_answers(fleet: Running) -> None:
    """No answer goes to another's question."""

    async def ask(number: int) -> list[float]:
        question = {"inputs": [number, number + 0.5, -number, 0]}
        async with fleet.http.post("/v1/models/double/infer", json=question) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return list(answer["prediction"])

    answers = await asyncio.gather(*(ask(number) for number in range(1000)))

    assert answers == [[2 * n + 1, 2 * n + 2, 1 - 2 * n, 1] for n in range(1000)]


async def test_no_answer_in_time_is_a_504_at_the_callers_deadline(fleet: Running) -> None:
    """The model's default of 300 ms and the request's own limit both hold."""
    for question in ({"inputs": [1, 2, 3, 4]}, {"inputs": [1, 2, 3, 4], "timeout_ms": 20}):
        async with fleet.http.post("/v1/models/stuck/infer", json=question) as response:
            answer = await response.json()
        assert (response.status, answer["code"]) == (504, "deadline_exceeded")
        assert f"{question.get('timeout_ms', 300)} ms" in answer["error"]


async def test_a_workers_error_reaches_the_caller_as_it_is(fleet: Running) -> None:
    """Code, sentence and status are those of the worker's reply."""
    async with fleet.http.post("/v1/models/refusing/infer", json={"inputs": [1, 2, 3, 4]}) as got:
        answer = await got.json()

    assert (got.status, answer["code"]) == (400, "invalid_image")
    assert answer["error"] == "the image is cut short"


async def test_an_answered_request_leaves_no_key_behind(
    fleet: Running, redis_client: "redis.Redis", prefix: str
) -> None:
    """The reply key of an id that the gateway made is deleted once the answer is written."""
    async with fleet.http.post("/v1/models/double/infer", json={"inputs": [1, 2, 3, 4]}) as got:
        assert got.status == 200

    async def gone() -> bool:
        return not redis_client.keys(f"{prefix}:*reply:*")

    await wait_until_async(gone, what="the reply key to go")


async def test_a_client_that_leaves_leaves_nothing_behind(
    fleet: Running, redis_client: "redis.Redis", prefix: str
) -> None:
    """The request is marked cancelled, nothing waits for it and its place is free again."""
    question = {"inputs": [1, 2, 3, 4], "timeout_ms": 60_000}
    call = asyncio.create_task(fleet.http.post("/v1/models/stuck/infer", json=question))

    async def taken() -> bool:
        return bool(fleet.worker.entries)

    await wait_until_async(taken, what="the worker to have the request")
    assert fleet.gateway.admission.in_flight == 1
    call.cancel()

    async def forgotten() -> bool:
        cancelled = redis_client.zrange(FleetKeys(prefix).model("stuck").cancelled, 0, -1)
        wire_id = fleet.worker.entries[0][1].id.encode()
        idle = fleet.gateway.admission.in_flight == 0 and fleet.exchange.waiting == 0
        return idle and cancelled == [wire_id]

    await wait_until_async(forgotten, what="the request to be cancelled and forgotten")


async def test_more_than_may_be_in_flight_are_refused_with_a_time_to_return(
    redis_url: str, prefix: str
) -> None:
    """One process never holds more requests than its settings allow."""
    async with running_gateway(redis_url, prefix, max_in_flight=1) as fleet:
        question = {"inputs": [1, 2, 3, 4], "timeout_ms": 60_000}
        call = asyncio.create_task(fleet.http.post("/v1/models/stuck/infer", json=question))

        async def taken() -> bool:
            return fleet.gateway.admission.in_flight == 1

        await wait_until_async(taken, what="the first request to be in flight")
        async with fleet.http.post("/v1/models/double/infer", json=question) as response:
            answer = await response.json()
        call.cancel()

    assert (response.status, answer["code"]) == (429, "queue_full")
    assert response.headers["Retry-After"] == "1"


async def test_a_model_without_workers_is_a_503_with_a_time_to_return(
    fleet: Running, redis_client: "redis.Redis", prefix: str
) -> None:
    """Nothing is queued for it, and /health says which model it is."""
    redis_client.delete(FleetKeys(prefix).model("double").workers)
    await fleet.registry.refresh()
    async with fleet.http.post("/v1/models/double/infer", json={"inputs": [1, 2, 3, 4]}) as got:
        answer = await got.json()
    async with fleet.http.get("/health") as response:
        health = await response.json()

    assert (got.status, answer["code"]) == (503, "no_workers")
    assert got.headers["Retry-After"] == "2"
    assert (response.status, health["status"]) == (200, "degraded")
    assert health["reason"] == "no worker serves double"


async def test_health_is_for_people_and_models_for_programs(fleet: Running) -> None:
    """Redis, models, workers and queues on one page; signatures on another."""
    async with fleet.http.get("/health") as response:
        health = await response.json()
    async with fleet.http.get("/v1/models") as models:
        listed = {model["model"]: model for model in (await models.json())["models"]}
    async with fleet.http.get("/v1/models/photo") as one:
        assert await one.json() == listed["photo"]

    assert (response.status, health["status"]) == (200, "ok")
    assert health["redis"]["connected"]
    assert health["models"]["double"]["workers"] == ["scripted"]
    assert health["models"]["double"]["queued"] == {"high": 0, "normal": 0, "low": 0}
    assert listed["photo"]["image_input"] == "image"
    assert listed["double"]["inputs"] == [{"name": "x", "dtype": "FP32", "shape": [-1, 4]}]


async def test_a_draining_gateway_is_not_ready_but_alive(fleet: Running) -> None:
    """Load balancers stop sending, and what comes nevertheless is refused clearly."""
    async with fleet.http.get("/readyz") as before:
        assert before.status == 200
    fleet.gateway.admission.draining = True
    async with fleet.http.get("/readyz") as ready, fleet.http.get("/livez") as live:
        assert (ready.status, live.status) == (503, 200)
    async with fleet.http.post("/v1/models/double/infer", json={"inputs": [1, 2, 3, 4]}) as got:
        assert got.status == 503
        assert got.headers["Retry-After"] == "1"


async def test_metrics_count_answers_by_model_and_code(fleet: Running) -> None:
    """Unknown names never become labels."""
    await fleet.http.post("/v1/models/double/infer", json={"inputs": [1, 2, 3, 4]})
    await fleet.http.post("/v1/models/double/infer", json={"inputs": [1]})
    await fleet.http.post("/v1/models/nope/infer", json={"inputs": [1]})
    async with fleet.http.get("/metrics") as response:
        text = await response.text()

    assert 'npufleet_gateway_requests_total{code="ok",model="double"} 1.0' in text
    assert 'npufleet_gateway_requests_total{code="invalid_shape",model="double"} 1.0' in text
    assert 'npufleet_gateway_requests_total{code="model_not_found",model=""} 1.0' in text
    assert 'npufleet_gateway_request_seconds_count{model="double"} 2.0' in text
    assert "nope" not in text
    assert "npufleet_gateway_in_flight 0.0" in text
