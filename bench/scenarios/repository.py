"""A model repository for one scenario, and the fleet that serves it. Knows nothing of loads."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import models
from bench.fleet import RunningFleet, fleet
from bench.measuring import Options


@contextmanager
def repository() -> Iterator[Path]:
    """An empty folder for models, which goes at the end."""
    with tempfile.TemporaryDirectory(prefix="npufleet-bench-models-") as folder:
        yield Path(folder)


def serve_built(options: Options, folder: Path, *names: str, **batching: object) -> None:
    """Put these of the built models into the repository, with these keys of [batching]."""
    for name in names:
        models.serve_onnx(folder, name, models.model_file(built(options), name), batching=batching)


def built(options: Options) -> Path:
    """Where the models and their vectors have been built."""
    return options.folder / "models"


@contextmanager
def serving(options: Options, models_folder: Path, *, workers: int = 1) -> Iterator[RunningFleet]:
    """A fleet of the options' gateways on that repository; it logs below the options' folder."""
    log = options.folder / "logs" / "npufleet.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with fleet(models_folder, log=log, workers=workers, gateways=options.gateways) as running:
        yield running
