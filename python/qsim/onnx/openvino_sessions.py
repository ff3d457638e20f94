"""Sessions of OpenVINO on the CPU, where it is installed, and what its runtime model tells."""

from __future__ import annotations

import os
import subprocess
import sys
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
# bfloat16 is the default on CPUs that have it.
_SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
_TRIAL = f"import sys, openvino; openvino.Core().compile_model(sys.argv[1], 'CPU', {_SETTINGS})"


def is_installed() -> bool:
    """Whether ``import openvino`` finds a package."""
    return find_spec("openvino") is not None


def refusal(path: Path) -> str | None:
    """Why OpenVINO cannot compile a model; None if it can. Tried in a process of its own: OpenVINO 2026.4 ends it for some models."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    tried = subprocess.run([sys.executable, "-c", _TRIAL, str(path)], env=environment, capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return None
    if tried.returncode < 0:
        return f"it ends its process by signal {-tried.returncode}"
    said = [line.strip() for line in tried.stderr.splitlines() if line.strip()]
    return next(
        (line for line in said if "CALLBACK HAS THROWN" in line or "with a message" in line), said[-1] if said else "it says nothing"
    )


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
        self._compiled = openvino.Core().compile_model(str(path), "CPU", _SETTINGS)

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
                ran = f"OpenVINO computes it in {told}" if told else "OpenVINO left it out, or made another operation of it"
                found[name] = reasons.get(name, ran)
    return found


def exposed(model: ir.Model, activations: Iterable[str], *, given: bool) -> list[str]:
    """Make outputs of tensors of integers, so that they can be compared.

    Parameters
    ----------
    model : ir.Model
        Changed: it has the outputs behind those it had.
    activations : iterable of str
        Names of results of QuantizeLinear.
    given : bool
        Have what reads them read inputs instead, ``<name>_given``, behind those it had: each operation between two quantizers then
        stands by itself, and what differs at one changes nothing behind it.

    Returns
    -------
    list of str
        Names of the new outputs.
    """
    wanted, made = set(activations), []
    for node in model.graph:
        value = node.outputs[0]
        if node.op_type == "QuantizeLinear" and value.name in wanted:
            made.append(str(value.name))
            model.graph.outputs.append(value)
            if given:
                own = ir.Value(name=f"{value.name}_given", shape=value.shape, type=value.type)
                model.graph.inputs.append(own)
                for user, index in value.uses():
                    if user.op_type == "DequantizeLinear":
                        user.replace_input_with(index, own)
    return made


def notes(model: ir.Model) -> list[str]:
    """Where OpenVINO computes other numbers, as sentences.

    Its convolutions are oneDNN's, which without VNNI add two products of uint8 and int8 in 16 bits (oneDNN, "Nuances of int8
    computations"): tried with OpenVINO 2026.4 held to AVX2 and to AVX-512 without VNNI. That biases are lost was measured: the
    same file with all sizes fixed is exact.
    """
    found = []
    if could_saturate(model):
        found.append(
            "on x86 CPUs without VNNI OpenVINO's sums of two products saturate at 16 bits: use weights of 7 bits there, "
            "Config.override('*', weight={'bits': 7})"
        )
    is_open = any(not isinstance(size, int) for value in model.graph.inputs for size in value.shape or ())
    biased = any(node.op_type == "Conv" and len(node.inputs) == 3 and reads_quantized(node) for node in model.graph)
    if is_open and biased and any(node.op_type == "Shape" for node in model.graph):
        found.append(
            "the file asks for sizes while it runs, and OpenVINO 2026.4 may lose the biases of convolutions on integers then: look at "
            "verify=, or fix the sizes, dynamic_batch=False"
        )
    return found
