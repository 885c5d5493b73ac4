"""Builds 1/model.onnx, a tensor model small enough for tests: y = 2 * x + 1 on rows of four.

python models/double/build_model.py
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def build(path: Path) -> None:
    """Write the model: input `x` and output `y`, both FP32 of shape [N, 4]."""
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["z"]),
        helper.make_node("Add", ["z", "one"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.float32(2), "two"),
        numpy_helper.from_array(np.float32(1), "one"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "double", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


if __name__ == "__main__":
    build(Path(__file__).parent / "1" / "model.onnx")
