"""LitServe: FastAPI front process, model processes fed by a multiprocessing queue."""

import os
from typing import Annotated

import litserve as ls
from common import MAX_BATCH, MAX_WAIT_MS, MIME, PORT, WORKERS, Model
from fastapi import Depends, Request, Response


async def body(request: Request):
    return await request.body()


class Api(ls.LitAPI):
    def setup(self, device):
        self.model = Model()

    def decode_request(self, request: Annotated[bytes, Depends(body)]):
        return request

    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        if MAX_BATCH == 1:  # then LitServe passes the item itself
            return self.model.run_bodies([inputs])[0]
        return self.model.run_bodies(inputs)

    def unbatch(self, outputs):
        return outputs

    def encode_response(self, output) -> Response:
        return Response(output, media_type=MIME)


if __name__ == "__main__":
    api = Api(max_batch_size=MAX_BATCH, batch_timeout=MAX_WAIT_MS / 1e3, api_path="/infer")
    server = ls.LitServer(
        api,
        accelerator="cpu",
        workers_per_device=WORKERS,
        timeout=30,
        fast_queue=bool(os.environ.get("LITSERVE_FAST_QUEUE")),
        restart_workers=bool(os.environ.get("LITSERVE_RESTART")),
    )
    server.run(
        host="127.0.0.1",
        port=PORT,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
