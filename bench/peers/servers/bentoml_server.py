"""BentoML: adaptive batching inside the model service.

Wire `nested` (BentoML's own JSON, {"x": [[...]]}) calls the model service directly. Wire `raw`
needs a second service, because a batchable endpoint takes no raw body: an ASGI route in front
that passes arrays on to the model service."""

import os
import sys
import tempfile

import bentoml
import numpy as np
from common import MAX_BATCH, PORT, WIRE, WORKERS, Model, decode, encode
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

OPTIONS = {
    "traffic": {"timeout": 30, "max_concurrency": 1024},
    "metrics": {"enabled": False},
    "logging": {"access": {"enabled": False}},
}


@bentoml.service(workers=WORKERS, **OPTIONS)
class Infer:
    def __init__(self):
        self.model = Model()

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH, max_latency_ms=30000, route="/infer")
    def predict(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32, copy=False)
        return self.model.run(x.reshape(-1, *self.model.shape))


async def infer(request: Request):
    key, x = decode(await request.body())
    y = await request.app.state.model.to_async.predict(x[None])
    return Response(encode(y[0], key), media_type="application/octet-stream")


app = Starlette(routes=[Route("/infer", infer, methods=["POST"])])


@bentoml.service(**OPTIONS)
@bentoml.asgi_app(app, path="/")
class Gateway:
    model = bentoml.depends(Infer)

    def __init__(self):
        app.state.model = self.model


service = Infer if WIRE == "nested" else Gateway

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    os.environ.update(
        BENTOML_DO_NOT_TRACK="True",
        PYTHONPATH=here,
        BENTOML_HOME=os.path.join(tempfile.gettempdir(), "bentoml-bench"),
    )
    path = os.path.dirname(sys.executable)
    os.execv(
        f"{path}/bentoml",
        [
            f"{path}/bentoml",
            "serve",
            "bentoml_server:service",
            "--working-dir",
            here,
            "--host",
            "127.0.0.1",
            "--port",
            str(PORT),
        ],
    )
