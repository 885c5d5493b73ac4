"""Small ONNX files, built on the spot."""

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

Shape = Sequence[int | str]
Ends = dict[str, tuple[int, Shape]]


def save(path: Path, nodes: list[onnx.NodeProto], inputs: Ends, outputs: Ends) -> Path:
    """Write a model of `nodes`; inputs and outputs are {name: (TensorProto type, shape)}."""
    graph = helper.make_graph(nodes, "test", _ends(inputs), _ends(outputs))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def _ends(side: Ends) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, *end) for name, end in side.items()]


def save_statistics(path: Path, batch: int | str = "N") -> Path:
    """Two inputs of one inner width each, two outputs: what a row's answer depends on is its row.

    a FP32 [N, W], b FP32 [N, W] -> total FP32 [N] = sum(a * b) of the row, product FP32 [N, W].
    """
    nodes = [
        helper.make_node("Constant", [], ["axes"], value_ints=[1]),
        helper.make_node("Mul", ["a", "b"], ["product"]),
        helper.make_node("ReduceSum", ["product", "axes"], ["total"], keepdims=0),
    ]
    wide = (TensorProto.FLOAT, [batch, "W"])
    return save(
        path,
        nodes,
        {"a": wide, "b": wide},
        {"total": (TensorProto.FLOAT, [batch]), "product": wide},
    )


def save_identity(path: Path, kind: int, shape: Shape) -> Path:
    """One node that changes nothing: x -> y."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return save(path, [node], {"x": (kind, shape)}, {"y": (kind, shape)})


def save_batch_mean(path: Path) -> Path:
    """x FP32 [N, 4] -> y FP32 [1, 4]: a model that mixes its rows, which no batch may do."""
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[0], keepdims=1)
    kind = TensorProto.FLOAT
    return save(path, [node], {"x": (kind, ("N", 4))}, {"y": (kind, (1, 4))})
