"""PyTriton: NVIDIA Triton from a wheel, dynamic batcher in C++, the model in this Python process.

Serves OIP JSON and its binary tensor extension (wire `oipbin`)."""

import os
import sysconfig

# Triton's Python stub must load the libpython of this interpreter, and no other of its version.
os.environ["LD_LIBRARY_PATH"] = (
    sysconfig.get_config_var("LIBDIR") + ":" + os.environ.get("LD_LIBRARY_PATH", "")
)

import numpy as np
from common import MAX_BATCH, MAX_WAIT_MS, PORT, WORKERS, Model
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def infer_func():
    model = Model()

    @batch
    def infer(x):
        return [model.run(x)]

    return infer, model


if __name__ == "__main__":
    pairs = [infer_func() for _ in range(WORKERS)]
    session = pairs[0][1].session

    def shape(t):
        return tuple(t.shape[1:])

    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=PORT,
        grpc_address="127.0.0.1",
        grpc_port=PORT + 1,
        metrics_address="127.0.0.1",
        metrics_port=PORT + 2,
    )
    with Triton(config=config) as triton:
        triton.bind(
            "model",
            [infer for infer, _ in pairs],
            inputs=[Tensor(name="x", dtype=np.float32, shape=shape(session.get_inputs()[0]))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=shape(session.get_outputs()[0]))],
            config=ModelConfig(
                max_batch_size=MAX_BATCH,
                batcher=DynamicBatcher(max_queue_delay_microseconds=int(MAX_WAIT_MS * 1e3)),
            ),
        )
        triton.serve()
