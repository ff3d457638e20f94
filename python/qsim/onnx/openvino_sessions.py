"""Sessions of OpenVINO on the CPU, where it is installed, and what its runtime model tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from qsim.onnx.lint import lint, reads_quantized
from qsim.onnx.sessions import could_saturate

Array = np.ndarray[Any, Any]
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_EXECUTED = ("Convolution", "Deconvolution", "FullyConnected", "MatMul")  # what OpenVINO's CPU plugin makes of them
_INTEGERS = ("u8", "i8")


def is_installed() -> bool:
    """Whether ``import openvino`` finds a package."""
    return find_spec("openvino") is not None


class OpenVinoSession:
    """A model compiled for the CPU, run as `onnxruntime.InferenceSession` is; in float32 where it is not on integers.

    Parameters
    ----------
    path : Path
        Of an ONNX model.
    """

    def __init__(self, path: Path) -> None:
        import openvino

        self.version: str = openvino.__version__.partition("-")[0]
        settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}  # bfloat16 by default, on CPUs that have it
        self._compiled = openvino.Core().compile_model(str(path), "CPU", settings)

    def run(self, names: None, inputs: Mapping[str, Array]) -> list[Array]:
        """All outputs, in order."""
        found = self._compiled(dict(inputs))
        return [found[output].copy() for output in self._compiled.outputs]

    def precisions(self) -> dict[str, str]:
        """What convolutions and products compute in ("u8", "i8", "f32"), by the names of the nodes that they were, or of their results.

        One that it fused with others has all their names.
        """
        found = {}
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            told = {key: node.get_rt_info()[key].astype(str) for key in ("layerType", "originalLayersNames", "runtimePrecision")}
            if told["layerType"] in _EXECUTED:
                for name in told["originalLayersNames"].split(","):
                    found[name.partition("/")[0]] = told["runtimePrecision"]
        return found


def in_float(model: ir.Model, precisions: Mapping[str, str]) -> dict[str, str]:
    """Convolutions and products of a Q/DQ model that OpenVINO computes in float: why.

    Parameters
    ----------
    model : ir.Model
    precisions : mapping
        `OpenVinoSession.precisions` of it.
    """
    reasons, found = lint(model, "openvino"), {}
    for node in model.graph:
        name = str(node.name)
        if node.op_type in _PRODUCTS and (name in reasons or reads_quantized(node)):
            told = precisions.get(name) or precisions.get(str(node.outputs[0].name))
            if told not in _INTEGERS:
                ran = f"OpenVINO computes it in {told}" if told else "OpenVINO made another operation of it"
                found[name] = reasons.get(name, ran)
    return found


def exposed(model: ir.Model, activations: Iterable[str]) -> list[str]:
    """Make outputs of what tensors of integers stand for, so that the integers can be compared.

    Parameters
    ----------
    model : ir.Model
        Changed: it has the outputs behind those it had.
    activations : iterable of str
        Names of results of QuantizeLinear.

    Returns
    -------
    list of str
        Names of the new outputs' integers. What is an output already is left out.
    """
    wanted, made = set(activations), []
    for node in model.graph:
        value = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if value is not None and value.name in wanted and not node.outputs[0].is_graph_output():
            wanted.remove(value.name)
            model.graph.outputs.append(node.outputs[0])
            made.append(str(value.name))
    return made


def notes(model: ir.Model) -> list[str]:
    """What to know of CPUs other than this one, as sentences.

    Its convolutions are oneDNN's, which without VNNI add two products of uint8 and int8 in 16 bits (oneDNN, "Nuances of int8
    computations"): tried with OpenVINO 2026.4 held to AVX2 and to AVX-512 without VNNI.
    """
    if not could_saturate(model):
        return []
    return [
        "on x86 CPUs without VNNI OpenVINO's sums of two products saturate at 16 bits: use weights of 7 bits there, "
        "Config.override(weight={'bits': 7})"
    ]
