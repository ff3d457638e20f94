"""Errors for exporters of others, which know nothing of what a simulation computes and say so in words of their own."""

from __future__ import annotations

from typing import NoReturn

from torch.onnx import is_in_onnx_export

from qsim.errors import ExportError


def refuse_exporter(simulates: bool) -> None:
    """Raise an ExportError while torch.onnx.export runs: it has no operators for what a simulation computes, and says so in words of its
    own once it has traced everything."""
    if simulates and is_in_onnx_export():
        raise ExportError(
            "QuantSim: torch.onnx.export cannot write a simulation; sim.export('model.onnx', target='onnxruntime') writes it with "
            "QuantizeLinear and DequantizeLinear. The float model: torch.onnx.export within `with sim.in_float():`"
        )


refuse_exporter._dynamo_marked_constant = True  # type: ignore[attr-defined]  # under Dynamo `is_in_onnx_export` would always be False


def refuse_script() -> NoReturn:
    """Raise a TypeError where torch.jit.script prepares a module."""
    raise TypeError(
        "QuantSim: torch.jit.script cannot compile a simulation; sim.export(path) writes ONNX with its integers, and sim.bake() is a "
        "plain module with its weights on their grids"
    )
