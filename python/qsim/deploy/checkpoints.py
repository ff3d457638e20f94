"""Between a simulation and checkpoints with packed integer weights."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qsim.checkpoints import (
    CHECKPOINT_FORMATS,
    Checkpoint,
    PackedWeight,
    first_names,
    fp8,
    load_checkpoint,
    place_of,
    save_checkpoint,
    write_packed,
)
from qsim.checkpoints.activation import Activation
from qsim.checkpoints.experts import split, tiles_problem
from qsim.checkpoints.published_names import STACK, FileLayout, published
from qsim.deploy.bake import BakedWeight, entries, integers
from qsim.deploy.checkpoint_activations import activations_of, fitting_activations, operands, places_problems
from qsim.deploy.checkpoint_caches import caches_of, fitting_caches
from qsim.errors import FileFormatError
from qsim.files import Entry
from qsim.files.fitting import fitted
from qsim.numbers.encoding import Encoding
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.snapshot import rewriting
from qsim.simulation.simulation import Simulation
from qsim.warning import warn

_LAYOUTS = ((None, True), (0, True), (1, False), ((0, 1), False))  # axes of scales, and whether they are without blocks
_STACKED = ((0, True), (2, False), ((1, 2), False))  # of a parameter with several matrices
_SMALLEST = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}  # smallest normal numbers: kernels may flush what is below


def save_compressed(sim: Simulation, folder: str | os.PathLike[str], format: str) -> None:
    """`QuantSim.save_compressed` documents it."""
    every = list(entries(sim, "save_compressed"))
    activations = activations_of(sim, {name for name, _, weight in every if weight is not None})
    spec, scales, keys = caches_of(sim)
    layout = published(sim.model, scales)
    _check(sim, every, activations, format, keys, layout)
    _tell_of_folds(sim)
    activations = {theirs: activation for name, activation in activations.items() for theirs in layout.called(name)}
    scales = {theirs: encoding for name, encoding in scales.items() for theirs in layout.called(name)}
    packed = _packed(every, layout, format)
    if format not in CHECKPOINT_FORMATS or format == "gguf":  # its header says what comes
        named = dict(packed)
        weights = {name: entry for name, entry in named.items() if isinstance(entry, PackedWeight)}
        others = {name: entry for name, entry in named.items() if isinstance(entry, Tensor)}
        specs = {name: activation.spec for name, activation in activations.items()}
        save_checkpoint(Checkpoint(weights, others, format, activations=specs, kv_cache=spec), folder, format)
        return
    cache = None if spec is None else (spec, scales)
    linear = _linear(sim.model, layout)
    write_packed(Path(folder), packed, format, _model_config(sim.model), linear, activations=activations, cache=cache)


def _tell_of_folds(sim: Simulation) -> None:
    """Say that what is written has no BatchNorms, which nothing in a file does."""
    if folds := [fold for fold, _ in sim.folds]:
        more = f" and {len(folds) - 1} more" if len(folds) > 1 else ""
        warn(
            f"QuantSim.save_compressed: BatchNorm {folds[0].batch_norm!r}{more} is folded in what is written. sim.load_compressed and "
            "copies of sim.bake() take it as it is; the float model has BatchNorms of its own, which load_state_dict(strict=False) leaves "
            "there: they would normalize once more"
        )


def _packed(
    every: list[tuple[str, Tensor, BakedWeight | None]], layout: FileLayout, format: str
) -> Iterator[tuple[str, PackedWeight | Tensor]]:
    """The model's state as files have it, weights as integers, one by one; of shared tensors the first."""
    first = first_names({name: t for name, t, _ in every})
    groups = {_layout(weight.quantizer) for _, t, weight in every if weight is not None and _has_groups(weight)}
    for name, t, weight in every:
        if name in first:
            entry = t if weight is None else packed_weight(t, weight.quantizer, groups)
            yield from split(name, entry, layout, joins_scales=format == fp8.FORMAT)


def _linear(model: nn.Module, layout: FileLayout) -> list[str]:
    """The linear layers of a model's files: experts among them, and what routes to them, whose module is none of torch's."""
    found = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if layout.parts:
        matrices = {name.removesuffix(".weight"): t for name, t in model.state_dict().items() if name.endswith(".weight") and t.dim() == 2}
        found = [path for path in matrices if not isinstance(model.get_submodule(path), nn.Embedding)]
    files = [theirs for path in found for theirs in layout.called(f"{path}.weight")]
    return [name.removesuffix(".weight") for name in (*files, *layout.parts)]


def _has_groups(weight: BakedWeight) -> bool:
    """Whether a row has several scales."""
    size = weight.quantizer.spec.block_size
    return isinstance(size, int) and size < weight.parameter.shape[-1]


def _layout(quantizer: Quantizer) -> tuple[str, object]:
    """The elements and blocks of a quantizer."""
    return quantizer.spec.encoding_dtype, quantizer.spec.block_size


def packed_weight(weight: Tensor, quantizer: Quantizer, groups: Collection[object] = ()) -> PackedWeight:
    """A weight as its quantizer has it, on the CPU. `groups`: layouts of other weights that have several groups a row. A row of a stack is
    a group, too, where such are as long as it: its quantizer has a scale a row as a block of all columns."""
    encoding = quantizer.encoding
    assert encoding is not None
    q = integers(weight, encoding, quantizer.spec.rounding)
    bits = 8 if q.is_floating_point() else int(encoding.dtype.removeprefix("u").removeprefix("int"))
    scale, zero_point = encoding.scale.cpu(), encoding.zero_point.cpu()
    if isinstance(encoding.block_size, tuple):
        rows, columns = encoding.block_size
        return PackedWeight(q.cpu(), scale, zero_point, bits, (rows, columns))
    if q.dim() == STACK:
        by_row = scale if scale.dim() == STACK else scale[:, None, None]  # one a matrix
        zero_point = zero_point.reshape(by_row.shape)
        size = None if by_row.shape[-1] == 1 and _layout(quantizer) not in groups else encoding.block_size
        return PackedWeight(q.cpu(), by_row, zero_point, bits, size)
    count = len(q) if scale.dim() else 1
    return PackedWeight(q.cpu(), scale.reshape(count, -1), zero_point.reshape(count, -1), bits, encoding.block_size)


def load_compressed(sim: Simulation, source: str | os.PathLike[str] | Checkpoint) -> None:
    """`QuantSim.load_compressed` documents it."""
    checkpoint = _for_model(source if isinstance(source, Checkpoint) else load_checkpoint(source), sim.model, source)
    quantized = {planned.parameter: key for key, planned in sim.decisions.quantizers.items() if planned.role == "weight"}
    parameters, quantizers = sim.weights(), sim.quantizers()
    problems: list[str] = []
    chosen: list[tuple[Quantizer, Encoding, Tensor, Tensor]] = []
    for name, weight in checkpoint.weights.items():
        key = quantized.get(name)
        if key is None:
            problems.append(f"'{name}' is quantized in the checkpoint, and not in the simulation")
            continue
        parameter = parameters[key]
        try:
            if parameter.shape != weight.integers.shape:
                raise ValueError(f"has shape {tuple(weight.integers.shape)}; expected {tuple(parameter.shape)}")
            encoding = fitted(Entry(_encoding(weight, quantizers[key]), "parameter"), quantizers[key], parameter.dim())
        except ValueError as error:
            problems.append(f"'{name}': {error}")
            continue
        chosen.append((quantizers[key], encoding, parameter, weight.dequantize()))
    own = sim.model.state_dict(keep_vars=True)
    others = {name: t for name, t in checkpoint.tensors.items() if name in own}
    problems += [f"'{name}' is unknown to the model" for name in checkpoint.tensors if name not in own]
    for name, t in others.items():
        if own[name].shape != t.shape:
            problems.append(f"'{name}' has shape {tuple(t.shape)}; expected {tuple(own[name].shape)}")
        if name in quantized:
            problems.append(f"'{name}' is quantized in the simulation, and in float in the checkpoint")
        elif own[name].is_floating_point() and (not t.is_floating_point() or t.itemsize == 1):
            problems.append(
                f"'{name}' is {str(t.dtype).removeprefix('torch.')} in the checkpoint, without a scale; expected a float tensor"
            )
    held: dict[object, str] = {}  # a tied one is there under one name
    for name, t in ((name, own[name]) for name in (*others, *checkpoint.weights) if name in own):
        first = held.setdefault(place_of(t), name)
        if first != name and t.numel() and not torch.equal(_values(checkpoint, first), _values(checkpoint, name)):
            problems.append(f"'{first}' and '{name}' are one tensor of the model, and two in the checkpoint that differ: untie them first")
    problems += [f"'{name}' is not in the checkpoint" for name, t in own.items() if place_of(t) not in held and t.numel()]
    activations, unfit = fitting_activations(sim, checkpoint)
    caches, alien = fitting_caches(sim, checkpoint)
    if problems := [*problems, *unfit, *alien]:
        listed = "\n  ".join(problems)
        raise ValueError(f"QuantSim.load_compressed: the checkpoint does not fit this simulation ({_CURE}):\n  {listed}")
    with rewriting():
        for quantizer, encoding, parameter, values in chosen:
            parameter.copy_(values)
            quantizer.set_encoding(encoding)
        for key, encoding in {**activations, **caches}.items():
            quantizers[key].set_encoding(encoding)
        for name, t in others.items():
            own[name].copy_(t)


def _values(checkpoint: Checkpoint, name: str) -> Tensor:
    """The numbers that a checkpoint has under a name."""
    return (checkpoint.weights[name].dequantize() if name in checkpoint.weights else checkpoint.tensors[name]).double()


def _for_model(checkpoint: Checkpoint, model: nn.Module, source: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """`Checkpoint.for_model`, whose errors tell the file too."""
    try:
        return checkpoint.for_model(model)
    except FileFormatError as error:
        if isinstance(source, Checkpoint):
            raise
        raise FileFormatError(f"qsim: '{os.fspath(source)}': {str(error).removeprefix('qsim: ')}") from None


_CURE = (
    "make it with checkpoint.config(), of qsim.load_checkpoint, for the model that was quantized; where that has experts in one parameter, "
    "with checkpoint.for_model(model).config()"
)


def _encoding(weight: PackedWeight, quantizer: Quantizer) -> Encoding:
    """With blocks where the quantizer has them, though one fills a row; with one scale where it has one, and the only row has its own."""
    encoding = weight.encoding
    if encoding.scale.shape == (1,) and quantizer.spec.axis is None:
        return dataclasses.replace(encoding, scale=encoding.scale[0], zero_point=encoding.zero_point[0], axis=None)
    if encoding.block_size is None and quantizer.spec.block_size is not None:
        scale, zero_point = encoding.scale[:, None], encoding.zero_point[:, None]
        return dataclasses.replace(encoding, scale=scale, zero_point=zero_point, axis=1, block_size=quantizer.spec.block_size)
    return encoding


def round_scales(sim: Simulation, dtype: torch.dtype) -> None:
    """`QuantSim.round_scales` documents it."""
    if not isinstance(dtype, torch.dtype) or dtype not in _SMALLEST:
        raise ValueError(f"QuantSim.round_scales: got {dtype!r}; expected torch.float16 or torch.bfloat16")
    sim.check_calibrated()
    rounded: list[tuple[Quantizer, Encoding]] = []
    multiplied = {*chain(*operands(sim).values()), *caches_of(sim)[2]}
    for key, planned in sim.decisions.quantizers.items():
        quantizer = sim.quantizers()[key]
        encoding = quantizer.encoding
        if not (planned.role == "weight" or key in multiplied) or encoding is None or not quantizer.spec.has_scale:
            continue
        largest = torch.finfo(dtype).max
        if bool((encoding.scale > largest).any()):
            raise ValueError(f"QuantSim.round_scales: '{key}' has a scale of {float(encoding.scale.max()):g}; {dtype} ends at {largest:g}")
        scale = _rounded(encoding, dtype)
        rounded.append((quantizer, dataclasses.replace(encoding, scale=scale)))
    for quantizer, encoding in rounded:
        quantizer.set_encoding(encoding)


def _rounded(encoding: Encoding, dtype: torch.dtype) -> Tensor:
    """Scales rounded to a type; of those of two levels the floats that the integers are multiplied with."""
    if encoding.two_levels is not None:
        return encoding.two_levels.nearest(encoding.scale, dtype)
    return encoding.scale.clamp_min(_SMALLEST[dtype]).to(dtype).to(encoding.scale.dtype)


def _check(
    sim: Simulation,
    every: list[tuple[str, Tensor, BakedWeight | None]],
    activations: Mapping[str, Activation],
    format: str,
    caches: Collection[str],
    layout: FileLayout,
) -> None:
    """Raise a ValueError that lists what no format can hold."""
    weights = {name: weight for name, _, weight in every if weight is not None}
    problems, places = [], places_problems(sim)
    owners = Counter(id(parameter) for m in sim.model.modules() for parameter in vars(m)["_parameters"].values())
    operations = {planned.parameter: planned.operation for planned in sim.decisions.quantizers.values()}
    for name, weight in weights.items():
        encoding, activation = weight.quantizer.encoding, activations.get(name)
        assert encoding is not None
        cure = f'leave it in float, Config.override("{operations[weight.name]}", weight=None)'
        shared = f"is shared with another module: {cure}" if owners[id(weight.parameter)] > 1 else None
        problem = shared or _kind_problem(sim.model, name, encoding, cure, layout) or places.get(name)
        if problem := problem or _problem(weight.parameter, encoding, activation, format):
            problems.append(f"'{name}' {problem}")
    types = {parameter.dtype for parameter in sim.model.parameters() if parameter.is_floating_point()}
    for key in caches:
        encoding = sim.quantizers()[key].encoding
        if format != fp8.FORMAT and encoding is not None and not all(_is_of(encoding.scale, dtype) for dtype in types):
            problems.append(f"'{key}' {_rounded_by_readers(min(types, key=lambda dtype: dtype.itemsize))}")
    own = {id(weight.quantizer) for weight in weights.values()} | {id(sim.quantizers()[key]) for key in caches}
    needed = sim.needed()
    multiplied = operands(sim)
    written = {*chain(*multiplied.values())} - {key for name, keys in multiplied.items() if name not in activations for key in keys}
    others = [key for key, q in sim.quantizers().items() if q.enabled and id(q) not in own and key in needed - written]
    if others:
        problems.append(
            f"{len(others)} quantizers are of no weight ({others[0]!r}, ...): what is written is weights alone; activation=None, or what "
            "qsim.w8a8_dynamic(), w8a8_static(), fp8_dynamic(), fp8_static() and fp8_block() have"
        )
    if problems or not (weights or caches):
        listed = "\n  ".join(problems or ["no weight is quantized"])
        raise ValueError(f"QuantSim.save_compressed: the format cannot hold this simulation:\n  {listed}")


def _kind_problem(model: nn.Module, name: str, encoding: Encoding, cure: str, layout: FileLayout) -> str | None:
    """Why files do not have a parameter as a weight, or as several; None if they have."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    weight: Tensor = getattr(module, own)
    layouts: Collection[object] = _STACKED if name in layout.stacks else _LAYOUTS
    if name in layout.stacks:
        if isinstance(encoding.block_size, tuple) and (
            unfit := tiles_problem(layout.stacks[name].values(), weight.shape[1], encoding.block_size[0])
        ):
            return unfit
    elif own != "weight" or not isinstance(module, nn.Linear):
        why = None if isinstance(module, nn.Conv1d | nn.ConvTranspose1d) else layout.problems.get(name)
        return f"is no weight of an nn.Linear{'' if why is None else f' ({why})'}: {cure}"
    if (encoding.axis, encoding.block_size is None) not in layouts:
        return f"has axis={encoding.axis}, block_size={encoding.block_size}; expected axis=0, or axis=1 or (0, 1) with a block size"
    return None


def _problem(weight: Tensor, encoding: Encoding, activation: Activation | None, format: str) -> str | None:
    """`activation`: what it is multiplied with, where that is quantized too."""
    bits = encoding.dtype.removeprefix("u").removeprefix("int")
    if encoding.dtype != "float8_e4m3fn" and (not bits.isdigit() or int(bits) > 8):
        return f"is {encoding.dtype}; expected integers of 2 to 8 bits"
    if format == fp8.FORMAT:
        return None  # its readers keep scales in float32, whatever they compute in
    scales = [encoding.scale, *([] if activation is None or activation.encoding is None else [activation.encoding.scale])]
    return None if all(_is_of(scale, weight.dtype) for scale in scales) else _rounded_by_readers(weight.dtype)


def _is_of(scale: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(scale.to(dtype).float(), scale)


def _rounded_by_readers(dtype: torch.dtype) -> str:
    return f"is {dtype} with scales of float32, which readers would round: simulate model.float(), or call sim.round_scales"


def _model_config(model: nn.Module) -> dict[str, Any]:
    """The config of a Hugging Face model; empty for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    told: dict[str, Any] = json.loads(config.to_json_string())
    return {**told, "architectures": [type(model).__name__]}
