"""The report on what a simulation quantizes, and why the rest stays in float."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor, nn

from qsim.graph.plan.actions import LeftFloat, PlannedBias, PlannedQuantizer
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.pages.markup import Cell, Column, Fact, Line, count_cell, name, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.quantizers.format_counts import FormatCounts
from qsim.quantizers.observer import Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.quantizers.sketch import Distribution
from qsim.runs.sharding import is_sharded
from qsim.simulation.clipping import clipped_share_of, clipped_share_seen
from qsim.simulation.histogram import histogram
from qsim.table import counted, percent, text_table

CLIPPED = 0.05  # share of clipped values that is a problem; the best range for a Gaussian at 3 and 4 bits clips 1 to 4 %
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

    @property
    def calibrated(self) -> bool:
        """Whether it has the encoding that it needs; a bias has what its input and its weight have."""
        return self.role == "bias" or self.dynamic or self.low is not None

    @property
    def grid(self) -> str:
        """Storage type, symmetry and granularity: "int8 symmetric per channel (axis 0)"."""
        if self.role == "bias":
            return f"{self.dtype}, {self.granularity}"
        kind = self.dtype.startswith("float") and "scaled"
        words = [self.dtype, kind or ("symmetric" if self.symmetric else "asymmetric"), self.granularity]
        return " ".join(words) if self.granularity else self.dtype

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

    def page(self) -> Page:
        """See `Report.page`."""
        return summary_page(self)


def summarize(
    model: nn.Module,
    planned: Mapping[str, PlannedQuantizer],
    biases: Sequence[PlannedBias],
    quantizers: Mapping[str, Quantizer],
    released: Mapping[str, str],
    left: list[LeftFloat],
    notes: list[str],
) -> Summary:
    """The summary of a plan, of the state of its quantizers, and of the weights of the model that they are for.

    `released`: the formats of those in whose place all that use them compute in float.
    """
    rows = [_row(planned[key], quantizer, model, released.get(key, "")) for key, quantizer in quantizers.items()]
    for bias in biases:
        enabled = quantizers[bias.input].enabled and quantizers[bias.weight].enabled
        scale, fallback = f"scale of {bias.input} x {bias.weight}", released.get(bias.weight, "")
        rows.append(Row(bias.parameter, "bias", bias.op, "int32", 32, True, scale, enabled, fallback=fallback))
    return Summary(rows, left, notes)


def _row(plan: PlannedQuantizer, quantizer: Quantizer, model: nn.Module, fallback: str) -> Row:
    spec, encoding, counts = quantizer.spec, quantizer.encoding, quantizer.counts
    weight = attrgetter(plan.parameter)(model) if plan.parameter else None
    if weight is not None and is_sharded(weight):
        weight = None  # gathering it takes every rank, and a summary may be printed by one
    distribution = _distribution(quantizer.observer if weight is None else Observer().to(weight.device), weight)
    clipped = None
    if encoding is not None:
        clipped = clipped_share_seen(quantizer, encoding, distribution) if weight is None else clipped_share_of(weight, quantizer)
    alive = None if encoding is None else ~_zeros(quantizer, weight, encoding)
    return Row(
        plan.key,
        plan.role,
        plan.op,
        spec.encoding_dtype,
        spec.bits,
        spec.symmetric,
        _granularity(spec),
        quantizer.enabled,
        scale=None if encoding is None or alive is None or not spec.has_scale else _span(encoding.scale[alive]),
        **_ends(encoding, alive),
        observed=(quantizer.min.min().item(), quantizer.max.max().item()) if counts.elements > counts.nonfinite else None,
        elements=counts.elements,
        nonfinite=counts.nonfinite,
        clipped=clipped,
        format_counts=quantizer.format_counts,
        fallback=fallback,
        zeros=0 if alive is None else int((~alive).sum()),
        distribution=distribution,
        dynamic=spec.is_dynamic,
    )


def _distribution(observer: Observer, weight: Tensor | None) -> Distribution | None:
    """Of what the observer saw, or of the weight as the observer sees it; None without a sketch, or without anything finite."""
    if weight is not None:
        observer(weight.detach())
    if not observer.sketched or not bool(observer.lowest <= observer.highest):
        return None
    return Distribution.of(observer.sketch, observer.lowest, observer.highest)


def _zeros(quantizer: Quantizer, weight: Tensor | None, encoding: Encoding) -> Tensor:
    """Which channels hold nothing but zeros, of the shape of the scale; none is looked for in blocks."""
    scale, axis = encoding.scale, encoding.axis
    if encoding.block_size is not None or isinstance(axis, tuple):
        return torch.zeros_like(scale, dtype=torch.bool)
    if weight is not None:
        magnitude = weight.detach().abs()
        zero = (magnitude.max() if axis is None else magnitude.movedim(axis, 0).flatten(1).amax(1)) == 0
    else:
        zero = (quantizer.min == 0) & (quantizer.max == 0)
    return zero.to(scale.device).reshape(scale.shape) if zero.numel() == scale.numel() else torch.zeros_like(scale, dtype=torch.bool)


def _span(values: Tensor) -> tuple[float, float] | None:
    return (values.min().item(), values.max().item()) if values.numel() else None


def _ends(encoding: Encoding | None, alive: Tensor | None) -> dict[str, float]:
    if encoding is None or alive is None:
        return {}
    if not bool(alive.any()):
        return {"low": 0.0, "high": 0.0}
    return {"low": encoding.min[alive].min().item(), "high": encoding.max[alive].max().item()}


def _granularity(spec: TensorSpec) -> str:
    if not spec.has_scale:
        return ""
    stored = "" if spec.scale_format is None else f", scales in {spec.scale_format}"
    return f"{'dynamic, ' if spec.is_dynamic else ''}{_extent(spec)}{stored}"


def _extent(spec: TensorSpec) -> str:
    if spec.block_size is not None:
        tile = " x ".join(map(str, spec.block_size)) if isinstance(spec.block_size, tuple) else spec.block_size
        return f"per {tile} along axis {spec.axis}"
    if spec.axis is None:
        return "per tensor"
    if spec.is_dynamic:
        return "per token" if spec.axis == -1 else f"per line along axis {spec.axis}"
    return f"per channel (axis {spec.axis})"


_HISTOGRAMS = (
    'Histograms: the logarithm of the count over the value, <span class="key in"></span>within the grid and <span class="key out"></span>'
    'clipped; <span class="key shade"></span>the range of the grid. Per channel, the range shown is that of all channels together.'
)


def summary_page(summary: Summary) -> Page:
    """What is quantized, and what is not."""
    found = [f"{row.key}: {row.problem}" for row in summary.rows if row.problem]
    facts = facts_of(summary)
    return Page("Quantization", "What is quantized and how, and what stays in float", tiles(facts) + problems(found) + tensors_of(summary))


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
    body = table("Quantizers", _HISTOGRAMS, columns, [_quantizer(row) for row in summary.rows])
    if summary.left:
        body += _left(summary.left)
    return body + problems(summary.notes)


def _quantizer(row: Row) -> Line:
    width = None if row.low is None or row.high is None else row.high - row.low
    observed = row.observed
    seen = "" if observed is None else f"observed [{observed[0]:.4g}, {observed[1]:.4g}]"
    told = f"range {row.range}; {percent(row.clipped) or 'nothing'} clipped"
    cells = [
        Cell(markup=name(row.key, f"{row.role} · {row.op}"), value=row.key),
        Cell(
            markup=histogram(row.distribution, (row.low, row.high), told), value=math.nan if observed is None else observed[1] - observed[0]
        ),
        Cell(row.grid, below=row.remark if row.enabled else ""),
        Cell(row.scale_text, math.nan if row.scale is None else row.scale[1]),
        Cell(row.range, math.nan if width is None else width, below=seen, bad=not row.calibrated and not row.fallback),
        Cell(percent(row.clipped), math.nan if row.clipped is None else row.clipped, bad=(row.clipped or 0) >= CLIPPED),
        count_cell(row.nonfinite),
    ]
    return Line(cells, f"{row.key} {row.role} {row.op} {row.grid} {row.problem}", off=not row.enabled)


def _left(left: Sequence[LeftFloat]) -> str:
    columns = [Column("name", wide=True), Column("operation"), Column("reason", wide=True)]
    lines = [Line([Cell(markup=name(e.name, "")), Cell(e.op), Cell(e.reason)], " ".join(e)) for e in left]
    return table("Left in float", "Operations and operands that are not quantized, and why.", columns, lines)
