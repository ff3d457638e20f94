"""The report on what a simulation quantizes, and why the rest stays in float."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from qsim.graph.plan.actions import LeftFloat
from qsim.loggers.figures import Figures, Histogram
from qsim.numbers.granularity import grid_text
from qsim.pages.chart import Axis, Chart, Series
from qsim.pages.curves import Curves
from qsim.pages.markup import Cell, Column, Fact, Line, count_cell, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.quantizers.format_counts import FormatCounts
from qsim.quantizers.sketch import Distribution, even_edges
from qsim.simulation.histogram import histogram
from qsim.table import counted, percent, text_table

CLIPPED = 0.05  # share of clipped values that is a problem; the best range for a Gaussian at 3 and 4 bits clips 1 to 4 %
LARGEST, HELD = "largest magnitude", "end of the grid"  # curves over the channels of a weight
_BINS = 64  # of a histogram that is logged
_NAMES = 6  # so many names of what stays in float for one reason are printed; `Summary.left` has all


@dataclass(frozen=True)
class Row:
    """One quantizer, or one bias.

    Attributes
    ----------
    key : str
        Its name in `QuantSim.quantizers`; of a bias, its parameter.
    role : str
        "weight", "constant", "activation", "input" or "bias".
    op : str
        The operation, with what is fused to it: "conv2d + relu".
    dtype, bits
        What the tensor is stored as: "int8" and 8, "float16" and 16; the biases "int32" and 32.
    symmetric : bool
    granularity : str
        "per tensor", "per channel (axis 0)", "per 32 along axis 1", "scale of input x fc.weight"; "" of a format without scales.
    scale : (float, float) or None
        Smallest and largest scale of channels that are not all zero; None before calibration, and of a format without scales.
    low, high : float or None
        The range: what the grid holds, over all channels that are not all zero. None before calibration.
    observed : (float, float) or None
        The finite range observed; of a weight, at its calibration.
    elements, nonfinite : int
        Elements observed, and how many of them were NaN or Inf.
    clipped : float or None
        Share of the finite values that round to a number beyond the end of the grid. Of a weight exact, and of the weight as it is
        now; of an activation taken from the sketch: exactly 0 where nothing was clipped, otherwise right within the counts of the two
        bins, 1/32 of their value wide, that the ends of the grid cut. None where it is not known: not calibrated, or no sketch.
    format_counts : FormatCounts or None
        What rounding to float16 or bfloat16 does.
    dynamic : bool
        Whether the scale comes from each tensor: there is no encoding.
    enabled : bool
    fallback : str
        The float format in place of the grid, where all that use the tensor fall back; "" otherwise.
    zeros : int
        Channels of a weight that hold nothing but zeros, which any grid holds: 1 of a tensor with one scale that is all zero.
    distribution : Distribution or None
        Of what was observed, of a weight as it is now; None without a sketch, and of a weight that FSDP shards, as `clipped` then.
    channels : Curves or None
        Of a weight, how large each channel is, and what its grid holds; None of one that FSDP shards.
    """

    key: str
    role: str
    op: str
    dtype: str
    bits: int
    symmetric: bool
    granularity: str
    enabled: bool
    scale: tuple[float, float] | None = None
    low: float | None = None
    high: float | None = None
    observed: tuple[float, float] | None = None
    elements: int = 0
    nonfinite: int = 0
    clipped: float | None = None
    format_counts: FormatCounts | None = None
    fallback: str = ""
    zeros: int = 0
    distribution: Distribution | None = field(default=None, repr=False, compare=False)
    dynamic: bool = False
    channels: Curves | None = field(default=None, repr=False, compare=False)

    @property
    def calibrated(self) -> bool:
        """Whether it has the encoding that it needs; a bias has what its input and its weight have."""
        return self.role == "bias" or self.dynamic or self.low is not None

    @property
    def grid(self) -> str:
        """Storage type, symmetry and granularity: "int8 symmetric per channel (axis 0)"."""
        if self.role == "bias":
            return f"{self.dtype}, {self.granularity}"
        return grid_text(self.dtype, self.symmetric, self.granularity)

    @property
    def range(self) -> str:
        """The range as text: "[-1, 1.5]"; what float16 and bfloat16 take from the values; "not calibrated"."""
        if not self.calibrated:
            return "not calibrated"
        if found := self.format_counts:
            losses = {"overflow": found.overflows, "underflow": found.underflows, "subnormal": found.subnormals}
            return ", ".join(f"{count} {loss}" for loss, count in losses.items() if count)
        return "" if self.low is None else f"[{self.low:.4g}, {self.high:.4g}]"

    @property
    def scale_text(self) -> str:
        """The scale as text, of several the smallest and the largest: "0.01 .. 0.02"."""
        return "" if self.scale is None else " .. ".join(dict.fromkeys(f"{scale:.3g}" for scale in self.scale))

    @property
    def remark(self) -> str:
        """What else there is to say: "off", "computed in float16", "2 channels all zero"; "" where there is nothing."""
        if not self.enabled:
            return "off"
        zero = "" if not self.zeros else "all zero" if self.scale is None else f"{self.zeros} channel{'s' * (self.zeros > 1)} all zero"
        return ", ".join(filter(None, [f"computed in {self.fallback}" if self.fallback else "", zero]))

    @property
    def problem(self) -> str:
        """What is wrong: "not calibrated", "12 NaN or Inf", "3.20 % clipped"; "" where nothing is."""
        if not self.calibrated:
            return "not calibrated" if self.enabled and not self.fallback else ""
        found = [f"{self.nonfinite} NaN or Inf"] if self.nonfinite else []
        return ", ".join(found + ([f"{percent(self.clipped)} clipped"] if (self.clipped or 0) >= CLIPPED else []))

    @property
    def severity(self) -> str:
        """ "error": no encoding, or NaN or Inf; "warning": much is clipped; "" where nothing is wrong."""
        return "" if not self.problem else "error" if self.nonfinite or not self.calibrated else "warning"


@dataclass(frozen=True)
class Summary(Report):
    """What `QuantSim.summary` returns; ``print`` shows it as tables (drawn with rich where that is installed).

    Attributes
    ----------
    rows : list of Row
        The quantizers in the order of the model, and the biases that are held as int32.
    left : list of LeftFloat
        Operations and operands that stay in float: `name`, `op`, `reason`.
    notes : list of str
        What could not be seen or done.

    Examples
    --------
    >>> import tempfile
    >>> sim = QuantSim(torch.nn.Linear(3, 2), torch.randn(1, 3), int8())
    >>> [(row.key, row.bits, row.granularity) for row in sim.summary().rows[:2]]
    [('input', 8, 'per tensor'), ('weight', 8, 'per channel (axis 0)')]
    >>> sim.summary().save(tempfile.mktemp(".html"))
    """

    rows: list[Row]
    left: list[LeftFloat]
    notes: list[str]

    def __str__(self) -> str:
        head = ("quantizer", "role", "operation", "grid", "scale", "range", "clipped", "NaN, Inf", "")
        rows = [
            (
                r.key,
                r.role,
                r.op,
                r.dtype if r.role == "bias" else r.grid,
                r.scale_text,
                r.range,
                percent(r.clipped),
                str(r.nonfinite or ""),
                r.remark,
            )
            for r in self.rows
        ]
        parts = [*self.totals(), text_table(head, rows, ("clipped", "NaN, Inf"))]
        if self.left:
            parts += [f"{len(self.left)} left in float", text_table(("operation", "reason", "names"), self._left_by_reason())]
        return "\n".join([*parts, *(f"note: {note}" for note in counted(self.notes))])

    def totals(self) -> list[str]:
        """A line on all quantizers, and one for each kind of grid; then the problems, so that nobody reads 500 rows to find them.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.randn(1, 3))
        >>> len(sim.summary().totals()) > 0
        True
        """
        grids = Counter((row.role, row.grid) for row in self.rows if row.role != "bias")
        biases = sum(row.role == "bias" for row in self.rows)
        lines = [f"{sum(grids.values())} quantizers" + (f", {biases} biases as int32" if biases else "")]
        lines += [f"  {count} x {role}: {grid}" for (role, grid), count in grids.most_common()]
        problems = [row for row in self.rows if row.problem]
        if len(problems) > _NAMES and all(not row.calibrated for row in problems):
            return [*lines, f"{len(problems)} not calibrated"]
        return lines + ([f"{len(problems)} with problems:"] if problems else []) + [f"  '{row.key}': {row.problem}" for row in problems]

    def _left_by_reason(self) -> list[tuple[str, str, str]]:
        names: dict[tuple[str, str], list[str]] = {}
        for entry in self.left:
            names.setdefault((entry.op, entry.reason), []).append(entry.name)
        more = {key: f" and {len(found) - _NAMES} more" if len(found) > _NAMES else "" for key, found in names.items()}
        return [(*key, ", ".join(found[:_NAMES]) + more[key]) for key, found in names.items()]

    def figures(self) -> Figures:
        """Of every quantizer the ends of its range, the share that is clipped, NaN and Inf met, and the histogram of what was observed."""
        scalars: dict[str, float] = {}
        histograms: dict[str, Histogram] = {}
        for row in self.rows:
            if row.low is not None and row.high is not None:
                scalars |= {f"range_low/{row.key}": row.low, f"range_high/{row.key}": row.high}
            if row.clipped is not None:
                scalars[f"clipped/{row.key}"] = row.clipped
            if row.role != "bias":
                scalars[f"nonfinite/{row.key}"] = float(row.nonfinite)
            if (seen := row.distribution) is not None and seen.lowest < seen.highest:
                edges = even_edges(seen.lowest, seen.highest, _BINS)
                histograms[f"observed/{row.key}"] = Histogram(edges, seen.histogram(edges))
        return Figures(scalars, histograms)

    def page(self) -> Page:
        """See `Report.page`."""
        return summary_page(self)


_COLUMNS = 100_000  # of the drawings of all weights' channels on one page, which they make larger by at most 0.6 MB
_HISTOGRAMS = (
    'Histograms: the logarithm of the count over the value, <span class="key inside"></span>within the grid and '
    '<span class="key outside"></span>clipped; <span class="key shade"></span>the range of the grid, per channel that of all channels '
    "together. Click one for its axes, and the channels of a weight."
)


def summary_page(summary: Summary) -> Page:
    """What is quantized, and what is not."""
    found = [f"{row.key}: {row.problem}" for row in summary.rows if row.problem]
    facts = facts_of(summary)
    body = tiles(facts) + problems(found) + tensors_of(summary)
    return Page("Quantization", "What is quantized and how, and what stays in float", body, about(summary.subject), ranges_of(summary.rows))


def facts_of(summary: Summary) -> list[Fact]:
    quantizers = [row for row in summary.rows if row.role != "bias"]
    return [
        ("quantizers", str(len(quantizers))),
        ("switched off", str(sum(not row.enabled for row in quantizers))),
        ("left in float", str(len(summary.left))),
        ("that met NaN or Inf", str(sum(row.nonfinite > 0 for row in quantizers))),
    ]


def tensors_of(summary: Summary) -> str:
    columns = [
        Column("quantizer", wide=True),
        Column("distribution", wide=True, number=True, left=True),
        Column("grid"),
        *(Column(head, number=True) for head in ("scale", "range", "clipped", "NaN, Inf")),
    ]
    most = max(64, _COLUMNS // max(1, sum(row.channels is not None for row in summary.rows)))
    body = table("Quantizers", _HISTOGRAMS, columns, [_quantizer(row, most) for row in summary.rows], ranges_of(summary.rows))
    if summary.left:
        body += _left(summary.left)
    return body + problems(summary.notes)


def ranges_of(rows: Sequence[Row]) -> Chart | None:
    """The largest magnitude observed, and the largest that the grid holds, along the model."""
    places = [i for i, row in enumerate(rows) if row.observed is not None or row.low is not None]
    if not places:
        return None
    shown = [rows[i] for i in places]
    observed = [math.nan if row.observed is None else max(map(abs, row.observed)) for row in shown]
    held = [math.nan if row.low is None or row.high is None else max(abs(row.low), abs(row.high)) for row in shown]
    series = [Series("observed", "inside", observed), Series("held by the grid", "edge", held)]
    axes = Axis("tensor, in the order of the model"), Axis("largest magnitude", logarithmic=True)
    return Chart("Largest magnitudes along the model", *axes, series, places)


def _quantizer(row: Row, most: int) -> Line:
    width = None if row.low is None or row.high is None else row.high - row.low
    observed = row.observed
    seen = "" if observed is None else f"observed [{observed[0]:.4g}, {observed[1]:.4g}]"
    told = f"range {row.range}; {percent(row.clipped) or 'nothing'} clipped"
    cells = [
        name_cell(row.key, f"{row.role} · {row.op}"),
        Cell(
            markup=histogram(row.distribution, (row.low, row.high), told) + ("" if row.channels is None else row.channels.markup(most)),
            value=math.nan if observed is None else observed[1] - observed[0],
        ),
        Cell(row.grid, below=row.remark if row.enabled else ""),
        Cell(row.scale_text, math.nan if row.scale is None else row.scale[1]),
        Cell(row.range, math.nan if width is None else width, below=seen, bad=not row.calibrated and not row.fallback),
        Cell(percent(row.clipped), math.nan if row.clipped is None else row.clipped, bad=(row.clipped or 0) >= CLIPPED),
        count_cell(row.nonfinite),
    ]
    return Line(cells, row.problem, off=not row.enabled, severity=row.severity)


def _left(left: Sequence[LeftFloat]) -> str:
    columns = [Column("name", wide=True), Column("operation"), Column("reason", wide=True)]
    lines = [Line([name_cell(e.name), Cell(e.op), Cell(e.reason)]) for e in left]
    return table("Left in float", "Operations and operands that are not quantized, and why.", columns, lines)
