"""What is logged: scalars and histograms, by name."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts between edges.

    Attributes
    ----------
    edges : Tensor, float64 [n + 1]
        Ascending.
    counts : Tensor, float64 [n]
    """

    edges: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Figures:
    """Scalars and histograms of one step. Names are paths, such as "clipped/layer1.conv.output": loggers group by what is before the slash.

    Attributes
    ----------
    scalars : dict of str to float
        NaN is left out when they are logged: nothing was measured.
    histograms : dict of str to Histogram
    """

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def known(self) -> dict[str, float]:
        """The scalars that are not NaN."""
        return {name: value for name, value in self.scalars.items() if not math.isnan(value)}

    def csv(self) -> str:
        """The scalars as a table, a line each: what is before the slash, what is behind it, the value.

        Examples
        --------
        >>> print(Figures({"seconds": 1.5, "clipped/conv.output": 0.0}).csv(), end="")
        figure,of,value
        seconds,,1.5
        clipped,conv.output,0.0
        """
        file = io.StringIO()
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["figure", "of", "value"])
        for name, value in self.scalars.items():
            figure, _, of = name.partition("/")
            lines.writerow([figure, of, float(value)])
        return file.getvalue()
