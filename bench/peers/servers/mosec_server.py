"""Mosec: a Rust HTTP front and batcher, Python model processes."""

import sys

from common import MAX_BATCH, MAX_WAIT_MS, MIME, PORT, WORKERS, Model
from mosec import Server, Worker


class Infer(Worker):
    resp_mime_type = MIME

    def __init__(self):
        super().__init__()
        self.model = Model()

    def deserialize(self, data):
        return data

    def serialize(self, data):
        return data

    def forward(self, data):
        return (
            self.model.run_bodies(data)
            if isinstance(data, list)
            else self.model.run_bodies([data])[0]
        )


if __name__ == "__main__":
    sys.argv += [
        "--address",
        "127.0.0.1",
        "--port",
        str(PORT),
        "--timeout",
        "30000",
        "--log-level",
        "warning",
    ]
    server = Server()
    server.append_worker(
        Infer,
        num=WORKERS,
        max_batch_size=MAX_BATCH,
        max_wait_time=max(1, int(MAX_WAIT_MS)),
        timeout=30,
    )
    server.run()
