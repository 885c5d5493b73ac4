"""What every peer's server script shares: settings from the environment, the onnxruntime session
and the two wire formats. All peers run the same code for these, so differences are the peers'."""

import os

import numpy as np
import orjson

MODEL = os.environ.get("BENCH_MODEL", "")  # path of the .onnx file
PORT = int(os.environ.get("BENCH_PORT", "8000"))
WIRE = os.environ.get("BENCH_WIRE", "raw")  # raw | oip (see load.py)
WORKERS = int(os.environ.get("BENCH_WORKERS", "1"))  # model processes
THREADS = int(os.environ.get("BENCH_THREADS", "1"))  # intra-op threads in each
MAX_BATCH = int(os.environ.get("BENCH_MAX_BATCH", "32"))
MAX_WAIT_MS = float(os.environ.get("BENCH_MAX_WAIT_MS", "5"))
MIME = "application/octet-stream" if WIRE == "raw" else "application/json"


class Model:
    def __init__(self):
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])
        self.shape = self.session.get_inputs()[0].shape[1:]
        self.run(np.zeros((1, *self.shape), np.float32))

    def run(self, x):
        return self.session.run(None, {"x": x})[0]

    def run_bodies(self, bodies):
        """Request bodies in, response bodies out, one model call."""
        pairs = [decode(body) for body in bodies]
        y = self.run(np.stack([x.reshape(self.shape) for _, x in pairs]))
        return [encode(row, key) for row, (key, _) in zip(y, pairs, strict=True)]


def decode(body):
    if WIRE == "raw":
        return None, np.frombuffer(body, "<f4")
    message = orjson.loads(body)
    return message.get("id"), np.array(message["inputs"][0]["data"], np.float32)


def encode(row, key=None):
    if WIRE == "raw":
        return row.tobytes()
    return orjson.dumps(
        {
            "model_name": "model",
            "id": key,
            "outputs": [{"name": "y", "shape": [1, len(row)], "datatype": "FP32", "data": row}],
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )
