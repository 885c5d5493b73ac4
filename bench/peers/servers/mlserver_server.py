"""MLServer (Seldon): Open Inference Protocol JSON, adaptive batching, model processes.

Its ready-made runtimes have no plain ONNX one, so this is a custom runtime of a few lines.
Wire `oipb64` sends the item as one base64 BYTES element instead of a JSON list of numbers."""

import base64
import json
import os
import sys
import tempfile

import numpy as np
from common import MAX_BATCH, MAX_WAIT_MS, PORT, WIRE, WORKERS, Model
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Runtime(MLModel):
    async def load(self):
        self.model = Model()
        return True

    async def predict(self, payload):
        x = payload.inputs[0]
        if WIRE == "oipb64":
            x = np.stack(
                [
                    np.frombuffer(base64.b64decode(v), "<f4").reshape(self.model.shape)
                    for v in x.data.root
                ]
            )
        else:
            x = NumpyCodec.decode_input(x)
        y = self.model.run(x)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    folder = tempfile.mkdtemp(prefix="mlserver-")
    with open(f"{folder}/model-settings.json", "w") as f:
        json.dump(
            {
                "name": "model",
                "implementation": "mlserver_server.Runtime",
                "max_batch_size": MAX_BATCH,
                "max_batch_time": MAX_WAIT_MS / 1e3,
            },
            f,
        )
    with open(f"{folder}/settings.json", "w") as f:
        json.dump(
            {
                "debug": False,
                "host": "127.0.0.1",
                "http_port": PORT,
                "grpc_port": PORT + 1,
                "metrics_port": PORT + 2,
                "parallel_workers": WORKERS,
                "gzip_enabled": False,
            },
            f,
        )
    path = os.path.dirname(sys.executable)
    os.environ["PYTHONPATH"] = here
    os.chdir(folder)
    os.execv(f"{path}/mlserver", [f"{path}/mlserver", "start", folder])
