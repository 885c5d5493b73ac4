"""Ray Serve: HTTP proxy actor -> replica actors, @serve.batch inside the replica."""

import os
import signal
import threading

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DISABLE_MEMORY_MONITOR="1",
    PYTHONPATH=os.path.dirname(os.path.abspath(__file__)),
)

import ray
from common import MAX_BATCH, MAX_WAIT_MS, MIME, PORT, WORKERS, Model
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(
    num_replicas=WORKERS, max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0.1}
)
class Infer:
    def __init__(self):
        self.model = Model()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=MAX_WAIT_MS / 1e3)
    async def run(self, bodies):
        return self.model.run_bodies(bodies)

    async def __call__(self, request: Request):
        return Response(await self.run(await request.body()), media_type=MIME)


if __name__ == "__main__":
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=256 << 20,
        _node_ip_address="127.0.0.1",
        logging_level="warning",
        log_to_driver=False,
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": PORT},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    serve.run(Infer.bind(), route_prefix="/infer")
    stop.wait()
    serve.shutdown()
    ray.shutdown()
