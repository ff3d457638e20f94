"""The report on what a simulation quantizes, and why the rest stays in float."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsim.graph.plan import LeftFloat, PlannedBias, PlannedQuantizer
from qsim.quantizer import Quantizer


@dataclass(frozen=True)
class Row:
    """One quantizer: its key, role and operation, how it quantizes, the range of its grid (of float16 and bfloat16, what
    rounding takes from the values observed), what it observed that is not finite."""

    key: str
    role: str
    op: str
    grid: str
    range: str
    nonfinite: int
    enabled: bool


@dataclass(frozen=True)
class Summary:
    """What `QuantSim.summary` returns; ``print`` shows it as tables (drawn with rich where that is installed).

    Attributes
    ----------
    rows : list of Row
        The quantizers, and the biases that are held as int32.
    left : list of LeftFloat
        Operations and operands that stay in float: `name`, `op`, `reason`.
    notes : list of str
        What could not be seen or done.
    """

    rows: list[Row]
    left: list[LeftFloat]
    notes: list[str]

    def __str__(self) -> str:
        quantized = [
            (row.key, row.role, row.op, row.grid, row.range, str(row.nonfinite or ""), "" if row.enabled else "off") for row in self.rows
        ]
        parts = [
            f"{len(self.rows)} quantizers",
            _table(("quantizer", "role", "operation", "grid", "range", "NaN, Inf", ""), quantized),
        ]
        if self.left:
            left = [(entry.name, entry.op, entry.reason) for entry in self.left]
            parts += [f"{len(left)} left in float", _table(("name", "operation", "reason"), left)]
        return "\n".join(part for part in [*parts, *(f"note: {note}" for note in self.notes)] if part)


def summarize(
    planned: Mapping[str, PlannedQuantizer],
    biases: Sequence[PlannedBias],
    quantizers: Mapping[str, Quantizer],
    left: list[LeftFloat],
    notes: list[str],
) -> Summary:
    """The summary of a plan and of the state of its quantizers."""
    rows = [_row(planned[key], quantizer) for key, quantizer in quantizers.items()]
    for bias in biases:
        enabled = quantizers[bias.input].enabled and quantizers[bias.weight].enabled
        rows.append(Row(bias.parameter, "bias", bias.op, f"int32, scale of {bias.input} x {bias.weight}", "", 0, enabled))
    return Summary(rows, left, notes)


def _row(plan: PlannedQuantizer, quantizer: Quantizer) -> Row:
    return Row(plan.key, plan.role, plan.op, _grid(quantizer), _range(quantizer), quantizer.counts.nonfinite, quantizer.enabled)


def _grid(quantizer: Quantizer) -> str:
    spec = quantizer.spec
    if not spec.has_scale:
        return spec.dtype
    channels = "" if spec.axis is None else f" per channel (axis {spec.axis})"
    if spec.block_size is not None:
        tile = " x ".join(map(str, spec.block_size)) if isinstance(spec.block_size, tuple) else spec.block_size
        channels = f" per {tile} along axis {spec.axis}"
    if spec.is_float:
        return f"{spec.dtype} scaled{channels or ' per tensor'}"
    return f"{spec.encoding_dtype} {'symmetric' if spec.symmetric else 'asymmetric'}{channels}"


def _range(quantizer: Quantizer) -> str:
    encoding = quantizer.encoding
    if encoding is None:
        return "not calibrated"
    if found := quantizer.format_counts:
        losses = {"overflow": found.overflows, "underflow": found.underflows, "subnormal": found.subnormals}
        return ", ".join(f"{count} {loss}" for loss, count in losses.items() if count)
    return f"[{encoding.min.min().item():.4g}, {encoding.max.max().item():.4g}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under a head, as wide as they need to be."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # an optional extra: qsim[report]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [head, ["-" * width for width in widths], *rows]
        return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    table = Table(*head, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(Text, row))
    drawn = io.StringIO()
    Console(file=drawn, width=10_000).print(table)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines() if line.strip())
