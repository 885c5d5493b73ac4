"""The model repository: folders on disk to checked, frozen configurations.

Layout: `<name>/model.toml`, `<name>/labels.txt`, `<name>/<version>/model.<suffix>`; only the model
file is needed. Knows nothing of how a model is loaded or run.
"""

import difflib
import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet import keys
from npufleet.errors import ConfigurationError, ModelNotFound
from npufleet.signature import Limits, Signature, TensorSpec, shape_text
from npufleet_worker.backends import BY_SUFFIX
from npufleet_worker.batching import GearChoice
from npufleet_worker.buckets import Bucket, check_buckets
from npufleet_worker.classification import Classification
from npufleet_worker.images import ImageSpec

FILE = "model.toml"
LABELS = "labels.txt"

MAX_BATCH = 4096

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_IMAGE_DTYPES = ("UINT8", "FP16", "FP32", "FP64")

_DEFAULTS = Limits()

_Positive = Annotated[int, Field(ge=1)]
_Rows = Annotated[int, Field(ge=1, le=MAX_BATCH)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Batching(_Section):
    """When a batch goes, and how large it is; all sizes count rows.

    Without `max_batch_size` the largest gear is the limit, or 32 where there are no gears.
    """

    max_batch_size: _Rows = 32
    max_wait_ms: Annotated[float, Field(ge=0, le=600_000)] = 10.0
    min_batch_size: _Rows = 1
    gears: Annotated[tuple[_Rows, ...], Field(strict=False)] = ()
    gear_choice: GearChoice = "upper"
    policy: Literal["adaptive", "window"] = "adaptive"


class ExecutorSpec(_Section):
    """What runs a version: processes, threads inside an operator, and which backend."""

    instances: Annotated[int, Field(ge=1, le=64)] = 1
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    backend: Annotated[str, Field(min_length=1)] | None = None


class _Limits(_Section):
    timeout_ms: _Positive = _DEFAULTS.timeout_ms
    max_queue: _Positive = _DEFAULTS.max_queue
    max_queue_mb: _Positive = _DEFAULTS.max_queue_bytes >> 20
    allow_nan: bool = _DEFAULTS.allow_nan


class _Classification(_Section):
    output: str | None = None
    labels: str | None = None
    top_k: _Positive = 5


class _Fallback(_Section):
    model: str


class _File(_Section):
    batching: Batching = Batching()
    limits: _Limits = _Limits()
    image: ImageSpec | None = None
    buckets: dict[str, Bucket] = {}
    classification: _Classification | None = None
    executor: ExecutorSpec = ExecutorSpec()
    fallback: _Fallback | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One version of one model, ready to be loaded. `path` is the model file."""

    name: str
    version: int
    path: Path
    batching: Batching = field(default_factory=Batching)
    limits: Limits = field(default_factory=Limits)
    image: ImageSpec | None = None
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    classification: Classification | None = None
    executor: ExecutorSpec = field(default_factory=ExecutorSpec)
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a repository holds: the models that can be loaded, and by folder what is wrong."""

    configs: tuple[ModelConfig, ...]
    problems: Mapping[str, ConfigurationError]


def load_repository(folder: Path) -> Found:
    """Read every model folder; one that is broken does not keep the others from serving.

    Raises ConfigurationError only where the repository itself cannot be read.
    """
    try:
        folders = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] not in "._")
    except OSError as error:
        raise ConfigurationError(f"model repository {folder} cannot be read: {error}") from None
    configs, problems = [], {}
    for entry in folders:
        try:
            configs.append(load_model(entry))
        except ConfigurationError as error:
            problems[entry.name] = error
    return Found(tuple(configs), problems)


def load_model(folder: Path) -> ModelConfig:
    """The configuration of the highest version in a model's folder.

    Raises ConfigurationError that names the file, the key and what to do.
    """
    try:
        name = keys.check_model(folder.name)
        file = _read(folder / FILE)
        version, path = _model_file(folder, file.executor.backend)
        return ModelConfig(
            name=name,
            version=version,
            path=path,
            batching=file.batching,
            limits=_limits(file),
            image=file.image,
            buckets=file.buckets,
            classification=_classification(folder, file.classification),
            executor=file.executor,
            fallback=_fallback(folder, file.fallback),
        )
    except ModelNotFound as error:
        raise ConfigurationError(f"{folder}: rename the folder: {error.message}") from None
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read: {error}") from None


def fit(config: ModelConfig, gears: Sequence[int]) -> ModelConfig:
    """The configuration as the loaded file allows it: `gears` is what it was compiled for.

    Empty gears (any batch size) change nothing. Raises ConfigurationError where the
    configuration asks for a batch size that the file was not compiled for.
    """
    if not gears:
        return config
    compiled = tuple(sorted(gears))
    asked = config.batching
    unknown = [gear for gear in asked.gears if gear not in compiled]
    if unknown:
        raise ConfigurationError(
            f"{config.path} runs batches of {list(compiled)} rows only: "
            f"take {unknown} out of batching.gears of model {config.name}"
        )
    usable = asked.gears or compiled
    for key in ("max_batch_size", "min_batch_size"):
        if key in asked.model_fields_set and getattr(asked, key) > usable[-1]:
            raise ConfigurationError(
                f"{config.path} runs at most {usable[-1]} rows at once: "
                f"lower batching.{key} of model {config.name}"
            )
    largest = min(asked.max_batch_size, usable[-1])
    batching = asked.model_copy(update={"gears": usable, "max_batch_size": largest})
    limits = replace(config.limits, max_batch_size=largest)
    return replace(config, batching=batching, limits=limits)


def digest_of(path: Path) -> str | None:
    """What tells model files apart: 16 hexadecimal digits of SHA-256; None where it is no file.

    Reads the whole file: not for the event loop. Data that an ONNX file keeps beside itself is not
    part of it.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def signature_of(
    config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Signature:
    """What callers see of the loaded model; ConfigurationError where the file contradicts it."""
    image = _image_input(config, inputs) if config.image else None
    check_buckets(config.name, config.buckets, inputs, image)
    if config.classification:
        _check_scores(config, config.classification, outputs)
    return Signature(
        model=config.name,
        version=config.version,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        image_input=image,
        classifies=config.classification is not None,
        limits=config.limits,
    )


def _read(path: Path) -> _File:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raw = {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
    try:
        file = _File.model_validate(raw)
    except ValidationError as error:
        lines = "; ".join(_complaint(e) for e in error.errors(include_url=False))
        raise ConfigurationError(f"{path}: {lines}") from None
    return file.model_copy(update={"batching": _together(path, file.batching)})


def _complaint(error: Mapping[str, Any]) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg']}, got {error['input']!r}"
    *sections, key = map(str, error["loc"])
    near = difflib.get_close_matches(key, _known(sections), n=1, cutoff=0.5)
    hint = f"did you mean {'.'.join([*sections, near[0]])}?" if near else "remove it"
    return f"{where} is not a key; {hint}"


def _known(sections: Sequence[str]) -> list[str]:
    kinds: dict[str, type[BaseModel]] = {
        "batching": Batching,
        "limits": _Limits,
        "image": ImageSpec,
        "buckets": Bucket,
        "classification": _Classification,
        "executor": ExecutorSpec,
        "fallback": _Fallback,
    }
    return list(kinds[sections[0]].model_fields if sections else _File.model_fields)


def _together(path: Path, batching: Batching) -> Batching:
    """The batching section checked as a whole, its limit filled in."""
    gears = batching.gears
    if list(gears) != sorted(set(gears)):
        raise ConfigurationError(
            f"{path}: batching.gears must ascend without doubles: write {sorted(set(gears))}"
        )
    if gears and "max_batch_size" not in batching.model_fields_set:
        batching = batching.model_copy(update={"max_batch_size": gears[-1]})
    if gears and batching.max_batch_size > gears[-1]:
        raise ConfigurationError(
            f"{path}: batching.max_batch_size is {batching.max_batch_size}, but the largest gear "
            f"is {gears[-1]}: lower it, or add a gear"
        )
    if batching.min_batch_size > batching.max_batch_size:
        raise ConfigurationError(
            f"{path}: batching.min_batch_size is {batching.min_batch_size}, above "
            f"max_batch_size ({batching.max_batch_size}): lower it"
        )
    return batching


def _model_file(folder: Path, backend: str | None) -> tuple[int, Path]:
    versions = [int(p.name) for p in folder.iterdir() if p.is_dir() and _VERSION.fullmatch(p.name)]
    if not versions:
        raise ConfigurationError(
            f"{folder} has no version: put the model file at {folder / '1' / 'model.onnx'}"
        )
    newest = folder / str(max(versions))
    found = sorted(p for p in newest.glob("model.*") if _takes(backend, p.suffix))
    if not found and backend and ":" in backend:
        return max(versions), newest  # a backend of the user's own may need no file at all
    if len(found) == 1:
        return max(versions), found[0]
    if found:
        names = ", ".join(p.name for p in found)
        raise ConfigurationError(
            f"{newest} holds {names}: remove all but one, or choose with executor.backend"
        )
    wanted = ", ".join(f"model{suffix}" for suffix in BY_SUFFIX if _takes(backend, suffix))
    raise ConfigurationError(f"{newest} has no model file: put one of {wanted} there")


def _takes(backend: str | None, suffix: str) -> bool:
    if backend is None or ":" in backend:
        return suffix in BY_SUFFIX
    if backend not in BY_SUFFIX.values():
        known = ", ".join(sorted(set(BY_SUFFIX.values())))
        raise ConfigurationError(
            f"executor.backend is {backend!r}: use one of {known}, or module:Class"
        )
    return BY_SUFFIX.get(suffix) == backend


def _limits(file: _File) -> Limits:
    return Limits(
        timeout_ms=file.limits.timeout_ms,
        max_queue=file.limits.max_queue,
        max_queue_bytes=file.limits.max_queue_mb << 20,
        max_batch_size=file.batching.max_batch_size,
        allow_nan=file.limits.allow_nan,
    )


def _classification(folder: Path, section: _Classification | None) -> Classification | None:
    if section is None:
        return None
    path = folder / (section.labels or LABELS)
    try:
        labels = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        if section.labels is not None:
            raise ConfigurationError(
                f"{folder / FILE}: classification.labels: {path} does not exist"
            ) from None
        labels = ()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error}") from None
    return Classification(section.output, labels, section.top_k)


def _fallback(folder: Path, section: _Fallback | None) -> str | None:
    if section is None:
        return None
    if section.model == folder.name:
        raise ConfigurationError(f"{folder / FILE}: fallback.model is the model itself")
    return keys.check_model(section.model)


def _image_input(config: ModelConfig, inputs: Sequence[TensorSpec]) -> str:
    assert config.image is not None
    spec = _named(config, "image.input", config.image.input, inputs)
    fits = len(spec.shape) == 4 and all(
        want in (-1, got) for want, got in zip(spec.row_shape, config.image.row_shape, strict=True)
    )
    if not fits or spec.dtype not in _IMAGE_DTYPES:
        raise ConfigurationError(
            f"model {config.name}: [image] gives rows of {list(config.image.row_shape)}, UINT8 or "
            f"float, but input {spec.name!r} of {config.path} is {spec.dtype} "
            f"{shape_text(spec.shape)}: correct image.size, image.layout or image.input"
        )
    plain = config.image.mean == (0.0, 0.0, 0.0) and config.image.std == (1.0, 1.0, 1.0)
    if spec.dtype == "UINT8" and not plain:
        raise ConfigurationError(
            f"model {config.name}: image.mean and image.std are for float inputs, "
            f"but {spec.name!r} is UINT8: remove them"
        )
    return spec.name


def _check_scores(
    config: ModelConfig, section: Classification, outputs: Sequence[TensorSpec]
) -> None:
    spec = _named(config, "classification.output", section.output, outputs)
    if len(spec.shape) != 2 or not spec.dtype.startswith("FP"):
        raise ConfigurationError(
            f"model {config.name}: classification needs floats of shape [N, classes], but "
            f"output {spec.name!r} is {spec.dtype} {shape_text(spec.shape)}"
        )
    classes = spec.shape[1]
    if section.labels and classes >= 0 and len(section.labels) != classes:
        raise ConfigurationError(
            f"model {config.name}: {len(section.labels)} labels, but output {spec.name!r} "
            f"has {classes} classes"
        )


def _named(
    config: ModelConfig, key: str, name: str | None, specs: Sequence[TensorSpec]
) -> TensorSpec:
    found = [spec for spec in specs if name in (None, spec.name)]
    if not found:
        names = ", ".join(repr(spec.name) for spec in specs)
        raise ConfigurationError(
            f"model {config.name}: {key} is {name!r}, but {config.path} has {names}"
        )
    return found[0]
