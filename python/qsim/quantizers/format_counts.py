"""What rounding to a float format does to the values that pass: how many overflow, vanish or become subnormal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qsim import ops


@dataclass(frozen=True)
class FormatCounts:
    """How many values were seen, and what rounding to a float format makes of them.

    ``print`` gives a sentence part: "4096 values, of which 12 overflow, 3 underflow to zero, 40 become subnormal".

    Attributes
    ----------
    elements, nans, infs : int
        All values, and those that are not finite before rounding.
    overflows : int
        Finite, but beyond the format's largest number once rounded.
    underflows : int
        Not zero, but zero once rounded.
    subnormals : int
        Subnormal once rounded, and not zero: few bits of their mantissa are left.
    """

    elements: int = 0
    nans: int = 0
    infs: int = 0
    overflows: int = 0
    underflows: int = 0
    subnormals: int = 0

    def __str__(self) -> str:
        return (
            f"{self.elements} values, of which {self.overflows} overflow, {self.underflows} underflow to zero, "
            f"{self.subnormals} become subnormal"
        )


class FormatCounter(nn.Module):
    """Sees tensors pass and counts what rounding to a float format would do to their values, without waiting for the device.

    Additive: the same data cut into other batches, or seen by several counters that are merged, gives the same counts.

    Parameters
    ----------
    format : str
        A float format of `TensorSpec`: "float16", "float8_e4m3fn" and so on.

    Attributes
    ----------
    counters : Tensor, int64 [6]
        The fields of `FormatCounts`, in order.

    Examples
    --------
    >>> counter = FormatCounter("float16")
    >>> _ = counter(torch.tensor([1.0, 70000.0, 1e-8, torch.inf]))
    >>> print(counter.counts)
    4 values, of which 1 overflow, 1 underflow to zero, 0 become subnormal
    """

    counters: Tensor

    def __init__(self, format: str) -> None:
        super().__init__()
        self.format = format
        self.register_buffer("counters", torch.zeros(6, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Count a tensor, float16/bfloat16/float32/float64 on the counter's device, and return it, unchanged."""
        ops.count_format_(x, self.format, self.counters)
        return x

    @property
    def counts(self) -> FormatCounts:
        """What was counted, in numbers. Waits for the device."""
        return FormatCounts(*self.counters.tolist())

    def reset(self) -> None:
        """Forget what was counted."""
        self.counters.zero_()

    def merge(self, other: FormatCounter) -> None:
        """Add what another counter of the same format saw, on any device. It is not changed."""
        if self.format != other.format:
            raise ValueError(f"FormatCounter: cannot merge counts of {other.format} into counts of {self.format}")
        self.counters.add_(other.counters.to(self.counters.device))

    def extra_repr(self) -> str:
        return self.format
