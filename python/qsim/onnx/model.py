"""The ONNX model of a traced simulation, in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
import torch
from torch import Tensor

from qsim.errors import ExportError
from qsim.onnx import opsets, tidy
from qsim.onnx.batch_weights import hold_batches_in_float
from qsim.onnx.block_kernels import use_block_kernels
from qsim.onnx.channel_blocks import fill_channel_blocks
from qsim.onnx.export_options import Options
from qsim.onnx.float_biases import hold_biases
from qsim.onnx.float_means import hold_means_in_float
from qsim.onnx.half_regions import FallbackRegions
from qsim.onnx.held_sums import hold_sums
from qsim.onnx.lint import narrow_softmaxes
from qsim.onnx.look_ups import look_up_integers
from qsim.onnx.lower import Lowering
from qsim.onnx.pads import fold_pads
from qsim.onnx.repeated_channels import repeat_channels
from qsim.onnx.translate import translate
from qsim.quantizers.quantizer import Quantizer
from qsim.trace.capture import Program
from qsim.trace.mark_uses import MarkUses, per_channel
from qsim.trace.marks_behind_moves import operation
from qsim.trace.outputs import keep_tensors, output_names
from qsim.trace.runtimes import Runtime
from qsim.trace.storages import Storages, storages
from qsim.trace.token_scales import ScaleOne
from qsim.version import VERSION


@dataclass(frozen=True)
class Built:
    """A model, the tensor that each quantizer makes, what there is to say, and the formats of nodes that fall back."""

    model: ir.Model
    names: dict[str, str]
    notes: list[str]
    fallback: dict[str, str]


def build(program: Program, mark_uses: MarkUses, quantizers: Mapping[str, Quantizer], target: Runtime, options: Options) -> Built:
    """Translate and lower a program.

    Parameters
    ----------
    program : Program
        Its marks are those of `mark_uses`.
    mark_uses : MarkUses
        Expressible by the target.
    quantizers : mapping of str to Quantizer
    target : Runtime
    options : Options

    Raises
    ------
    ExportError
        An operation has no translation, an option does not fit, or a tensor has a type that ONNX does not quantize.
    """
    inputs = _ends("input", options.input_names, [node.name for node in program.inputs])
    tensors, others = output_names(program.exported)
    keep_tensors(program.exported)
    outputs = _ends("output", options.output_names, [f"output_{name}" if name in inputs else name for name in tensors])
    stored = storages(mark_uses, quantizers, target)
    movable = set(quantizers) - per_channel(quantizers) if target.marks_moves else set()
    model = translate(program, _opset(program, mark_uses, quantizers, stored, target, options.opset), movable=movable)
    tidy.fold(model)
    if target.marks_moves:
        tidy.mark_before_reshapes(model, movable)
    _refuse_doubles(model)
    regions = FallbackRegions(model)
    regions.run()
    lowering = Lowering(model, quantizers, stored)
    lowering.run()
    tidy.read_sizes_of_integers(model)
    fold_pads(model)
    level = options.accuracy_level if target.name == "onnxruntime" else None
    kernels = [] if level is None else use_block_kernels(model, lowering.names, level)
    batches: list[str] = []
    if target.name == "onnxruntime":
        look_up_integers(model)
        batches = hold_batches_in_float(model)
        hold_means_in_float(model)
    tidy.clean(model)
    wider = _for_fast_convolutions(model) if target.channel_blocks else 0
    tidy.pass_on_ends(model)
    tidy.name_nodes(model)
    tidy.name_ends(model, inputs, outputs)
    saturating = hold_biases(model) if target.only8 else []
    if program.sizes is not None:
        tidy.name_sizes(model, program.sizes)
    else:
        tidy.name_batch(model, None if program.dynamic_batch and options.dynamic_batch else program.example_batch)
    kept = set(model.graph)
    fallback = {str(node.name): format for node, format in regions.formats.items() if node in kept}
    if target.only8:
        hold_sums(model)
    _describe(model, target, quantizers, lowering.names, fallback)
    have = "1 tensor has" if wider == 1 else f"{wider} tensors have"
    blocks = [f"{have} more channels than in the model, zeros or repeated ones, for the runtime's fast kernels"] if wider else []
    left_out = [f"forward also returns what is no tensor, and the file has not: {', '.join(others)}"] if others else []
    own = [*left_out, *_notes(program, mark_uses, quantizers, target, lowering), *(_warnings(model, saturating) if target.only8 else ())]
    notes = [*stored.notes, *kernels, *batches, *blocks, *own]
    return Built(model, lowering.names, notes, fallback)


def _for_fast_convolutions(model: ir.Model) -> int:
    """How many tensors have more channels than the model's."""
    repeated = repeat_channels(model)
    return repeated + fill_channel_blocks(model)


def _opset(
    program: Program, mark_uses: MarkUses, quantizers: Mapping[str, Quantizer], stored: Storages, target: Runtime, wanted: int | None
) -> int:
    nodes = program.exported.graph.nodes
    tensors = [node.meta.get("val") for node in nodes]
    bfloat16 = any(isinstance(t, Tensor) and t.dtype is torch.bfloat16 for t in tensors) or "bfloat16" in mark_uses.formats
    blocks = [key for key in stored.constants if quantizers[key].spec.block_size is not None]
    best = opsets.preferred(target, {operation(node) for node in nodes})
    return opsets.chosen(wanted, list(opsets.needed(stored, blocks, bfloat16)), onnx.defs.onnx_opset_version(), best)


def _ends(what: str, wanted: Sequence[str] | None, own: list[str]) -> list[str]:
    """Names of inputs or outputs."""
    if wanted is None:
        return own
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if len(names) != len(own) or len(set(names)) < len(names):
        raise ExportError(f"QuantSim.export: got {what}_names={names}; expected {len(own)} different names, for {', '.join(own)}")
    return names


def _refuse_doubles(model: ir.Model) -> None:
    doubles = sorted({str(value.name) for value in model.graph.inputs if value.dtype is ir.DataType.DOUBLE})
    if doubles:
        raise ExportError(
            f"QuantSim.export: {', '.join(doubles)} is float64, which ONNX does not quantize, and nothing was written. "
            "Simulate the model in float32: model.float()."
        )


def _describe(
    model: ir.Model, target: Runtime, quantizers: Mapping[str, Quantizer], names: Mapping[str, str], fallback: Mapping[str, str]
) -> None:
    fixed = [key for key in names if not isinstance(quantizers[key], ScaleOne)]
    encodings = {key: encoding.to_dict() for key in fixed if (encoding := quantizers[key].encoding) is not None}
    model.producer_name, model.producer_version = "qsim", VERSION
    model.metadata_props.clear()
    model.metadata_props.update(
        {
            "qsim.version": VERSION,
            "qsim.target": target.name,
            "qsim.encodings": json.dumps(encodings, separators=(",", ":")),
            "qsim.names": json.dumps(dict(names), separators=(",", ":")),
            **({"qsim.fallback": json.dumps(dict(fallback), separators=(",", ":"))} if fallback else {}),
        }
    )


def size_of(model: ir.Model) -> int:
    """Bytes of all initializers."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(math.ceil(tensor.nbytes) for tensor in tensors if tensor is not None)


def _notes(program: Program, mark_uses: MarkUses, quantizers: Mapping[str, Quantizer], target: Runtime, lowering: Lowering) -> list[str]:
    notes = []
    absent = [key for key in quantizers if key not in mark_uses.uses]
    for keys, why in ((lowering.bypassed, "switched off"), (absent, "not in the traced graph: fallen back, or for training alone")):
        if keys:
            notes.append(f"nothing stands for {len(keys)} quantizer{'s' * (len(keys) != 1)}, {why}: {', '.join(keys)}")
    if program.fixed:
        notes.append(f"fixed, because forward makes numbers of them: {', '.join(program.fixed)}")
    if not program.dynamic_batch and program.sizes is None:
        notes.append(
            f"the batch size is fixed to {program.example_batch}: something in forward makes a number of it, such as len(x); "
            "x.shape[0] leaves it open"
        )
    tokens = sum(isinstance(quantizers[key], ScaleOne) for key in lowering.names)
    if tokens:
        notes.append(f"{tokens} activations take a scale from each token or tensor: they are divided by it, and products multiplied by it")
    reciprocal = [key for key in lowering.names if quantizers[key].spec.rounding == "reciprocal" and False in mark_uses.uses[key]]
    if reciprocal:
        notes.append(f"{len(reciprocal)} quantizers multiply by 1 / scale; QuantizeLinear divides, so ties may round the other way")
    return notes


def _warnings(model: ir.Model, saturating: list[str]) -> list[str]:
    """Where ONNX Runtime computes something else than the file says."""
    found = []
    if saturating:
        found.append(
            f"ONNX Runtime's optimiser makes the biases of {', '.join(saturating)} int32, where they overflow: "
            'InferenceSession(..., disabled_optimizers=["WeightBiasQuantization"]) leaves them in float'
        )
    if names := narrow_softmaxes(model):
        found.append(f"ONNX Runtime before 1.32 may return zeros for {', '.join(names)}, whose grids end far below 1: take 1.32 or later")
    return found
