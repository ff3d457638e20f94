"""The channels of a weight: how large each is, and what its grid holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from qsim.pages.packed import packed


@dataclass(frozen=True, eq=False)
class Channels:
    """Of one weight, along one axis.

    Attributes
    ----------
    axis : int
    largest : Tensor, float32 [channels]
        The largest magnitude in each channel, NaN and Inf left out.
    ends : Tensor, float32 [channels], or None
        The largest magnitude that its grid holds; None where no range is chosen, and where channels have several.
    """

    axis: int
    largest: Tensor
    ends: Tensor | None

    def markup(self, most: int) -> str:
        """The data of a drawing with at most `most` columns; of more channels, neighbours are one column, with the largest of each."""
        each = math.ceil(len(self.largest) / most)
        ends = "" if self.ends is None else f' data-ends="{escape(packed(_joined(self.ends, each)))}"'
        return f'<i data-largest="{packed(_joined(self.largest, each))}"{ends} data-axis="{self.axis}" data-each="{each}"></i>'


def _joined(values: Tensor, each: int) -> Tensor:
    values = values.float().cpu()
    return values if each == 1 else torch.stack([values[start : start + each].max() for start in range(0, len(values), each)])
