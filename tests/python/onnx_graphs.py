"""Small ONNX models in QuantizeLinear / DequantizeLinear form, and ONNX Runtime to run them."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from qsim.numbers.encoding import Encoding
from qsim.onnx.sessions import entries

TYPES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "int4": TensorProto.INT4, "int32": TensorProto.INT32}
DTYPES = {"int8": np.int8, "uint8": np.uint8, "int32": np.int32}


@dataclass(frozen=True)
class Grid:
    """Scale (a number, or one per channel along `axis`), zero point and storage type of a tensor."""

    scale: float | np.ndarray
    zero_point: int = 0
    dtype: str = "int8"
    axis: int = 0


@dataclass
class GraphBuilder:
    """Collects nodes; every method returns the name of a result."""

    opset: int = 21
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    count: int = 0

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}"

    def constant(self, values: np.ndarray, dtype: str | None = None) -> str:
        name = self.name("constant")
        if dtype is None:
            self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        else:
            self.constants.append(helper.make_tensor(name, TYPES[dtype], values.shape, values.ravel().tolist()))
        return name

    def input(self, name: str, shape: list[int | str], dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def node(self, op: str, *operands: str, results: int = 1, **attributes: object) -> str:
        names = [self.name(op) for _ in range(results)]
        self.nodes.append(helper.make_node(op, list(operands), names, **attributes))
        return names[0]

    def _parameters(self, grid: Grid) -> tuple[list[str], dict[str, int]]:
        scale = np.asarray(grid.scale, np.float32)
        parameters = [self.constant(scale)]
        if grid.dtype != "int32":
            parameters.append(self.constant(np.full(scale.shape, grid.zero_point), grid.dtype))
        return parameters, {"axis": grid.axis} if scale.ndim else {}

    def quantize(self, x: str, grid: Grid) -> str:
        parameters, attributes = self._parameters(grid)
        return self.node("QuantizeLinear", x, *parameters, **attributes)

    def dequantize(self, q: str, grid: Grid) -> str:
        parameters, attributes = self._parameters(grid)
        return self.node("DequantizeLinear", q, *parameters, **attributes)

    def stored(self, q: np.ndarray, grid: Grid) -> str:
        """A constant that is stored as integers."""
        return self.dequantize(self.constant(q, grid.dtype), grid)

    def run(self, outputs: dict[str, int], feed: dict[str, np.ndarray], kernel: str) -> np.ndarray:
        """The first output, by the optimised graph, which must have one node of the operator `kernel` and no other that computes."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "optimised.onnx"
            running = self.session(outputs, save=file)
            computing = {op: count for op, count in kernels(file).items() if op not in ("Transpose", "Reshape")}
        assert computing == {kernel: 1}, computing
        return running.run(None, feed)[0]

    def session(self, outputs: dict[str, int], optimize: bool = True, save: Path | None = None) -> onnxruntime.InferenceSession:
        """Outputs by name, with their element types."""
        ends = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()]
        graph = helper.make_graph(self.nodes, "test", self.inputs, ends, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        return session(model.SerializeToString(), optimize, save)


def session(model: bytes | str, optimize: bool = True, save: Path | None = None) -> onnxruntime.InferenceSession:
    """Of a model, with all optimisations or none; `save` writes the graph that runs."""
    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    held = ir.from_proto(onnx.load_from_string(model)) if isinstance(model, bytes) else ir.load(model)
    for entry in entries(held)[0].items():
        options.add_session_config_entry(*entry)
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if save is not None:
        options.optimized_model_filepath = str(save)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def kernels(saved: Path) -> Counter[str]:
    """How often each operator is in the graph that `session` wrote."""
    return Counter(node.op_type for node in onnx.load(saved).graph.node)


RANGES = {"int8": (-128, 127), "uint8": (0, 255)}


def encoding(grid: Grid) -> Encoding:
    """The grid as qsim has it."""
    scale = torch.tensor(np.asarray(grid.scale, np.float32))
    zero_point = torch.full(scale.shape, int(grid.zero_point), dtype=torch.int32)
    return Encoding(scale, zero_point, *RANGES[grid.dtype], axis=grid.axis if scale.dim() else None, dtype=grid.dtype)


def random_grid(rng: np.random.Generator, dtype: str, scale: float) -> Grid:
    """With any zero point."""
    low, high = RANGES[dtype]
    return Grid(np.float32(scale), int(rng.integers(low, high + 1)), dtype)


def integers(rng: np.random.Generator, dtype: str, shape: object) -> np.ndarray:
    """Any integers of a type."""
    low, high = RANGES[dtype]
    return rng.integers(low, high + 1, shape).astype(DTYPES[dtype])
