"""What a real worker does when a request, its executor, itself or Redis goes wrong."""

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import redis

from npufleet.keys import GROUP, RETURNED
from npufleet.settings import load
from npufleet.wire import Reply
from npufleet_worker.runner import Runner
from npufleet_worker.supervisor import run
from tests.support.plain_backends import DIE, FAIL, HOLD
from tests.support.waiting import wait_until
from tests.support.workers import Producer, RunningWorker, running_worker

ROOT = Path(__file__).parents[2]
LEASE_S = 2


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model, `obedient`, whose rows say what happens to the batch."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "obedient/1").mkdir(parents=True)
    (tmp_path / "obedient/1/model.onnx").touch()
    (tmp_path / "obedient/model.toml").write_text(
        "[batching]\nmax_batch_size = 8\nmax_wait_ms = 50\n"
        '[executor]\nbackend = "tests.support.plain_backends:Obedient"\n'
    )
    return tmp_path


@pytest.fixture
def obedient(redis_client: redis.Redis, prefix: str) -> Producer:
    return Producer(redis_client, prefix, "obedient")


def ask(producer: Producer, first: float, **fields: Any) -> str:
    return producer.ask({"x": np.array([[first, 1]], np.float32)}, **fields)


def values(reply: Reply) -> list[float]:
    assert reply.error is None, reply.error
    numbers: list[float] = np.frombuffer(reply.outputs["y"]["data"], np.float32).tolist()
    return numbers


def started(repository: Path) -> None:
    """Waits until a batch holds in the executor."""
    wait_until((repository / "obedient/1/started").exists, what="the batch to run")


def go(repository: Path) -> None:
    (repository / "obedient/1/go").touch()


def executor(worker: RunningWorker) -> psutil.Process:
    return next(p for p in worker.executors() if "executor" in " ".join(p.cmdline()))


def test_a_batch_that_fails_costs_only_the_guilty_request(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """Halved until it stands alone: seven answers, one error, one dead letter, no new process."""
    with running_worker(redis_url, prefix, repository) as worker:
        before = executor(worker).pid
        asked = [ask(obedient, FAIL if n == 5 else n) for n in range(8)]

        replies = [obedient.reply(wire_id) for wire_id in asked]

        assert [values(r) for n, r in enumerate(replies) if n != 5] == [
            [2.0 * n, 2.0] for n in range(8) if n != 5
        ]
        error = replies[5].error
        assert error is not None
        assert error.code == "model_failed"
        assert executor(worker).pid == before
    assert obedient.client.xlen(obedient.keys.dead) == 1


def test_a_request_that_kills_its_executor_is_buried_and_its_neighbours_are_answered(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """After three deaths it is dead, with the way it died; the batch around it is right."""
    with running_worker(redis_url, prefix, repository):
        asked = [ask(obedient, DIE if n == 2 else n) for n in range(6)]

        replies = [obedient.reply(wire_id) for wire_id in asked]

    assert [values(r) for n, r in enumerate(replies) if n != 2] == [
        [2.0 * n, 2.0] for n in range(6) if n != 2
    ]
    error = replies[2].error
    assert error is not None
    assert "SIGKILL" in error.message
    assert "3. time" in error.message
    letters: Any = obedient.client.xrange(obedient.keys.dead)
    ((_, letter),) = letters
    assert letter[b"id"] == asked[2].encode()


def test_an_executor_killed_from_outside_costs_nothing(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """kill -9 in the middle of a batch: all of it is answered, as a first attempt, none buried."""
    with running_worker(redis_url, prefix, repository) as worker:
        asked = [ask(obedient, HOLD), *(ask(obedient, n) for n in range(1, 12))]
        started(repository)
        go(repository)
        executor(worker).kill()

        replies = [obedient.reply(wire_id) for wire_id in asked]

    assert [values(reply)[0] for reply in replies] == [2.0 * HOLD, *(2.0 * n for n in range(1, 12))]
    assert {reply.attempt for reply in replies} == {1}
    assert obedient.client.exists(obedient.keys.dead) == 0


def test_the_entries_of_a_killed_worker_are_answered_by_another(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """kill -9 of the worker: its lease ends, another one claims, each is answered once."""
    with running_worker(redis_url, prefix, repository, name="first", lease_s=LEASE_S) as first:
        asked = [ask(obedient, HOLD), *(ask(obedient, n) for n in range(1, 12))]
        started(repository)
        with running_worker(redis_url, prefix, repository, name="heir", lease_s=LEASE_S):
            go(repository)
            orphan = executor(first)
            first.process.send_signal(signal.SIGSTOP)  # it answers nothing any more
            first.process.kill()

            replies = [obedient.reply(wire_id) for wire_id in asked]

            wait_until(lambda: not orphan.is_running(), what="the executor to go with its worker")
    assert [values(reply)[0] for reply in replies] == [2.0 * HOLD, *(2.0 * n for n in range(1, 12))]
    assert obedient.client.exists(obedient.keys.dead) == 0
    assert obedient.client.xlen(obedient.keys.lane("normal")) == 0
    assert obedient.client.keys(f"{obedient.keys.base}reply:*") == [], "nothing is answered twice"


def test_sigterm_finishes_what_runs_and_gives_the_rest_back(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """Exit 0; the running batch is answered, the others are as if they had never been read."""
    with running_worker(redis_url, prefix, repository, name="first") as first:
        running = ask(obedient, HOLD)
        started(repository)
        waiting = [ask(obedient, n) for n in range(1, 4)]
        lane = obedient.keys.lane("normal")
        wait_until(
            lambda: obedient.client.xpending(lane, GROUP)["pending"] == 4, what="all to be taken"
        )
        first.process.terminate()
        wait_until(lambda: "worker drains" in first.log.read_text(), what="the drain to begin")
        go(repository)

        assert values(obedient.reply(running)) == [2.0 * HOLD, 2.0]
        assert first.process.wait(timeout=20) == 0, first.log.read_text()
    rows = obedient.client.xpending_range(lane, GROUP, "-", "+", 10)
    assert [(r["consumer"], r["times_delivered"]) for r in rows] == [(RETURNED.encode(), 0)] * 3
    assert obedient.client.zcard(obedient.keys.workers) == 0

    with running_worker(redis_url, prefix, repository, name="second"):
        replies = [obedient.reply(wire_id) for wire_id in waiting]
    assert [(values(r)[0], r.attempt, r.worker) for r in replies] == [
        (2.0 * n, 1, "second") for n in range(1, 4)
    ]


def test_a_lane_that_was_deleted_comes_back_with_its_group(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """Redis emptied under a running worker: it registers again and serves what comes then."""
    with running_worker(redis_url, prefix, repository, lease_s=LEASE_S):
        assert values(obedient.reply(ask(obedient, 1))) == [2.0, 2.0]
        obedient.client.delete(*obedient.client.keys(f"{prefix}:*"))

        assert values(obedient.reply(ask(obedient, 2))) == [4.0, 2.0]
        wait_until(lambda: obedient.client.exists(obedient.keys.signature), what="the registration")


def test_models_that_cannot_be_loaded_do_not_keep_others_from_serving(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """A broken file and a broken model.toml are named in the log; the good model serves.

    What a model.toml says and this release does not do is said, too.
    """
    settings = repository / "obedient/model.toml"
    settings.write_text(settings.read_text() + '[fallback]\nmodel = "smaller"\n')
    (repository / "broken/1").mkdir(parents=True)
    (repository / "broken/1/model.onnx").write_bytes(b"not a model")
    (repository / "misspelt/1").mkdir(parents=True)
    (repository / "misspelt/1/model.onnx").touch()
    (repository / "misspelt/model.toml").write_text("[batching]\nmax_batchsize = 4\n")

    with running_worker(redis_url, prefix, repository) as worker:
        assert values(obedient.reply(ask(obedient, 3))) == [6.0, 2.0]
        log = worker.log.read_text()
    assert "broken" in log
    assert "did you mean batching.max_batch_size" in log
    assert "names a fallback, which this release does not use yet" in log


def test_orphans_are_claimed_by_a_worker_that_is_full(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """The entries of a dead worker are nobody else's: a backlog does not keep them waiting."""
    lane = obedient.keys.lane("normal")
    obedient.client.xgroup_create(lane, GROUP, id="0", mkstream=True)
    orphan = ask(obedient, 7)
    obedient.client.xreadgroup(GROUP, "ghost", {lane: ">"})
    ask(obedient, HOLD)
    with running_worker(redis_url, prefix, repository, lease_s=LEASE_S):
        started(repository)
        for n in range(1, 60):
            ask(obedient, n)

        wait_until(
            lambda: not obedient.client.xpending_range(lane, GROUP, "-", "+", 1, "ghost"),
            what="the orphan to be claimed",
            limit_s=6 * LEASE_S,
        )
        go(repository)
        assert values(obedient.reply(orphan)) == [14.0, 2.0]


def test_a_model_that_has_drained_stays_away_while_another_one_still_drains(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """It neither announces itself again nor claims what it could not serve any more."""
    shutil.copytree(ROOT / "models/double", repository / "double")
    other = Producer(obedient.client, prefix, "double")
    with running_worker(redis_url, prefix, repository, lease_s=LEASE_S) as worker:
        held = ask(obedient, HOLD)
        started(repository)
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not other.client.exists(other.keys.workers), what="double to leave")
        end_s = other.client.time()[0] + LEASE_S
        wait_until(lambda: other.client.time()[0] > end_s, what="a lease to pass")
        go(repository)

        assert worker.process.wait(timeout=20) == 0
        assert values(obedient.reply(held)) == [2.0 * HOLD, 2.0]
    assert other.client.exists(other.keys.workers, obedient.keys.workers) == 0


async def test_an_error_that_nobody_owns_ends_the_worker_and_gives_its_entries_back(
    redis_url: str,
    prefix: str,
    repository: Path,
    obedient: Producer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a callback of the loop it would be logged only, and its requests held for ever."""

    def break_down(*_: Any) -> None:
        raise RuntimeError("not thought of")

    monkeypatch.setattr(Runner, "_answer", break_down)
    settings = load(
        {"models": repository, "prefix": prefix, "worker_http_port": 0, "worker_name": "w"},
        environ={},
    )
    ask(obedient, 1)

    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="not thought of"):
            await run(settings, redis_url=redis_url)

    pending = obedient.client.xpending_range(obedient.keys.lane("normal"), GROUP, "-", "+", 9)
    assert [(row["consumer"], row["times_delivered"]) for row in pending] == [
        (RETURNED.encode(), 0)
    ]
