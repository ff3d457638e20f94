"""What a function that computes nothing hands on: where its operands came from, and whether it put in numbers of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.graph.record.tape import Origin, Slot, Step, Tape, indirect, unwrapped
from qsim.operations.functions import CREATION, INSERTION, MIXING, numbers_put_in
from qsim.runs.arguments import is_dense


class Given(NamedTuple):
    """The tensors of a call by slot, where they came from, which of them it wrote into, and which were constants that need a grid."""

    tensors: dict[Slot, Tensor]
    origins: dict[Slot, frozenset[Origin]]
    changed: frozenset[Slot]
    numbers: frozenset[Slot]


class Handed(NamedTuple):
    """Where what a call took came from, each of its results, and what it wrote into."""

    taken: frozenset[Origin]
    results: list[frozenset[Origin]]
    changed: dict[Slot, frozenset[Origin]]


_MIXING = INSERTION | {"where", "max", "min"}
_PLACING = INSERTION | {"where"}
_LIKE_ANOTHER = frozenset({"view_as", "reshape_as", "expand_as", "type_as", "to", "type"})  # the first operand, in the form of a second
_ONE_BY_ONE = frozenset({"broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"})


class Flags:
    """The source of an `other` that was made of flags or positions."""


def handed_on(tape: Tape, name: str, given: Given, options: Mapping[int | str, Any], results: Sequence[Tensor]) -> Handed:
    """Where what a function called `name` returned and wrote into came from.

    Constants, indices and masks count only if there is nothing else; numbers that were put in beside mark the others as mixed. Numbers made
    of flags or positions alone, ``(x > 0).float()``, are data that lies on no grid yet; what has no more than the shape of an operand is a
    constant.
    """
    slots = list(given.tensors)[: 1 if name in _LIKE_ANOTHER else None]
    floats = [slot for slot in slots if given.tensors[slot].is_floating_point()]
    taken = indirect(o for slot in floats or slots for o in given.origins[slot])
    flow = taken = frozenset(o for o in taken if o.kind != "const") or taken
    if name in _ONE_BY_ONE and len(results) == len(given.tensors):
        return Handed(taken, [indirect(found) for found in given.origins.values()], {})
    if name in CREATION:
        flow = frozenset([Origin("other" if name == "new_tensor" else "const")])
    elif any(t.is_floating_point() for t in results):
        if any(t.is_complex() for t in given.tensors.values()):  # `z.real`: no grid holds `z`
            flow = frozenset(o if o.kind == "const" else Origin("other") for o in flow)
        elif not floats:
            flow = frozenset(o if o.kind in ("const", "random") or o.source in tape.unreplaced else Origin("other", Flags) for o in flow)
    if name in _PLACING and all(o.kind == "const" for o in flow) and _is_placed_by_data(given, floats):
        flow = frozenset([*flow, Origin("other", Flags)])
    bases = {slot: indirect(given.origins[slot]) for slot in given.changed}
    state = {slot for slot in given.changed if any(o.source is not None for o in given.origins[slot])}
    if given.numbers - state or any(map(_is_number, numbers_put_in(name, options))):
        flow, bases = _mixed(flow), {slot: _mixed(found) for slot, found in bases.items()}
    return Handed(taken, [flow] * len(results), {slot: found | flow for slot, found in bases.items()})


def _is_placed_by_data(given: Given, floats: Sequence[Slot]) -> bool:
    """Whether flags or positions, which are none of the model's constants, say where constants are put: zeros where there is padding."""
    return any(o.kind not in ("const", "random") for slot in given.tensors.keys() - set(floats) for o in given.origins[slot])


def _mixed(origins: frozenset[Origin]) -> frozenset[Origin]:
    return frozenset(o if o.kind == "const" else replace(o, mixed=True) for o in origins)


def _is_number(value: Any) -> bool:
    """Whether a number needs a grid: every grid has zero, and none a mask's."""
    return type(value) in (int, float) and value != 0 and MASKED < value < math.inf


def numbers_among(
    name: str, tensors: Mapping[Slot, Tensor], origins: Mapping[Slot, frozenset[Origin]], parameters: Container[str]
) -> frozenset[Slot]:
    """The constants that a function called `name` is to mix with others and that need a grid. A parameter does, whatever it holds before
    it is trained."""
    if name not in _MIXING:
        return frozenset()
    constant = {slot for slot, t in tensors.items() if t.is_floating_point() and all(o.kind == "const" for o in origins[slot])}
    return frozenset(slot for slot in constant if any(o.source in parameters for o in origins[slot]) or _holds_numbers(tensors[slot]))


def is_constant(origin: Origin) -> bool:
    """Whether a tensor is a constant, or was computed on constants alone, as far as the recording knows by then."""
    return origin.kind == "const" or (isinstance(origin.source, Step) and origin.source.on_constants)


def reads_constants(name: str, given: Given) -> bool:
    """Whether a function that computes nothing reads constants, or literals that a forward makes, as they are, beside data: in half
    precision these are rounded."""
    if name not in MIXING:
        return False
    constant = {slot for slot, found in given.origins.items() if all(is_constant(o) or o == Origin("other") for o in found)}
    if len(constant) == len(given.tensors):
        return False
    return any(given.tensors[slot].is_floating_point() and _holds_values(given.tensors[slot]) for slot in constant - given.changed)


def _holds_values(t: Tensor) -> bool:
    t = unwrapped(t)
    return is_dense(t) and not t.is_meta and bool((t != 0).any())


def _holds_numbers(t: Tensor) -> bool:
    return _holds_values(t) and not is_mask(t)


MASKED = -1e9  # no activation is as low, but of networks whose activations are as high too
HIDDEN = -50.0  # added to a score, nothing of it is left behind a softmax


def is_mask(t: Tensor, *, added: bool = False) -> bool:
    """Whether a tensor holds -Inf, the lowest finite number, or one that stands for these, such as -1e30, and nothing as high; where it is
    `added`, also whether it leaves scores as they are or hides them from a softmax: 0, and numbers such as -100 and -10000, alone. One
    that cannot be compared here (sparse, meta, float8) is taken for none."""
    t = unwrapped(t).detach()  # inside vmap or jvp a number of the wrapper is refused
    if not is_dense(t) or t.is_meta or t.itemsize == 1 or t.numel() == 0:
        return False
    end = max(torch.finfo(t.dtype).min, MASKED)
    lowest = float(t.amin())  # reads once and writes nothing, but is NaN beside a NaN
    if math.isnan(lowest):
        return bool((t <= end).any()) and not bool((t >= -end).any())
    hides = added and lowest <= HIDDEN and bool(((t == 0) | (t <= HIDDEN)).all()) and bool((t == 0).any())
    return (lowest <= end and float(t.amax()) < -end) or hides


def lost_sight(tape: Tape, returned: Iterable[Origin]) -> bool:
    """Whether the model returned, or a step read, what came from nowhere: code outside torch computes with what it is given."""
    read = itertools.chain.from_iterable((*step.side, *itertools.chain(*step.operands.values())) for step in tape.steps)
    return any(origin.kind == "other" and origin.source is None for origin in itertools.chain(returned, read))
