"""A calibration cache of TensorRT and the float model that it was made for, as a Q/DQ model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common

from qsim import ops
from qsim.files import EncodingFile
from qsim.files.file_place import FilePlace, listed
from qsim.numbers.encoding import Encoding
from qsim.onnx.file import LARGE, write
from qsim.onnx.insert import NodeInserter
from qsim.onnx.model import size_of
from qsim.onnx.open import as_ir, first_line, open_model, open_proto
from qsim.version import VERSION

_OPSET = 13  # per-channel scales
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_ABSORBED = ("Relu", "Clip", "BatchNormalization")
_JOINING = ("Conv", "ConvTranspose")
_COMPUTING = (*_WEIGHTED, "Add", "Sum")
_LEVELS = 127.0  # TensorRT's weights are symmetric on [-127, 127]


@dataclass(frozen=True)
class CacheConversion:
    """What `onnx_from_cache` did. ``print`` tells it.

    Attributes
    ----------
    path : Path
        The model.
    files : dict of Path to int
        What was written, and its bytes.
    tensors : list of str
        Tensors of the cache that are quantized in the model.
    weights : list of str
        Weights that are stored as int8, with a scale for each output channel.
    skipped : dict of str to str
        Tensors of the cache that are not: why.
    """

    path: Path
    files: dict[Path, int]
    tensors: list[str]
    weights: list[str]
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{file}  {size:,} bytes" for file, size in self.files.items()]
        lines.append(f"{len(self.tensors)} tensors quantized with scales of the cache, {len(self.weights)} weights with their own")
        lines += [f"{len(self.skipped)} tensors of the cache are not quantized:"] if self.skipped else []
        return "\n".join([*lines, *(f"  {name}: {why}" for name, why in self.skipped.items())])


def onnx_from_cache(file: EncodingFile, model: str | os.PathLike[str], path: str | os.PathLike[str]) -> CacheConversion:
    """Write a Q/DQ model that computes in int8 what an engine with this cache would.

    TensorRT 11 takes no calibration caches; what it takes instead are the same scales in the model. Each tensor that the cache names gets
    QuantizeLinear and DequantizeLinear, int8 around 0, where operations read it. The weights of a Conv, ConvTranspose, Gemm or MatMul that
    reads such a tensor become int8 with ``max |w| / 127`` for each output channel, as TensorRT's builder chooses them. Left in float, and
    told: what a ReLU, Clip or BatchNormalization reads that is one kernel with the operation before it, what only leaves the model, and
    what the model does not have (a cache also names tensors of TensorRT's own). Biases stay in float.

    Parameters
    ----------
    file : EncodingFile
        Of the format "tensorrt-cache", from `qsim.load_encodings`.
    model : path-like
        The float model, as it was calibrated: names of tensors have to be the same. Opsets before 13 are converted.
    path : path-like
        Where the Q/DQ model goes; replaced as a whole, or left as it was.

    Returns
    -------
    CacheConversion

    Raises
    ------
    FileFormatError
        The model is none, has quantizers already, or has no tensor that the cache names.
    ValueError
        `file` is no calibration cache.
    OSError
        The model cannot be read, or `path` not be written.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> folder = tempfile.mkdtemp()
    >>> x, names = torch.ones(1, 3), {"input_names": ["x"], "output_names": ["y"]}
    >>> program = torch.onnx.export(nn.Linear(3, 2).eval(), (x,), f"{folder}/float.onnx", dynamo=True, verbose=False, **names)
    >>> _ = open(f"{folder}/old.cache", "w").write("TRT-8501-EntropyCalibration2\\nx: 3c010204\\n")
    >>> done = onnx_from_cache(qsim.load_encodings(f"{folder}/old.cache"), f"{folder}/float.onnx", f"{folder}/int8.onnx")
    >>> done.tensors, len(done.weights)
    (['x'], 1)
    """
    if file.format != "tensorrt-cache":
        raise ValueError(f"onnx_from_cache: got a file of the format {file.format!r}; expected 'tensorrt-cache'")
    opened, place = _opened(model), FilePlace(str(model))
    if any(node.op_type == "QuantizeLinear" for node in opened.graph.all_nodes()):
        raise place.error("has QuantizeLinear already; expected the float model that was calibrated")
    conversion = _Conversion(opened, file)
    conversion.run()
    if not conversion.tensors:
        raise place.error(
            f"has no tensor that can be quantized among the {len(file.entries)} of the cache, such as {listed(file.entries)}; "
            f"expected the model that was calibrated, and this one has the inputs {listed(value.name for value in opened.graph.inputs)}"
        )
    opened.metadata_props.update({"qsim.version": VERSION, "qsim.target": "tensorrt"})
    target = Path(path)
    files = write(opened, target, external_data=size_of(opened) > LARGE)
    sizes = {written: written.stat().st_size for written in files}
    return CacheConversion(target, sizes, conversion.tensors, conversion.weights, conversion.skipped)


def _opened(path: str | os.PathLike[str]) -> ir.Model:
    """The model, with operators that know scales per channel."""
    model = open_model(path)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.ShapeInferencePass()(model)  # types tell what holds numbers
    if model.opset_imports.get("", _OPSET) >= _OPSET:
        return model
    try:
        proto = onnx.version_converter.convert_version(open_proto(path), _OPSET)
    except Exception as error:  # the converter has no error of its own
        raise FilePlace(str(path)).error(
            f"has opset {model.opset_imports['']}, and onnx cannot convert it to {_OPSET}: {first_line(error)}; export it again"
        ) from None
    return as_ir(proto, path)


class _Conversion:
    """Inserts quantizers into a graph."""

    def __init__(self, model: ir.Model, file: EncodingFile) -> None:
        self.graph, self.encodings = model.graph, file.encodings
        self.tensors: list[str] = []
        self.weights: list[str] = []
        self.skipped: dict[str, str] = {}
        self._insert = NodeInserter(model.graph)
        self._held: dict[tuple[str, int | None], ir.Value] = {}

    def run(self) -> None:
        values = {value.name: value for value in [*self.graph.inputs, *(v for node in self.graph for v in node.outputs)]}
        quantized: list[ir.Value] = []
        for name, encoding in self.encodings.items():
            value = values.get(name)
            reason = "the model has no such tensor" if value is None else _reason(value)
            if value is None or reason:
                self.skipped[name] = reason
            else:
                quantized.append(self._quantize(value, encoding))
                self.tensors.append(name)
        for value in quantized:
            for node, index in value.uses():
                if node.op_type in _WEIGHTED and index == 0:
                    self._quantize_weight(node)

    def _quantize(self, x: ir.Value, encoding: Encoding) -> ir.Value:
        """The tensor behind QuantizeLinear and DequantizeLinear, which all its readers read from now on."""
        uses = list(x.uses())
        name = str(x.name)
        first = min((node for node, _ in uses), key=list(self.graph).index)
        grid = [
            self._insert.initializer(f"{name}_scale", encoding.scale.float(), "float32"),
            self._insert.initializer(f"{name}_zero_point", torch.tensor(0), "int8"),
        ]
        q = self._insert.node(first, "QuantizeLinear", [x, *grid], f"{name}_quantized", ir.DataType.INT8, x.shape)
        y = self._insert.node(first, "DequantizeLinear", [q, *grid], f"{name}_dequantized", ir.DataType.FLOAT, x.shape)
        for node, index in uses:
            node.replace_input_with(index, y)
        return y

    def _quantize_weight(self, node: ir.Node) -> None:
        weight = node.inputs[1]
        if weight is None or weight.const_value is None or weight.dtype is not ir.DataType.FLOAT:
            return
        values = torch.tensor(weight.const_value.numpy())
        axis = _channels(node, values.dim())
        known = (str(weight.name), axis)
        if known not in self._held:
            self._held[known] = self._stored(node, str(weight.name), values, axis)
        node.replace_input_with(1, self._held[known])
        if not weight.uses() and not weight.is_graph_output():
            del self.graph.initializers[str(weight.name)]

    def _stored(self, node: ir.Node, name: str, values: torch.Tensor, axis: int | None) -> ir.Value:
        others = [dim for dim in range(values.dim()) if dim != axis]
        largest = values.abs().amax(others) if axis is not None else values.abs().amax()
        scale = torch.where(largest > 0, largest / _LEVELS, 1.0)
        zeros = torch.zeros(scale.shape, dtype=torch.int32)
        q = self._insert.initializer(f"{name}_quantized", ops.quantize(values, scale, zeros, -127, 127, axis=axis), "int8")
        grid = [self._insert.initializer(f"{name}_scale", scale, "float32"), self._insert.initializer(f"{name}_zero_point", zeros, "int8")]
        axes = {} if axis is None else {"axis": axis}
        self.weights.append(name)
        return self._insert.node(
            node, "DequantizeLinear", [q, *grid], f"{name}_dequantized", ir.DataType.FLOAT, ir.Shape(values.shape), **axes
        )


def _reason(value: ir.Value) -> str:
    """Why a tensor stays in float; "" if it does not."""
    readers = value.consumers()
    producer = value.producer()
    if value.dtype is not None and value.dtype is not ir.DataType.FLOAT:
        return f"it holds {value.dtype.name.lower()}"
    if not readers:
        return "it only leaves the model"
    if any(reader.graph is not value.graph for reader in readers):
        return "a graph inside the model reads it"
    if len(readers) > 1 or value.is_graph_output() or producer is None:
        return ""
    (reader,) = readers
    if reader.op_type in _ABSORBED and producer.op_type in (*_COMPUTING, "BatchNormalization"):
        return f"{producer.op_type} and {reader.op_type} are one kernel; the scale of its result counts"
    if reader.op_type == "Add" and producer.op_type == "MatMul" and any(_is_constant(other) for other in reader.inputs):
        return "MatMul and the Add of its bias are one kernel; the scale of the sum counts"
    if reader.op_type == "Add" and _joined(reader) is value:
        return f"{producer.op_type} and the Add behind it are one kernel, which reads the other operand alone"
    return ""


def _joined(add: ir.Node) -> ir.Value | None:
    """The operand of an addition that TensorRT computes in the same kernel: the first convolution's that nothing else reads."""
    for value in add.inputs:
        producer = None if value is None else value.producer()
        if value is not None and producer is not None and producer.op_type in _JOINING and len(value.uses()) == 1:
            return None if any(_is_constant(other) for other in add.inputs) else value
    return None


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _channels(node: ir.Node, dims: int) -> int | None:
    """The axis of a weight that its output channels lie along."""
    if node.op_type == "MatMul":
        return dims - 1 if dims == 2 else None
    if node.op_type == "Gemm":
        turned = node.attributes.get("transB")
        return 0 if turned is not None and turned.as_int() else 1
    return 1 if node.op_type == "ConvTranspose" else 0
