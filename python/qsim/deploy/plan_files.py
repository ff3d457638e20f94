"""The files of a plan, for the tools that build engines."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import tempfile
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsim.config.float_plan import FloatPlan
from qsim.deploy import plan_nodes
from qsim.deploy.plan_coreml import selector_source
from qsim.deploy.plan_run import PlanFiles, inputs_of, run_casts
from qsim.numbers.float_format import HALF_FORMATS, SHORT_NAMES

if TYPE_CHECKING:
    import onnx_ir as ir

_FLAGS = {**{format: SHORT_NAMES[format] for format in (*HALF_FORMATS, "float8_e4m3fn")}, "int8": "int8", "int4": "int4"}  # of trtexec


def write(plan: FloatPlan, folder: str | PathLike[str], model: str | PathLike[str] | None = None, batch: Any = None) -> PlanFiles:
    """Write a plan, and what each tool takes that can be told to keep operations in float32.

    ======================== ===================================================================================================
    file                     for
    ======================== ===================================================================================================
    plan.json                `Plan.from_json`
    coreml_op_selector.py    ``coremltools.transform.FP16ComputePrecision(op_selector=...)``; half precision only
    modelopt.json            NVIDIA ModelOpt: ``quant_cfg`` has entries for ``modelopt.torch.quantization.quantize``. With a model:
                             ``nodes_to_exclude`` for ``modelopt.onnx.autocast.convert_to_mixed_precision`` and
                             ``modelopt.onnx.quantization.quantize``, which take regular expressions
    node_block_list.json     ``onnxconverter_common.float16.convert_float_to_float16(model, node_block_list=...)``, and
                             ``nodes_to_exclude`` of ``onnxruntime.quantization.quantize_static``
    trtexec.txt              TensorRT up to 10.16: the command line with ``--layerPrecisions``; not for int16
    <model>.fp16.onnx        TensorRT 10 and 11, ``--stronglyTyped``: the model with Cast; half precision only
    ======================== ===================================================================================================

    The files that name nodes name besides what only moves values between those of the plan (Slice, Where, Reshape ...), and Core ML's
    selector finds it: a tool would run it in the narrow format otherwise, and the plan would cure nothing.

    Sources: the guides "AutoCast (ONNX)" and "Quantization Configuration (quant_cfg)" of NVIDIA's Model-Optimizer (patterns of `fnmatch`
    for names of quantizers, regular expressions for names of nodes); "Create Float16 and Mixed Precision Models" of onnxruntime.ai;
    ``trtexec --help`` of TensorRT 10; coremltools' guide "Typed Execution".

    Parameters
    ----------
    plan : FloatPlan
    folder : path-like
        Made if it is not there. Files of these names are replaced.
    model : path-like, optional
        The model as float32 ONNX, its tensors inside or in files beside it. Without it, the last three files, which name nodes, are not
        written.
    batch : Tensor, tuple, list or dict, optional
        As `qsim.doctor` takes it, and one that shows the fault: the model with Cast is run on it in ONNX Runtime, beside the float model.

    Returns
    -------
    PlanFiles
        What was written, and what was run and found; the rest is not run here. Where the model with Cast is wrong, a warning tells too.

    Raises
    ------
    ExportError
        The model lacks something that the plan keeps, or cannot be divided. Nothing was written then.
    FileFormatError
        The model is no ONNX file that can be read.
    ValueError
        A batch without a model to run, or that lacks an input of it.
    """
    files = {"plan.json": plan.to_json() + "\n"}
    if plan.format in HALF_FORMATS:
        files["coreml_op_selector.py"] = selector_source(plan)
    modules = [name for name in plan.keep if name not in plan.ordinals]
    modelopt: dict[str, Any] = {"quant_cfg": [{"quantizer_name": f"{glob.escape(name)}.*", "enable": False} for name in modules]}
    folder, made, run = Path(folder), list[Path](), None
    if model is None and batch is not None:
        raise ValueError("Plan.write: got a batch and no model; a batch is what the model with Cast is run on")
    if model is not None:
        model, divided, nodes = Path(model), *_nodes(plan, model)
        inputs = None if batch is None else inputs_of(divided, batch)
        modelopt["nodes_to_exclude"] = [f"^{re.escape(node)}$" for node in nodes]
        files["node_block_list.json"] = _json(nodes)
        if plan.format in _FLAGS:
            files["trtexec.txt"] = trtexec_text(plan, model, nodes)
        if plan.format in HALF_FORMATS:
            made = _with_casts(plan, divided, nodes, folder / f"{model.stem}.{_FLAGS[plan.format]}.onnx")
            run = None if inputs is None else run_casts(made[0], model, inputs)
    files["modelopt.json"] = _json(modelopt)
    return PlanFiles((*_written(folder, files), *made), run)


def _nodes(plan: FloatPlan, path: str | PathLike[str]) -> tuple[ir.Model, list[str]]:
    """The model, and the names of the nodes that tools are to keep."""
    found = [node for nodes in plan_nodes.find(path, plan).values() for node in nodes]
    from onnx_ir.passes.common import ShapeInferencePass

    from qsim.onnx.float_region import float_region
    from qsim.onnx.open import open_model

    model = open_model(path)
    ShapeInferencePass()(model)
    return model, float_region(model.graph, found)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def trtexec_text(plan: FloatPlan, model: Path, nodes: list[str]) -> str:
    """The command line of trtexec that builds `model` with the precision of `nodes` pinned."""
    from qsim.deploy.tensorrt import precision_flags

    rest = f"--{_FLAGS[plan.format]}"
    flags = [flag for flag in precision_flags(dict.fromkeys(nodes, "float32")) if flag != rest]
    return shlex.join(["trtexec", f"--onnx={model.name}", f"--saveEngine={model.stem}.engine", rest, *flags]) + "\n"


def _with_casts(plan: FloatPlan, model: ir.Model, nodes: list[str], path: Path) -> list[Path]:
    """Write the model with Cast."""
    from qsim.onnx import file as onnx_file
    from qsim.onnx.half_casts import to_half

    to_half(model, nodes, plan.format)
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    return onnx_file.write(model, path, external_data=size > onnx_file.LARGE)


def _written(folder: Path, files: dict[str, str]) -> list[Path]:
    """Write all files beside their places, then put them there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".plan.", dir=folder) as beside:
        for name, text in files.items():
            (Path(beside) / name).write_text(text, encoding="utf-8", newline="\n")
        for name in files:
            os.replace(Path(beside) / name, folder / name)
    return [folder / name for name in files]
