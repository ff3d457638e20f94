"""Curves over the rows of a table, as data: the page's script draws them with uPlot, with axes, and names the row under the cursor."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Axis:
    """What an axis has: its label, the unit of its values ("dB"), and whether its scale is logarithmic."""

    label: str
    unit: str = ""
    logarithmic: bool = False

    @property
    def text(self) -> str:
        """Label and unit, as it stands beside the axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True)
class Series:
    """One curve: its name, its color ("inside", "second", "third" or "edge" of the page's), and its values, in the order of the chart.
    NaN and Inf, and what is not positive on a logarithmic axis, leave gaps."""

    name: str
    color: str
    values: Sequence[float]


@dataclass(frozen=True)
class Limit:
    """A value below which a point is as severe as a row of a table can be, and what that means."""

    value: float
    severity: str
    meaning: str


@dataclass(frozen=True)
class Chart:
    """Curves with one point for each of `rows`.

    Attributes
    ----------
    told : str
        What it shows, for who cannot see it.
    x, y : Axis
    series : sequence of Series
    rows : sequence of int or None
        Of each point, which row of the table it is, from 0; None for one that the table has not.
    along : sequence of float, optional
        Where points stand on the x axis; 1, 2, 3 ... without.
    limits : sequence of Limit
    picked : int, optional
        The point that stands out.
    only : str
        The name of a point that is no row.
    points : bool
        Whether every point has a dot.
    """

    told: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    rows: Sequence[int | None]
    along: Sequence[float] | None = None
    limits: Sequence[Limit] = ()
    picked: int | None = None
    only: str = ""
    points: bool = False

    def markup(self) -> str:
        """The place of the drawing, with its data, and a key under it."""
        data = {
            "x": self.x.text,
            "y": self.y.text,
            "unit": self.y.unit,
            "log": self.y.logarithmic,
            "series": [
                {"name": one.name, "color": one.color, "values": [_short(v, self.y.logarithmic) for v in one.values]} for one in self.series
            ],
            "rows": list(self.rows),
            "along": None if self.along is None else [_short(v, False) for v in self.along],
            "limits": [{"value": limit.value, "severity": limit.severity} for limit in self.limits],
            "picked": self.picked,
            "only": self.only,
            "points": self.points,
        }
        keys = [f'<span class="key {one.color}"></span>{escape(one.name)}' for one in self.series]
        keys += [f'<span class="key {limit.severity}"></span>{escape(limit.meaning)}' for limit in self.limits]
        text = escape(json.dumps(data, separators=(",", ":"), allow_nan=False))
        hint = "Click a point for its row; drag to look closer, double-click to go back."
        return (
            f'<figure class="chart" data-chart="{text}" role="img" aria-label="{escape(self.told)}"></figure>'
            f'<p class="keys">{" ".join(keys)} <span class="hint">{hint}</span></p>'
        )


def _short(value: float, positive: bool) -> float | None:
    """Five digits of it; None where there is nothing to draw."""
    return None if not math.isfinite(value) or (positive and value <= 0) else float(f"{value:.5g}")
