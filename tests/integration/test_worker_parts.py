"""A real worker with requests of more rows than a batch may have, and rows that fill no gear."""

from pathlib import Path

import numpy as np
import pytest
import redis

from npufleet.wire import Reply
from tests.support.plain_backends import DIE, FAIL, HOLD
from tests.support.waiting import wait_until
from tests.support.workers import Producer, running_worker

ROOT = Path(__file__).parents[2]
BATCH = 8


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model, `obedient`, whose rows say what happens to the batch."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "obedient/1").mkdir(parents=True)
    (tmp_path / "obedient/1/model.onnx").touch()
    (tmp_path / "obedient/model.toml").write_text(
        f"[batching]\nmax_batch_size = {BATCH}\n"
        '[executor]\nbackend = "tests.support.plain_backends:Obedient"\n'
    )
    return tmp_path


@pytest.fixture
def obedient(redis_client: redis.Redis, prefix: str) -> Producer:
    return Producer(redis_client, prefix, "obedient")


def ask(producer: Producer, rows: int, **commands: float) -> str:
    """Rows that count from 1000; `at5=FAIL` puts a command into row 5."""
    x = np.arange(1000, 1000 + 2 * rows, dtype=np.float32).reshape(rows, 2)
    for at, command in commands.items():
        x[int(at[2:]), 0] = command
    return producer.ask({"x": x})


def right(reply: Reply, rows: int) -> bool:
    """Whether it is the answer to `ask` of so many rows."""
    assert reply.error is None, reply.error
    got = np.frombuffer(reply.outputs["y"]["data"], np.float32)
    assert reply.outputs["y"]["shape"] == [rows, 2]
    return bool(np.array_equal(got, 2 * np.arange(1000.0, 1000 + 2 * rows)))


def test_a_request_larger_than_a_batch_is_answered_with_one_reply(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """Its rows in their order, among others of all sizes."""
    sizes = [1, 20, 8, 64 * BATCH, 3, 9, 16, 1]
    with running_worker(redis_url, prefix, repository):
        asked = [ask(obedient, rows) for rows in sizes]
        replies = [obedient.reply(wire_id) for wire_id in asked]
    assert [right(r, n) for r, n in zip(replies, sizes, strict=True)] == [True] * len(sizes)
    assert replies[3].batch_size == BATCH
    assert not any(obedient.client.exists(obedient.keys.reply(wire_id)) for wire_id in asked)


def test_a_part_that_fails_fails_its_request_once_and_no_other(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """One error and one dead letter each, however many of the parts are bad."""
    with running_worker(redis_url, prefix, repository):
        for _ in range(3):
            bad = ask(obedient, 30 * BATCH + 3, at9=FAIL, at100=FAIL)
            last = ask(obedient, 20, at18=FAIL)  # in the part that shares its batch
            good = [ask(obedient, rows) for rows in (1, 20, 2)]
            for wire_id in (bad, last):
                error = obedient.reply(wire_id).error
                assert error is not None
                assert error.code == "model_failed"
            for wire_id, rows in zip(good, (1, 20, 2), strict=True):
                assert right(obedient.reply(wire_id), rows)
    assert obedient.client.xlen(obedient.keys.dead) == 6


def test_a_request_whose_part_kills_executors_is_buried_once(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """Its other parts do not run on, and its deaths are counted together."""
    with running_worker(redis_url, prefix, repository):
        guilty, innocent = ask(obedient, 20, at10=DIE), ask(obedient, 20)
        error = obedient.reply(guilty, limit_s=9).error
        assert error is not None
        assert "3. time" in error.message
        assert right(obedient.reply(innocent, limit_s=9), 20)
    assert obedient.client.xlen(obedient.keys.dead) == 1


def test_rows_that_fill_no_gear_are_left_for_the_next_batch_if_so_chosen(
    redis_url: str, prefix: str, repository: Path, obedient: Producer
) -> None:
    """Six rows and the gears 1, 4 and 8: nothing is ever padded, and each gets its answer."""
    toml = repository / "obedient/model.toml"
    chosen = "[batching]\ngears = [1, 4, 8]\ngear_choice = 'lower'"
    toml.write_text(toml.read_text().replace("[batching]", chosen))
    folder = repository / "obedient/1"
    with running_worker(redis_url, prefix, repository):
        held = ask(obedient, 1, at0=HOLD)
        wait_until((folder / "started").exists, what="the batch to run")
        asked = [ask(obedient, 1) for _ in range(6)]
        (folder / "go").touch()
        assert obedient.reply(held).ok
        replies = [obedient.reply(wire_id) for wire_id in asked]
    assert all(right(reply, 1) for reply in replies)
    assert all(reply.gear == reply.batch_size for reply in replies)
