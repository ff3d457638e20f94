"""Constants that a forward computes: of what, and whether they have as many channels in every call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Origin, Slot, Step, Tape
from qsim.numbers.spec import TensorSpec


def for_any_size(spec: TensorSpec, tape: Tape, site: Site, slot: Slot, origins: Iterable[Origin]) -> TensorSpec:
    """A spec for a constant that is computed, with one scale where a scale per channel would fit one size of input alone."""
    if isinstance(spec.axis, int) and _is_as_long_as_inputs(tape, site, slot, spec.axis, origins):
        return replace(spec, axis=None, block_size=None)
    return spec


def _is_as_long_as_inputs(tape: Tape, site: Site, slot: Slot, axis: int, origins: Iterable[Origin]) -> bool:
    """Whether the length of an axis may come from the input: nothing that the model holds has it, it is repeated along it, or it is that of
    a part of a parameter, beside data as long, and nothing multiplies with the other parts. An even part is else a packed one's."""
    shapes = [step.shapes[slot] for step in site.steps if slot in step.shapes]
    lengths = {shape[axis] if axis < len(shape) else 0 for shape in shapes}
    if len(lengths) != 1 or any(axis in step.repeated.get(slot, ()) for step in site.steps):
        return True
    (length,) = lengths
    names = ancestors(origins)
    sizes = {size for name in names for size in tape.shapes[name]}
    parts = {size for name in names & tape.parameters for size in tape.shapes[name]}
    is_one_of = length in sizes or any(size % length == 0 or length % size == 0 for size in parts - {0, 1})
    if length <= 1 or not is_one_of:
        return True
    is_part = len(names) == 1 and all(shape.numel() < math.prod(tape.shapes[name]) for name in names for shape in shapes)
    return is_part and _is_beside(site, slot, axis, length) and not all(_is_read_whole(tape, name) for name in names)


def _is_beside(site: Site, slot: Slot, axis: int, length: int) -> bool:
    """Whether the data that a weight is multiplied with has an axis of this length, other than the one that is summed over."""
    for step in site.steps:
        own = step.shapes.get(slot, ())
        summed = own[axis - 1 if axis else 1] if len(own) > 1 else 0
        if any(Counter(shape)[length] > (length == summed) for at, shape in step.shapes.items() if at != slot):
            return True
    return False


def _is_read_whole(tape: Tape, name: str) -> bool:
    """Whether the products of the first example read as many elements of a parameter, as they are in it, as it has."""
    read = 0
    for step in tape.steps:
        for slot, origins in step.operands.items() if step.kind == "mac" and (step.run, step.example) == (0, 0) else ():
            if slot in step.shapes and any(origin.kind == "const" and origin.source == name for origin in origins):
                read += step.shapes[slot].numel()
    return read >= math.prod(tape.shapes[name])


def ancestors(origins: Iterable[Origin]) -> set[str]:
    """The parameters and buffers that something is computed from."""
    found, seen, left = set[str](), set[Step](), list(origins)
    while left:
        source = left.pop().source
        if isinstance(source, str):
            found.add(source)
        elif isinstance(source, Step) and source not in seen:
            seen.add(source)
            left += [*source.side, *(origin for operand in source.operands.values() for origin in operand)]
    return found
