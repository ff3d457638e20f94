"""What a verification found, as part of a report's page and of its numbers."""

from __future__ import annotations

import math

from qsim.deploy.verification import Verification
from qsim.pages import drawing
from qsim.pages.markup import Cell, Column, Line, table
from qsim.table import decibel, percent


def verification_table(verification: Verification) -> str:
    """Every output of every computation beside another one."""
    columns = [Column("compared", wide=True), Column("output")]
    columns += [Column(head, number=True) for head in ("elements", "differ", "largest")]
    columns += [Column("SQNR dB", number=True, ascending=True), Column("top-1", number=True, ascending=True)]
    found = [d.sqnr for outputs in verification.differences.values() for d in outputs.values() if math.isfinite(d.sqnr)]
    top = max([*found, 1.0])
    lines = [
        Line(
            [
                Cell(f"{mine} / {other}"),
                Cell(name),
                Cell(f"{d.elements:,}", d.elements),
                Cell(f"{d.mismatching:,}", d.mismatching),
                Cell(f"{d.largest:g}{'' if d.step is None else ' steps'}", d.largest),
                Cell(markup=decibel(d.sqnr) + drawing.bar(d.sqnr / top), value=d.sqnr),
                Cell(percent(d.top1), d.top1),
            ]
        )
        for (mine, other), outputs in verification.differences.items()
        for name, d in outputs.items()
    ]
    note = f"{verification.runtime}, all outputs: integers where they are quantized, numbers otherwise."
    return table("Verification", note, columns, lines)


def float_table(floats: dict[str, str]) -> str:
    """Operations that run in float though there is an integer kernel for them, and why; nothing where there are none."""
    if not floats:
        return ""
    columns = [Column("operation", wide=True), Column("why", wide=True)]
    lines = [Line([Cell(name), Cell(why)]) for name, why in floats.items()]
    return table("In float", "Operations that have an integer kernel and run in float.", columns, lines)


def verification_figures(verification: Verification) -> dict[str, float]:
    """What differs, and SQNR in dB, by what was compared and the output."""
    found = {}
    for (mine, other), outputs in verification.differences.items():
        for name, difference in outputs.items():
            found[f"differ/{mine} and {other}/{name}"] = float(difference.mismatching)
            found[f"sqnr/{mine} and {other}/{name}"] = difference.sqnr
    return found
