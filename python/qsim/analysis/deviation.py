"""How far tensors are from what they should be: signal-to-quantization-noise ratio and largest error, over any number of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from qsim.numbers.sqnr import sqnr
from qsim.runs.arguments import tensors_in

ZEROS = "the float model returns zeros alone (a last layer that was never trained?)"  # beside which nothing can be measured

_CHUNK = 1 << 20  # elements at a time: float64 copies stay at a few times 8 MiB, whatever the tensors' size


@dataclass
class Deviation:
    """Sums over pairs of tensors, reference and approximation, in float64.

    Attributes
    ----------
    elements : int
        All elements.
    nonfinite : int
        Those where either tensor is NaN or Inf.
    broken : int
        Those among them where the reference is finite: their error is infinite. The others are left out of everything else.
    signal, noise : float
        Sums of squares of the reference, and of the differences. float64 tensors beyond 1e154 make them Inf.
    max_error : float
        Largest absolute difference; NaN where nothing of the reference was finite.

    Examples
    --------
    >>> deviation = Deviation()
    >>> deviation.add(torch.tensor([3.0, 4.0, torch.inf]), torch.tensor([3.0, 4.5, 1.0]))
    >>> deviation.sqnr, deviation.max_error, deviation.nonfinite
    (20.0, 0.5, 1)
    >>> deviation.add(torch.tensor([3.0]), torch.tensor([torch.nan]))
    >>> deviation.sqnr, deviation.max_error, deviation.broken
    (-inf, inf, 1)
    """

    elements: int = 0
    nonfinite: int = 0
    broken: int = 0
    signal: float = 0.0
    noise: float = 0.0
    max_error: float = math.nan

    def add(self, reference: Tensor, approximation: Tensor) -> None:
        """Compare two floating-point tensors of one shape and device. Waits for the device."""
        flat = reference.detach().reshape(-1), approximation.detach().reshape(-1)
        for start in range(0, reference.numel(), _CHUNK):
            x, y = (tensor[start : start + _CHUNK].double() for tensor in flat)
            finite, other = x.isfinite(), y.isfinite()
            error = (x - y).abs().where(other, math.inf).where(finite, 0.0)
            found, both = int(finite.sum()), int((finite & other).sum())
            self.elements += x.numel()
            self.nonfinite += x.numel() - both
            self.broken += found - both
            self.signal += float(x.where(finite, 0.0).square().sum())
            self.noise += float(error.square().sum())
            if found:
                largest = float(error.max())
                self.max_error = largest if math.isnan(self.max_error) else max(self.max_error, largest)

    @property
    def compared(self) -> int:
        """Elements whose reference is finite."""
        return self.elements - self.nonfinite + self.broken

    @property
    def sqnr(self) -> float:
        """In dB, see `qsim.numbers.sqnr`; -Inf where something is broken, NaN where nothing of the reference was finite."""
        return sqnr(self.signal, self.noise) if self.compared else math.nan


def float_tensors(tree: Any) -> list[Tensor]:
    """The floating-point tensors in nested tuples, lists, dicts of any class and dataclasses; of other objects, such as caches, only
    where there are no others."""
    found = [leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return found or [leaf for leaf in tensors_in(tree) if leaf.is_floating_point()]


def kept_floats(tree: Any) -> list[Tensor]:
    """Clones of them: a model may return its own tensors, or its own dict, and the next run writes there.

    Examples
    --------
    >>> own = {"y": torch.zeros(2)}
    >>> before = kept_floats(own)
    >>> own["y"] += 1
    >>> before
    [tensor([0., 0.])]
    """
    return [t.clone() for t in float_tensors(tree)]


def _leaves(tree: Any) -> Iterator[Any]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Mapping):
            yield from _leaves(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, each.name) for each in fields(leaf)])
        else:
            yield leaf
