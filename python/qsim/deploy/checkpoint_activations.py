"""What weights are multiplied with, between a simulation and compressed-tensors' layouts that quantize it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import chain

from qsim.checkpoints import Checkpoint
from qsim.checkpoints.activation import POWERS, Activation, kind_of, widest
from qsim.checkpoints.published_names import STACK
from qsim.errors import NoEncodingError
from qsim.files import Entry
from qsim.files.fitting import fitted
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.simulation.simulation import Simulation
from qsim.warning import warn

_SEVERAL = 2
BATCHED = "call model.set_experts_implementation('batched_mm') of transformers before it is simulated"


def operands(sim: Simulation) -> dict[str, list[str]]:
    """The quantizers of what weights are multiplied with, by the weight's name: where it is quantized by itself, for layers with weights
    alone, and as a file of 8 bits has it. Of experts in one parameter there are several where each is multiplied at a place of its own:
    with scales from the tensor itself, for it differs from call to call which expert comes where."""
    quantizers, weights, several = sim.quantizers(), set(sim.decisions.weight_keys), stacks(sim)
    named = _names(sim)
    elsewhere = {post.key for post in sim.decisions.posts if post.key not in weights and post.operation not in named}
    found = {}
    for name, keys in _read(sim).items():
        specs = {_in_files(quantizers[key].spec, name in several) for key in keys}
        one = len(specs) == 1 and (len(keys) == 1 or next(iter(specs)).is_dynamic)
        if one and not elsewhere.intersection(keys) and kind_of(next(iter(specs))) is not None:
            found[name] = keys
    return found


def _in_files(spec: TensorSpec, of_stack: bool) -> TensorSpec:
    """A spec of what a weight is multiplied with, as files say it: a token that a product of batches has as a column is a row there."""
    return dataclasses.replace(spec, axis=-1) if of_stack and spec.is_dynamic and spec.axis == -2 else spec


def stacks(sim: Simulation) -> set[str]:
    """The quantized parameters that have several matrices."""
    parameters, planned = sim.weights(), sim.decisions.quantizers
    names = {key: planned[key].parameter for key in sim.decisions.weight_keys}
    return {name for key, name in names.items() if name is not None and parameters[key].dim() == STACK}


def _names(sim: Simulation) -> dict[str, str]:
    """The weights, by the operations that multiply with them."""
    planned = sim.decisions.quantizers
    own = {key: name for key in sim.decisions.weight_keys if (name := planned[key].parameter) is not None}
    found = {planned[key].operation: name for key, name in own.items()}
    return found | {post.operation: own[post.key] for post in sim.decisions.posts if post.key in own}


def _read(sim: Simulation) -> dict[str, list[str]]:
    """The quantizers of what weights are multiplied with, by the weight's name, that are on and no result of an operation's."""
    found = {name: _all_of(by_operation) for name, by_operation in _read_by(sim).items()}
    return {name: keys for name, keys in found.items() if keys}


def _read_by(sim: Simulation) -> dict[str, dict[str, list[str]]]:
    """The same, by the weight's name and by each operation that multiplies with it."""
    planned, quantizers, named = sim.decisions.quantizers, sim.quantizers(), _names(sim)
    others = {key for key, each in planned.items() if key.startswith(f"{each.operation}.output")}.union(sim.decisions.weight_keys)
    found: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for operation, name in named.items():
        found[name][operation] = []
    for post in sim.decisions.posts:
        if post.operation in named and post.key not in others and quantizers[post.key].enabled:
            found[named[post.operation]][post.operation].append(post.key)
    return found


def _all_of(by_operation: Mapping[str, list[str]]) -> list[str]:
    return list(dict.fromkeys(chain(*by_operation.values())))


def activations_of(sim: Simulation, weights: Collection[str]) -> dict[str, Activation]:
    """What those of these weights are multiplied with that a layout has a place for."""
    quantizers, several = sim.quantizers(), stacks(sim)
    found = {name: quantizers[keys[0]] for name, keys in operands(sim).items() if name in weights}
    without = [quantizer.name for quantizer in found.values() if not quantizer.spec.is_dynamic and quantizer.encoding is None]
    if without:
        raise NoEncodingError(f"QuantSim.save_compressed: {without[0]!r} has no encoding yet: call calibrate first")
    return {name: Activation(_in_files(q.spec, name in several), None if q.spec.is_dynamic else q.encoding) for name, q in found.items()}


def places_problems(sim: Simulation) -> dict[str, str]:
    """Weights whose operations read what files cannot tell apart, and why: they have one way to quantize it for each weight."""
    known, several = operands(sim), stacks(sim)
    found = {}
    for name, by_operation in _read_by(sim).items():
        keys, floats = _all_of(by_operation), [operation for operation, read in by_operation.items() if not read]
        if keys and floats:
            found[name] = f"is multiplied with what {keys[0]!r} quantizes, and with floats by {floats[0]!r}: a file has one way for both"
        elif name in known or len(keys) < _SEVERAL:
            continue
        elif name in several:
            found[name] = (
                f"is multiplied at {len(keys)} places with activations that have a range each ('{keys[0]}', ...), and which expert comes "
                f"to which differs from call to call: {BATCHED}, or scales from each token"
            )
        else:
            found[name] = (
                f"is multiplied with what {keys[0]!r} and {keys[1]!r} quantize: a file has one scale for both, or scales from each token"
            )
    return found


def fitting_activations(sim: Simulation, checkpoint: Checkpoint) -> tuple[dict[str, Encoding], list[str]]:
    """The encodings that a checkpoint has for activations, by quantizer; and what of its activations does not fit the simulation."""
    keys, quantizers, several = operands(sim), sim.quantizers(), stacks(sim)
    problems: list[str] = []
    read: defaultdict[str, list[str]] = defaultdict(list)
    for name, theirs in checkpoint.activations.items():
        mine = _in_files(quantizers[keys[name][0]].spec, name in several) if name in keys else None
        if mine is None or mine.is_dynamic != theirs.is_dynamic or (mine.is_dynamic and mine != theirs):
            problems.append(
                f"'{name}' is multiplied with activations that have {_said(theirs)} in the checkpoint, {_said(mine)} in the simulation"
                f"{f': {BATCHED}' if mine is None and name in several else ''}"
            )
        elif name in checkpoint.encodings:
            read[keys[name][0]].append(name)
    mixed = [name for name in checkpoint.weights if checkpoint.activations and name not in checkpoint.activations]
    for name, read_by in _read(sim).items():
        if name in mixed:
            where = 'op_type="input"' if "input" in read_by else repr(name.removesuffix(".weight"))
            if name in several:
                where = repr(f"{name.rpartition('.')[0]}.*")
            problems.append(
                f"'{name}' is multiplied with floats in the checkpoint, with what {read_by[0]!r} quantizes in the simulation: "
                f"config.override({where}, activation=None)"
            )
    found: dict[str, Encoding] = {}
    for key, names in read.items():
        try:
            every = [fitted(Entry(checkpoint.encodings[name], "activation"), quantizers[key], None) for name in names]
        except ValueError as error:
            problems.append(f"'{names[0]}', what it is multiplied with: {error}")
            continue
        found[key] = widest(every, quantizers[key].spec)
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
