"""HTML from values: whatever a name holds, it is text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Fact = tuple[str, str] | tuple[str, str, str]  # a title, a figure, and more about it


@dataclass(frozen=True)
class Column:
    """Head of a column. Numbers are aligned to the right unless `left`, and sorted as numbers, first the largest unless `ascending`;
    a `wide` one takes a line of its own where the screen is narrow."""

    head: str
    number: bool = False
    ascending: bool = False
    wide: bool = False
    left: bool = False


@dataclass(frozen=True)
class Cell:
    """What a cell shows, small text `below` it (`markup` in place of both is HTML already), and what it is sorted by if not by the text."""

    text: str = ""
    value: float | str | None = None
    markup: str = ""
    below: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Line:
    """One row of a table; `text` is what the filter searches."""

    cells: Sequence[Cell]
    text: str
    off: bool = False


def table(title: str, note: str, columns: Sequence[Column], lines: Sequence[Line]) -> str:
    """A section with a table that can be sorted and filtered. `note` is HTML."""
    heads = "".join(f'<th class="{_classes(column)}" scope="col"><button>{escape(column.head)}</button></th>' for column in columns)
    ways = "".join(
        f'<option value="{i} {way}">{escape(column.head)} {arrow}</option>'
        for i, column in enumerate(columns)
        for way, arrow in (("up", "&uarr;"), ("down", "&darr;"))
    )
    body = "\n".join(_row(columns, line) for line in lines)
    return f"""<section class="table">
<div class="tools"><h2>{escape(title)}</h2><p>{note}</p>
<input type="search" placeholder="filter" aria-label="filter {escape(title)}">
<select aria-label="sort {escape(title)}"><option value="">sort by</option>{ways}</select><output></output></div>
<table><thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody></table></section>"""


def _classes(column: Column) -> str:
    return " ".join(name for name in ("number", "ascending", "wide", "left") if getattr(column, name))


def _row(columns: Sequence[Column], line: Line) -> str:
    cells = "".join(_cell(column, cell) for column, cell in zip(columns, line.cells, strict=True))
    return f'<tr data-text="{escape(line.text.lower())}"{" class=off" if line.off else ""}>{cells}</tr>'


def _cell(column: Column, cell: Cell) -> str:
    classes = " ".join(filter(None, (_classes(column), "bad" if cell.bad else "")))
    value = "" if cell.value is None else f' data-value="{escape(_sortable(cell.value))}"'
    content = cell.markup or escape(cell.text) + (f"<small>{escape(cell.below)}</small>" if cell.below else "")
    head = f' data-head="{escape(column.head)}"' if content and not column.wide else ""
    kind = f' class="{classes}"' if classes else ""
    return f"<td{kind}{value}{head}>{content}</td>"


def _sortable(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.8g}".replace("inf", "Infinity")  # as JavaScript reads it


def tiles(facts: Sequence[Fact]) -> str:
    """Large figures under small titles, some with a line below."""
    return f'<dl class="tiles">{"".join(map(_tile, facts))}</dl>'


def _tile(fact: Fact) -> str:
    title, figure, *below = map(escape, fact)
    return f"<div><dt>{title}</dt><dd>{figure}</dd>{''.join(f'<dd><small>{line}</small></dd>' for line in below)}</div>"


def problems(found: Sequence[str]) -> str:
    """A list of problems, folded up if it is long; nothing if there are none."""
    if not found:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in found)
    few = " open" if len(found) <= 12 else ""
    return f'<section class="problems"><details{few}><summary>{len(found)} to look at</summary><ul>{items}</ul></details></section>'


def name(key: str, below: str) -> str:
    """A quantizer's name, and a line under it."""
    breakable = escape(key).replace(".", ".<wbr>")
    return f'<span class="name">{breakable}</span><small>{escape(below)}</small>'


def count_cell(count: int) -> Cell:
    """A number of things that should not be."""
    return Cell(str(count or ""), count, bad=count > 0)


def finite(value: float) -> float:
    """`value`, or 0 where it is NaN or Inf: the length of a bar."""
    return value if math.isfinite(value) else 0.0
