"""The models that are measured, with seeded weights, and their test vectors; nothing is downloaded.

identity, mlp and convnet (MobileNetV2-shaped) take one input x, FP32, of any batch size, and give
one output y. A file of vectors has `inputs` and `outputs`: distinct rows with the answers that ONNX
Runtime gives for each alone, so that an answer that went to the wrong request is noticed. Knows
nothing of servers.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from npufleet.tensors import Array
from npufleet_worker.backends.onnx import OnnxModel

SAMPLES: Mapping[str, int] = {"identity": 64, "mlp": 64, "convnet": 16}
SIMULATED_WIDTH = 16

_MOBILENET = (
    # expansion, channels, repeats, stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class Net:
    """Appends nodes with He-initialised weights; every method gives the name of its output."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def node(self, kind: str, inputs: Sequence[str], out: str | None = None, **attrs: Any) -> str:
        out = out or f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [out], **attrs))
        return out

    def dense(self, x: str, n_in: int, n_out: int, *, out: str | None = None) -> str:
        """With ReLU, unless it is the last one and named `out`."""
        weights = [x, self._weight((n_in, n_out), n_in), self._weight((n_out,), 100)]
        if out is not None:
            return self.node("Gemm", weights, out)
        return self.node("Relu", [self.node("Gemm", weights)])

    def conv(
        self, x: str, n_in: int, n_out: int, *, k: int = 1, stride: int = 1, groups: int = 1
    ) -> str:
        return self.node("Relu", [self.linear(x, n_in, n_out, k=k, stride=stride, groups=groups)])

    def linear(
        self, x: str, n_in: int, n_out: int, *, k: int = 1, stride: int = 1, groups: int = 1
    ) -> str:
        """A convolution without ReLU."""
        fan_in = n_in // groups * k * k
        weights = [self._weight((n_out, n_in // groups, k, k), fan_in), self._weight((n_out,), 100)]
        return self.node(
            "Conv",
            [x, *weights],
            kernel_shape=[k, k],
            strides=[stride, stride],
            pads=[k // 2] * 4,
            group=groups,
        )

    def save(self, path: Path, in_shape: Sequence[int], out_shape: Sequence[int]) -> None:
        """The graph from x to y."""
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])
            for name, shape in (("x", in_shape), ("y", out_shape))
        ]
        graph = helper.make_graph(self._nodes, path.stem, ends[:1], ends[1:], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        onnx.save(model, path)

    def _weight(self, shape: Sequence[int], fan_in: int) -> str:
        name = f"w{len(self._weights)}"
        data = self._random.normal(0, (2.0 / fan_in) ** 0.5, shape).astype(np.float32)
        self._weights.append(numpy_helper.from_array(data, name))
        return name


def _identity(path: Path) -> None:
    net = Net(0)
    net.node("Identity", ["x"], "y")
    net.save(path, [16], [16])


def _mlp(path: Path) -> None:
    net = Net(1)
    x = net.dense("x", 784, 512)
    net.dense(net.dense(x, 512, 512), 512, 10, out="y")
    net.save(path, [784], [10])


def _convnet(path: Path) -> None:
    """About 0.3 GMAC and 3.5 M weights for one picture of 224 x 224."""
    net = Net(2)
    x, channels = net.conv("x", 3, 32, k=3, stride=2), 32
    for expansion, wide, repeats, first_stride in _MOBILENET:
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            hidden = channels * expansion
            y = x if expansion == 1 else net.conv(x, channels, hidden)
            y = net.conv(y, hidden, hidden, k=3, stride=stride, groups=hidden)
            y = net.linear(y, hidden, wide)
            x = net.node("Add", [x, y]) if stride == 1 and channels == wide else y
            channels = wide
    x = net.node("GlobalAveragePool", [net.conv(x, channels, 1280)])
    net.dense(net.node("Flatten", [x]), 1280, 1000, out="y")
    net.save(path, [3, 224, 224], [1000])


_BUILDERS: Mapping[str, Callable[[Path], None]] = {
    "identity": _identity,
    "mlp": _mlp,
    "convnet": _convnet,
}


def build(folder: Path) -> None:
    """Write NAME.onnx and NAME.npz of every model, where they are not there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, builder in _BUILDERS.items():
        if not vectors(folder, name).exists():
            builder(model_file(folder, name))
            _save_vectors(folder, name)
    rows = np.random.default_rng(9).normal(0, 1, (64, SIMULATED_WIDTH)).astype(np.float32)
    np.savez(vectors(folder, "sim"), inputs=rows, outputs=rows)


def model_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.onnx"


def vectors(folder: Path, name: str) -> Path:
    """The file of vectors of one model; `sim` has those of every simulated device."""
    return folder / f"{name}.npz"


def _save_vectors(folder: Path, name: str) -> None:
    model = OnnxModel(model_file(folder, name), threads=1)
    shape = (SAMPLES[name], *model.inputs[0].row_shape)
    x = np.random.default_rng(9).normal(0, 1, shape).astype(np.float32)
    y: list[Array] = [model.run({"x": x[at : at + 1]})["y"] for at in range(len(x))]
    np.savez(vectors(folder, name), inputs=x, outputs=np.concatenate(y))


def serve_onnx(
    repository: Path, name: str, file: Path, *, batching: Mapping[str, object] | None = None
) -> None:
    """Put the model `name` into a model repository, with these keys of [batching]."""
    folder = _folder(repository, name, batching or {})
    shutil.copyfile(file, folder / "model.onnx")


def serve_simulated(
    repository: Path,
    name: str,
    *,
    a_ms: float,
    b_ms: float,
    gears: Sequence[int] = (),
    batching: Mapping[str, object] | None = None,
) -> Path:
    """Put a simulated device into a model repository; gives the path of its log of runs."""
    folder = _folder(repository, name, batching or {})
    log = repository / f"{name}.log"
    lines = {"a_ms": a_ms, "b_ms": b_ms, "shape": [SIMULATED_WIDTH], "gears": list(gears)}
    text = _toml(lines) + f"log = '{log}'\n"
    (folder / "model.sim").write_text(text, encoding="utf-8")
    return log


def _folder(repository: Path, name: str, batching: Mapping[str, object]) -> Path:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder.parent / "model.toml").write_text("[batching]\n" + _toml(batching), encoding="utf-8")
    return folder


def _toml(values: Mapping[str, object]) -> str:
    lines = (f"{key} = {repr(value).lower()}" for key, value in values.items())
    return "".join(f"{line}\n" for line in lines)
