"""npufleet itself, as its users start it: `npufleet up`, with the journal on and everything in it.

Runs in the project's own environment. Batches wait as long as the peers' at most; the policy is the
default one, which seldom lets them.
"""

import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    environ = os.environ
    folder = Path(tempfile.mkdtemp(prefix="npufleet-peer-", dir=environ["BENCH_SCRATCH"]))
    version = folder / "models/model/1"
    version.mkdir(parents=True)
    (version / "model.onnx").symlink_to(environ["BENCH_MODEL"])
    (version.parent / "model.toml").write_text(
        f"[batching]\nmax_batch_size = {environ['BENCH_MAX_BATCH']}\n"
        f"max_wait_ms = {environ['BENCH_MAX_WAIT_MS']}\n"
        f"[executor]\nthreads = {environ['BENCH_THREADS']}\n"
    )
    options = {
        "models": version.parents[1],
        "state": folder / "state",
        "port": environ["BENCH_PORT"],
        "workers": environ["BENCH_WORKERS"],
        "gateways": environ["BENCH_GATEWAYS"],
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "npufleet", "up", *words])
