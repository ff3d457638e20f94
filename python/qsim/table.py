"""Tables as text, drawn with rich where it is installed."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence

_QUOTED = re.compile(r"'[^']*'")


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = ()) -> str:
    """Columns under a head, as wide as they need to be; those whose head is in `numeric` are aligned to the right.

    Parameters
    ----------
    head : sequence of str
    rows : sequence of sequence of str
        As many entries as `head` each.
    numeric : sequence of str
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # an optional extra: qsim[report]
        return _plain_table(head, rows, numeric)
    table = Table(box=box.SIMPLE_HEAD)
    for name in head:
        table.add_column(name, justify="right" if name in numeric else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    drawn = io.StringIO()
    Console(file=drawn, width=10_000).print(table)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines() if line.strip())


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for line in [head, ["-" * width for width in widths], *rows]:
        cells = [text.rjust(width) if name in numeric else text.ljust(width) for name, text, width in zip(head, line, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def counted(sentences: Iterable[str], named: int = 3) -> list[str]:
    """Sentences that say the same of different names, as one with their number: names are what stands in single quotes.

    Parameters
    ----------
    sentences : iterable of str
    named : int
        So many of the others are named by the first name in them.

    Examples
    --------
    >>> counted(["'a' is not folded: it reads 'x'", "'b' is not folded: it reads 'y'", "no data"])
    ["'a' is not folded: it reads 'x' (and so of 1 more: 'b')", 'no data']
    """
    groups: dict[str, list[str]] = {}
    for sentence in sentences:
        groups.setdefault(_QUOTED.sub("''", sentence), []).append(sentence)
    lines = []
    for first, *others in groups.values():
        names = list(dict.fromkeys(found[0] if (found := _QUOTED.findall(other)) else "" for other in others))
        shown = ", ".join(names[:named]) + (", ..." if len(names) > named else "")
        lines.append(
            f"{first} (and so of {len(others)} more: {shown})" if shown else f"{first} ({len(others) + 1} times)" if others else first
        )
    return lines


def percent(share: float | None) -> str:
    """A share as text: "" for none or not known, "<0.01 %" for what is not nothing, "1.23 %"."""
    if not share:
        return ""
    return "<0.01 %" if share < 1e-4 else f"{100 * share:.2f} %"


def decibel(value: float) -> str:
    """A ratio in dB as text; "" where there is none."""
    return "" if math.isnan(value) else f"{value:.1f}"
