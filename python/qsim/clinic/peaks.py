"""Peaks of what products read, by channel and by token: where outliers are that take a grid's range from everything else."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qsim.operations.functions import BIAS_POSITION, WEIGHT

_FIRST = (0, "input")
# By operation: where it reads what may be an activation, what that is called, and the axis of its channels.
_READ: dict[str, tuple[tuple[tuple[int, str], str, int], ...]] = {
    "linear": ((_FIRST, "input", -1),),
    **{kind: ((_FIRST, "input", 1),) for kind in BIAS_POSITION if kind.startswith("conv") and kind in WEIGHT},
    "addmm": (((1, "mat1"), "input", -1),),
    "matmul": ((_FIRST, "first operand", -1), ((1, "other"), "second operand", -2)),
    "bmm": ((_FIRST, "first operand", -1), ((1, "mat2"), "second operand", -2)),
    "scaled_dot_product_attention": (((0, "query"), "query", -1), ((1, "key"), "key", -1), ((2, "value"), "value", -1)),
}
_TOKENS = 4096  # so many are looked at for a median


@dataclass
class Peaks:
    """Magnitudes of a tensor that a product reads, over all batches.

    Attributes
    ----------
    channels : Tensor, shape [channels]
        The largest finite magnitude of each.
    medians : Tensor, shape [channels]
        The median magnitude of each over some thousand tokens, added up over all calls.
    tokens : list of (float, float)
        By call: the largest finite magnitude of a token (all channels at one place), and the median of those that are not zero; empty
        for convolutions, whose tokens are pixels.
    """

    channels: Tensor
    medians: Tensor
    tokens: list[tuple[float, float]] = field(default_factory=list)

    @property
    def channel_ratio(self) -> float:
        """The largest channel to the median one."""
        return _ratio(self.channels)

    @property
    def median_ratio(self) -> float:
        """The same of what the channels are in most tokens."""
        return _ratio(self.medians)

    @property
    def largest_token(self) -> float:
        return max((largest for largest, _ in self.tokens), default=0.0)

    @property
    def token_ratio(self) -> float:
        """The largest token to the median one."""
        median = statistics.median(median for _, median in self.tokens) if self.tokens else 0.0
        return self.largest_token / median if median > 0 else 1.0


def note_peaks(found: dict[tuple[str, str], Peaks], name: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add what the operation called `name`, of this kind, reads."""
    for what, t, axis in _operands(kind, args, kwargs):
        rows = t.detach().abs().movedim(axis, -1).flatten(0, -2)
        rows = rows.where(rows.isfinite(), 0.0).float()
        channels = rows.amax(0)
        known = found.setdefault((name, what), Peaks(channels, torch.zeros_like(channels)))
        if known.channels.shape != channels.shape:
            continue  # another number of channels: two tensors, of which the first is looked at
        known.channels = known.channels.maximum(channels)
        known.medians = known.medians + rows[:: -(-len(rows) // _TOKENS)].median(0).values
        if not kind.startswith("conv"):
            tokens = rows.amax(1)
            known.tokens.append((tokens.max().item(), _median(tokens)))


def _operands(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor, int]]:
    for (position, keyword), what, axis in _READ.get(kind, ()):
        t = args[position] if position < len(args) else kwargs.get(keyword)
        if isinstance(t, Tensor) and t.is_floating_point() and not isinstance(t, nn.Parameter) and t.dim() > 1 and t.numel():
            yield what, t, axis


def _median(values: Tensor) -> float:
    """Of those that are not zero."""
    values = values[values > 0]
    return values.median().item() if values.numel() else 0.0


def _ratio(values: Tensor) -> float:
    """The largest of some magnitudes to the median of those that are not zero; 1 if there are none."""
    median = _median(values)
    return values.max().item() / median if median > 0 else 1.0
