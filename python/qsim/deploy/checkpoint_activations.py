"""What weights are multiplied with, between a simulation and compressed-tensors' layouts that quantize it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch

from qsim.checkpoints import Checkpoint
from qsim.checkpoints.activation import POWERS, Activation, kind_of
from qsim.errors import NoEncodingError
from qsim.files import Entry
from qsim.files.fitting import fitted
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.observer import encoding_of_range
from qsim.simulation.simulation import Simulation
from qsim.warning import warn


def operands(sim: Simulation) -> dict[str, str]:
    """The quantizers of what weights are multiplied with, by the weight's name: where it is quantized by itself, for layers with weights
    alone, and as a file of 8 bits has it."""
    read, quantizers, weights = _read(sim), sim.quantizers(), set(sim.decisions.weight_keys)
    named = set(_names(sim))
    elsewhere = {post.key for post in sim.decisions.posts if post.key not in weights and post.operation not in named}
    return {name: key for name, key in read.items() if key not in elsewhere and kind_of(quantizers[key].spec) is not None}


def _names(sim: Simulation) -> dict[str, str]:
    """The weights, by the operation that multiplies with them."""
    planned = sim.decisions.quantizers
    return {planned[key].operation: name for key in sim.decisions.weight_keys if (name := planned[key].parameter) is not None}


def _read(sim: Simulation) -> dict[str, str]:
    """The quantizers of what weights are multiplied with, by the weight's name, that are on and no result of an operation's."""
    planned, quantizers, named = sim.decisions.quantizers, sim.quantizers(), _names(sim)
    others = {key for key, each in planned.items() if key.startswith(f"{each.operation}.output")}.union(sim.decisions.weight_keys)
    return {
        named[post.operation]: post.key
        for post in sim.decisions.posts
        if post.operation in named and post.key not in others and quantizers[post.key].enabled
    }


def activations_of(sim: Simulation, weights: Collection[str]) -> dict[str, Activation]:
    """What those of these weights are multiplied with that a layout has a place for."""
    quantizers = sim.quantizers()
    found = {name: quantizers[key] for name, key in operands(sim).items() if name in weights}
    without = [quantizer.name for quantizer in found.values() if not quantizer.spec.is_dynamic and quantizer.encoding is None]
    if without:
        raise NoEncodingError(f"QuantSim.save_compressed: {without[0]!r} has no encoding yet: call calibrate first")
    return {name: Activation(q.spec, None if q.spec.is_dynamic else q.encoding) for name, q in found.items()}


def fitting_activations(sim: Simulation, checkpoint: Checkpoint) -> tuple[dict[str, Encoding], list[str]]:
    """The encodings that a checkpoint has for activations, by quantizer; and what of its activations does not fit the simulation."""
    keys, quantizers = operands(sim), sim.quantizers()
    problems: list[str] = []
    read: defaultdict[str, list[str]] = defaultdict(list)
    for name, theirs in checkpoint.activations.items():
        mine = quantizers[keys[name]].spec if name in keys else None
        if mine is None or mine.is_dynamic != theirs.is_dynamic or (mine.is_dynamic and mine != theirs):
            problems.append(
                f"'{name}' is multiplied with activations that have {_said(theirs)} in the checkpoint, {_said(mine)} in the simulation"
            )
        elif name in checkpoint.encodings:
            read[keys[name]].append(name)
    mixed = [name for name in checkpoint.weights if checkpoint.activations and name not in checkpoint.activations]
    for name, key in _read(sim).items():
        if name in mixed:
            where = 'op_type="input"' if key == "input" else repr(name.removesuffix(".weight"))
            problems.append(
                f"'{name}' is multiplied with floats in the checkpoint, with what {key!r} quantizes in the simulation: "
                f"config.override({where}, activation=None)"
            )
    found: dict[str, Encoding] = {}
    for key, names in read.items():
        try:
            every = [fitted(Entry(checkpoint.encodings[name], "activation"), quantizers[key], None) for name in names]
        except ValueError as error:
            problems.append(f"'{names[0]}', what it is multiplied with: {error}")
            continue
        found[key] = _widest(every, quantizers[key].spec)
        if any(encoding != found[key] for encoding in every):
            warn(
                f"qsim: {', '.join(map(repr, names))} read one tensor, and the checkpoint has several scales for it. {key!r} has the "
                "widest range, as vLLM has for layers that it merges"
            )
    return found, problems


def _said(activation: TensorSpec | None) -> str:
    if activation is None:
        return "no quantizer of their own"
    if not activation.is_dynamic:
        return "one scale"
    if activation.block_size is None:
        return "a scale from each token"
    return f"{'a power of two' if activation.scale_format == POWERS else 'a scale'} for each {activation.block_size} values of a token"


def _widest(every: list[Encoding], spec: TensorSpec) -> Encoding:
    """The encoding that spans all ranges."""
    first = every[0]
    if all(encoding == first for encoding in every):
        return first
    if all(encoding.symmetric for encoding in every):
        return max(every, key=lambda encoding: float(encoding.scale))
    low, high = torch.stack([encoding.min for encoding in every]), torch.stack([encoding.max for encoding in every])
    return encoding_of_range(low.min(), high.max(), spec)
