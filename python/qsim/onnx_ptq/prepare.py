"""A float ONNX model as quantizers can be put into: constants folded, BatchNorm in the convolution before it, types known."""

from __future__ import annotations

import tempfile
from os import PathLike
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes import common

from qsim.files.file_place import FilePlace
from qsim.onnx.open import as_ir, damage_told, first_line, open_proto

OPSET = 19  # what `QuantSim.export` writes


def prepared(path: str | PathLike[str]) -> ir.Model:
    """The model in a file, bounded and checked as `open_proto` does, at opset 19 or later, after ONNX Runtime's basic optimisations.

    Raises
    ------
    FileFormatError
        It is no ONNX model, has quantizers already, cannot be converted, or ONNX Runtime does not load it.
    """
    place, proto = FilePlace(str(path)), open_proto(path)
    if any(node.op_type in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear") for node in proto.graph.node):
        raise place.error("has QuantizeLinear or DequantizeLinear already; expected a float model")
    onnx.load_external_data_for_model(proto, str(Path(path).parent))
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), OPSET)
    if opset < OPSET:
        try:
            proto = onnx.version_converter.convert_version(proto, OPSET)
        except Exception as error:  # the converter has no error of its own
            raise place.error(f"has opset {opset}, and onnx cannot convert it to {OPSET}: {first_line(error)}; export it again") from None
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.onnx"), Path(folder, "basic.onnx")
        onnx.save(proto, given)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(made)
        options.log_severity_level = 3
        try:
            onnxruntime.InferenceSession(str(given), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its own errors have no common class
            raise place.error(f"is not loaded by ONNX Runtime: {first_line(error)}") from None
        model = as_ir(onnx.load(made), path)
    with damage_told(place):
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        common.RemoveUnusedOpsetsPass()(model)
        common.ShapeInferencePass()(model)
    return model
