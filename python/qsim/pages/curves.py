"""Curves that a row of a table opens: one number for each channel of a weight, or for each step of a log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from qsim.pages.packed import packed


@dataclass(frozen=True, eq=False)
class Curves:
    """Positive numbers on a logarithmic axis, over what is counted.

    Attributes
    ----------
    along : str
        What is counted: "channel", "step".
    values : mapping of str to Tensor, float32 [n]
        The curves by their names, one or two.
    first : int
        The number of the first.
    """

    along: str
    values: Mapping[str, Tensor]
    first: int = 0

    def markup(self, most: int) -> str:
        """The data of a drawing with at most `most` columns; where there are more, neighbours are one column, with the largest of each."""
        each = math.ceil(max(map(len, self.values.values())) / most)
        data = {name: packed(_joined(values, each)) for name, values in self.values.items()}
        text = json.dumps({"along": self.along, "first": self.first, "each": each, "values": data}, separators=(",", ":"))
        return f'<i data-curves="{escape(text)}"></i>'


def _joined(values: Tensor, each: int) -> Tensor:
    values = values.float().cpu()
    return values if each == 1 else torch.stack([values[start : start + each].max() for start in range(0, len(values), each)])
