"""Float ONNX models written by hand, as other tools write them, and calibration caches for them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

# Conv, ReLU, a residual addition, a transposed convolution, pooling, Gemm in both orders, MatMul and the addition of its bias.
_NODES = [
    ("Conv", ["x", "w1", "b1"], "conv1", {"pads": [1, 1, 1, 1]}),
    ("Relu", ["conv1"], "relu1", {}),
    ("Conv", ["relu1", "w2"], "conv2", {"pads": [1, 1, 1, 1]}),
    ("Add", ["conv2", "relu1"], "sum", {}),
    ("Relu", ["sum"], "relu2", {}),
    ("ConvTranspose", ["relu2", "w3"], "up", {"strides": [2, 2]}),
    ("GlobalAveragePool", ["up"], "pooled", {}),
    ("Flatten", ["pooled"], "flat", {}),
    ("Gemm", ["flat", "w4", "b4"], "fc1", {"transB": 1}),
    ("Gemm", ["fc1", "w5"], "fc2", {}),
    ("MatMul", ["fc2", "w6"], "product", {}),
    ("Add", ["product", "b6"], "y", {}),
]
SHAPES = {
    "w1": (8, 3, 3, 3),
    "b1": (8,),
    "w2": (8, 8, 3, 3),
    "w3": (8, 4, 2, 2),
    "w4": (6, 4),
    "b4": (6,),
    "w5": (6, 5),
    "w6": (5, 7),
    "b6": (7,),
}
CHANNELS = {"w1": 0, "w2": 0, "w3": 1, "w4": 0, "w5": 1, "w6": 1}  # the axis of output channels
TENSORS = ["x", *(name for _, _, name, _ in _NODES)]


def network(path: Path, opset: int = 17) -> Path:
    """A float model, `x` (batch, 3, 8, 8) to `y` (batch, 7)."""
    rng = np.random.default_rng(0)
    constants = [numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name) for name, shape in SHAPES.items()]
    nodes = [helper.make_node(op, inputs, [name], name=f"node_{name}", **attributes) for op, inputs, name, attributes in _NODES]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", ["n", 3, 8, 8]), ("y", ["n", 7]))]
    graph = helper.make_graph(nodes, "test", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, producer_name="hand"), path)
    return path


def images(n: int = 4) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(n, 3, 8, 8)).astype(np.float32)


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of `network` for `images`, by ONNX Runtime."""
    model = onnx.load(path)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in TENSORS[1:-1])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return {"x": images(), **dict(zip(names, session.run(None, {"x": images()}), strict=True))}


def steps(path: Path) -> dict[str, np.float32]:
    """What TensorRT's calibrator would write for each tensor: amax / 127."""
    return {name: np.float32(np.abs(values).max() / 127) for name, values in tensors(path).items()}


def cache(path: Path, scales: dict[str, np.float32]) -> Path:
    """A calibration cache, as TensorRT writes it."""
    lines = [f"{name}: {struct.pack('>f', scale).hex()}\n" for name, scale in scales.items()]
    path.write_text("TRT-8501-EntropyCalibration2\n" + "".join(lines))
    return path


def inputs_of(path: Path) -> dict[str, np.ndarray]:
    """The initializers of a model."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def run(path: Path, x: np.ndarray | None = None) -> np.ndarray:
    """Its first output, without optimisations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images() if x is None else x})[0]
