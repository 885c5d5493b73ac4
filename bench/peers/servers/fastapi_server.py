"""Floor: FastAPI on uvicorn, the model called in the handler, no batching."""

from contextlib import asynccontextmanager

import uvicorn
from common import MIME, PORT, WORKERS, Model
from fastapi import FastAPI, Request, Response


@asynccontextmanager
async def lifespan(app):
    app.state.model = Model()
    yield


app = FastAPI(lifespan=lifespan)


@app.post("/infer")
async def infer(request: Request):
    return Response(app.state.model.run_bodies([await request.body()])[0], media_type=MIME)


if __name__ == "__main__":
    uvicorn.run(
        "fastapi_server:app",
        host="127.0.0.1",
        port=PORT,
        workers=WORKERS,
        log_level="warning",
        access_log=False,
    )
