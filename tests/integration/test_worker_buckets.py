"""A real worker and a real ONNX model whose inputs have no fixed length."""

from pathlib import Path

import numpy as np
import redis

from tests.support.onnx_models import save_statistics
from tests.support.workers import Producer, running_worker


def test_requests_of_different_lengths_share_batches_and_get_their_own(
    redis_url: str, prefix: str, tmp_path: Path, redis_client: redis.Redis
) -> None:
    """Zeros change no sum; the other output is as long as the bucket; too long is told alone."""
    save_statistics(tmp_path / "sums/1/model.onnx")
    (tmp_path / "sums/model.toml").write_text(
        "[batching]\nmax_batch_size = 16\nmax_wait_ms = 2000\npolicy = 'window'\n"
        "[buckets]\na = {sizes = [8, 32]}\nb = {sizes = [8, 32]}\n"
    )
    producer = Producer(redis_client, prefix, "sums")
    lengths = [1, 2, 3, 4, 5, 6, 7, 8] * 2 + [9, 20, 31, 32] * 4
    with running_worker(redis_url, prefix, tmp_path):
        too_long = producer.ask({name: np.zeros((1, 33), np.float32) for name in "ab"})
        asked = {}
        for n, length in enumerate(lengths):
            a = np.full((1, length), n, np.float32)
            asked[producer.ask({"a": a, "b": np.ones((1, length), np.float32)})] = n, length
        error = producer.reply(too_long).error
        assert error is not None
        assert error.code == "invalid_shape"
        for wire_id, (n, length) in asked.items():
            reply = producer.reply(wire_id)
            assert reply.batch_size == 16
            assert np.frombuffer(reply.outputs["total"]["data"], np.float32) == n * length
            product = np.frombuffer(reply.outputs["product"]["data"], np.float32)
            size = 8 if length <= 8 else 32
            assert product.tolist() == [n] * length + [0] * (size - length)
