"""What models return, as a list of tensors; and how near two lists are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists, dicts and dataclasses, in order, and those that a generator makes: compiled, it is an
    iterator of another class."""
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, tuple | list | Iterator):
        for entry in value:
            yield from _tensors(entry)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(list(vars(value).values()))


def by_name(
    ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Gradients as two lists, in the order of theirs; None stands for one that ours do not have."""
    return [ours.get(name) for name in theirs], list(theirs.values())


def same_bits(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> str:
    """Where two lists of tensors differ in a bit; "" if they do not."""
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, expected {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if (a is None) != (b is None):
            return f"tensor {i} is {'missing' if a is None else 'there'}, expected the other"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"tensor {i} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
        if not equal(a.detach(), b.detach()):
            return f"tensor {i} differs by {distance(a, b):.3g} of {b.detach().abs().max():.3g}"
    return ""


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one shape and type are equal, NaN where the other is NaN."""
    return torch.equal(a, b) or (torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30)) and torch.equal(a.isnan(), b.isnan()))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max())


def near(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], tolerance: float) -> str:
    """Where two lists of tensors differ by more than `tolerance` of the largest number in a tensor; "" if they do not. NaN is NaN."""
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, expected {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a_, b_ = (torch.zeros(()) if t is None else t.detach().cpu() for t in (a, b))
        if a is not None and b is not None and a.shape != b.shape:
            return f"tensor {i} has shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        largest = max(1e-3, float(b_.nan_to_num(0.0).abs().max()) if b_.numel() else 0.0)
        same = (a_ == b_) | (a_.isnan() & b_.isnan())  # equal infinities too
        difference = torch.where(same, 0.0, (a_.double() - b_.double()).abs())
        worst = float(difference.max()) if difference.numel() else 0.0
        if not worst <= tolerance * largest:  # NaN in one of them too
            share = float((difference > tolerance * largest).double().mean())
            return f"tensor {i}: off by {worst:.3g} where the largest is {largest:.3g}, in {share:.0%} of the elements"
    return ""


def sqnr(ours: Tensor, theirs: Tensor) -> float:
    """Signal to noise in dB, of all elements: none where something is not finite."""
    noise = (ours.double() - theirs.double()).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(theirs.double().square().sum() / noise)) if noise.isfinite() else float("-inf")
