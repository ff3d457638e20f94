"""Experts that a model has in one parameter, and files as a weight for each: from the one to the other, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from qsim.checkpoints.activation import widest
from qsim.checkpoints.packed_weight import PackedWeight
from qsim.checkpoints.published_names import ExpertPart, FileLayout
from qsim.errors import FileFormatError
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.warning import warn

Entry = PackedWeight | Tensor
_CURE = "one parameter holds all experts, in one way"


def split(name: str, entry: Entry, layout: FileLayout, *, joins_scales: bool = False) -> Iterator[tuple[str, Entry]]:
    """A tensor of a model as files have it: of experts a weight for each, with a copy of a scale that several share.

    Parameters
    ----------
    name, entry
        Of the model.
    layout : FileLayout
        Of its files.
    joins_scales : bool
        Whether a weight whose rows all have one scale is written with one: to formats that have no scale a row.
    """
    parts = layout.stacks.get(name)
    if parts is None:
        yield layout.names.get(name, name), entry
        return
    for theirs, part in parts.items():
        found = entry[part.expert, part.start : part.stop].clone() if isinstance(entry, Tensor) else _member(entry, part)
        yield theirs, _with_one_scale(found) if joins_scales and isinstance(found, PackedWeight) else found


def _member(stack: PackedWeight, part: ExpertPart) -> PackedWeight:
    rows = slice(part.start, part.stop)
    of_rows = slice(None) if stack.is_per_tensor else rows
    if isinstance(stack.block_size, tuple):
        tall = stack.block_size[0]
        of_rows = slice(part.start // tall, -(-part.stop // tall))
    scale, zero_point = (t[part.expert, of_rows].clone() for t in (stack.scale, stack.zero_point))
    return PackedWeight(stack.integers[part.expert, rows].clone(), scale, zero_point, stack.bits, stack.block_size)


def _with_one_scale(weight: PackedWeight) -> PackedWeight:
    """The same numbers: a scale for all where every row has the same."""
    scale, zero_point = weight.scale, weight.zero_point
    if weight.block_size is not None or bool((scale != scale[:1]).any() | (zero_point != zero_point[:1]).any()):
        return weight
    return dataclasses.replace(weight, scale=scale[:1].clone(), zero_point=zero_point[:1].clone())


def tiles_problem(parts: Collection[ExpertPart], rows: int, tall: int) -> str | None:
    """Why weights of files cannot have the tiles that their parameter of so many rows has; None if they can."""
    if all(part.start % tall == 0 and (part.stop % tall == 0 or part.stop == rows) for part in parts):
        return None
    return f"has tiles of {tall} rows, and in one lie two weights of files: expected a divisor of {min(p.stop - p.start for p in parts)}"


def join(entries: Mapping[str, Entry], layout: FileLayout) -> dict[str, Entry]:
    """What `split` gave, as the model has it; other tensors under the model's names.

    Raises
    ------
    FileFormatError
        An expert is not there, or does not fit the others.
    """
    ours = {theirs: name for name, theirs in layout.names.items()}
    found: dict[str, Entry] = {}
    for stack, parts in layout.stacks.items():
        if stack in entries and (both := parts.keys() & entries.keys()):
            raise FileFormatError(f"qsim: the checkpoint has '{stack}' and '{min(both)}', a part of it; expected one of them")
    for name, entry in entries.items():
        part = layout.parts.get(name)
        if part is None:
            own = ours.get(name, name)
            if own in found:
                raise FileFormatError(
                    f"qsim: the checkpoint has '{name}' and '{own}', which are one tensor of the model; expected one of them"
                )
            found[own] = entry
        elif part.stack not in found:
            found[part.stack] = _joined(part.stack, layout.stacks[part.stack], entries)
    for stack, parts in layout.stacks.items():
        if stack not in found:
            raise FileFormatError(
                f"qsim: '{next(iter(parts))}' is not in the checkpoint, nor is any other weight of '{stack}': is it complete?"
            )
    return found


def _joined(stack: str, parts: Mapping[str, ExpertPart], entries: Mapping[str, Entry]) -> Entry:
    every: dict[str, Entry] = {}
    for name, part in parts.items():
        if name not in entries:
            raise FileFormatError(f"qsim: '{name}', expert {part.expert} of '{stack}', is not in the checkpoint: is it complete?")
        every[name] = entries[name]
    first = next(iter(every))
    for name, entry in every.items():
        part, shape = parts[name], _shape(entry)
        if shape != part.shape:
            raise FileFormatError(
                f"qsim: '{name}', expert {part.expert} of '{stack}', has shape {shape}; expected {part.shape}, by the model"
            )
        if _kind(entry) != _kind(every[first]):
            raise FileFormatError(
                f"qsim: '{name}', expert {part.expert} of '{stack}', is {_kind(entry)}; '{first}' is {_kind(every[first])}, and {_CURE}"
            )
    if isinstance(kept := every[first], PackedWeight) and (kept.order is not None or kept.minimum is not None):
        raise FileFormatError(
            f"qsim: '{first}' is {_kind(kept)}, as no parameter of several experts is; Checkpoint.state_dict has its numbers"
        )
    in_order = sorted(parts, key=lambda name: parts[name][1:])
    count = 1 + max(part.expert for part in parts.values())
    values = [every[name] for name in in_order]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors:
        return _stacked(tensors, count)
    return _packed([value for value in values if isinstance(value, PackedWeight)], [parts[name] for name in in_order], stack, count)


def _packed(weights: list[PackedWeight], parts: list[ExpertPart], stack: str, count: int) -> PackedWeight:
    """A stack of weights of one kind: with one scale an expert where all its parts have that, else with one a row, group or tile."""
    first, rows = weights[0], parts[-1].stop
    if isinstance(first.block_size, tuple) and (unfit := tiles_problem(parts, rows, first.block_size[0])):
        raise FileFormatError(f"qsim: '{stack}' {unfit}")
    integers = _stacked([weight.integers for weight in weights], count)
    one = [weight for weight, part in zip(weights, parts, strict=True) if part.start == 0]
    if all(weight.is_per_tensor and _same_scale(weight, one[part.expert]) for weight, part in zip(weights, parts, strict=True)):
        return PackedWeight(
            integers, torch.stack([weight.scale for weight in one]), torch.stack([weight.zero_point for weight in one]), first.bits
        )
    scale = _stacked([_of_rows(weight, weight.scale) for weight in weights], count)
    zero_point = _stacked([_of_rows(weight, weight.zero_point) for weight in weights], count)
    return PackedWeight(integers, scale, zero_point, first.bits, first.block_size)


def _stacked(parts: list[Tensor], count: int) -> Tensor:
    """Parts of `count` experts, one behind another."""
    whole = torch.cat(parts)
    return whole.reshape(count, -1, whole.shape[-1])


def _same_scale(weight: PackedWeight, other: PackedWeight) -> bool:
    return torch.equal(weight.scale, other.scale) and torch.equal(weight.zero_point, other.zero_point)


def join_activations(
    specs: Mapping[str, TensorSpec], encodings: Mapping[str, Encoding], weights: Collection[str], layout: FileLayout
) -> tuple[dict[str, TensorSpec], dict[str, Encoding]]:
    """What the weights of a file are multiplied with, and its scales, by the model's names. What several experts read has the widest
    range of theirs.

    Raises
    ------
    FileFormatError
        One expert's is quantized otherwise than another's.
    """
    ours = {theirs: name for name, theirs in layout.names.items()}
    found = {ours.get(name, name): spec for name, spec in specs.items() if name in weights and name not in layout.parts}
    kept = {ours.get(name, name): encoding for name, encoding in encodings.items() if name in weights or name not in specs}
    kept = {name: encoding for name, encoding in kept.items() if name not in layout.parts}
    for stack, parts in layout.stacks.items():
        every = {name: specs.get(name) for name in parts}
        first, spec = next(iter(every.items()))
        for name, other in every.items():
            if other != spec:
                raise FileFormatError(
                    f"qsim: '{name}', expert {parts[name].expert} of '{stack}', is multiplied with activations that are quantized "
                    f"otherwise than those of '{first}', and {_CURE}"
                )
        if spec is None:
            continue
        found[stack] = spec
        scales = [encodings[name] for name in parts if name in encodings]
        if scales:
            kept[stack] = widest(scales, spec)
            if any(scale != kept[stack] for scale in scales):
                warn(
                    f"qsim: the experts of '{stack}' have several scales for what they read, and it is one parameter: it has the widest "
                    "range, as in vLLM"
                )
    return found, kept


def _of_rows(weight: PackedWeight, t: Tensor) -> Tensor:
    return t.expand(len(weight.integers), -1) if weight.is_per_tensor else t


def _shape(entry: Entry) -> tuple[int, ...]:
    return tuple(entry.shape if isinstance(entry, Tensor) else entry.integers.shape)


def _kind(entry: Entry) -> str:
    """What weights of one parameter have in common, in words."""
    if isinstance(entry, Tensor):
        return f"a tensor of {_type(entry)}"
    blocks = "with scales of whole rows" if entry.block_size is None else f"in blocks of {entry.block_size}"
    more = [" out of order" if entry.order is not None else "", " with minima" if entry.minimum is not None else ""]
    return f"quantized to {entry.bits} bits of {_type(entry.integers)} {blocks}{''.join(more)}, scales of {_type(entry.scale)}"


def _type(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
