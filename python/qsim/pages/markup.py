"""HTML from values: whatever a name holds, it is text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qsim.pages.chart import Chart

_TAG = re.compile("<[^>]*>")

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
    """One row of a table; the filter searches `text` beside what it shows. `severity`: "error", "warning" or ""."""

    cells: Sequence[Cell]
    text: str = ""
    off: bool = False
    severity: str = ""


def table(title: str, note: str, columns: Sequence[Column], lines: Sequence[Line], chart: Chart | None = None) -> str:
    """A section with a table that can be sorted and filtered, under a chart of its rows. `note` is HTML."""
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
{"" if chart is None else chart.markup()}
<table><thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody></table></section>"""


def _classes(column: Column) -> str:
    return " ".join(name for name in ("number", "ascending", "wide", "left") if getattr(column, name))


def _row(columns: Sequence[Column], line: Line) -> str:
    cells = "".join(_cell(column, cell) for column, cell in zip(columns, line.cells, strict=True))
    shown = _TAG.sub(" ", cells).lower()
    further = " ".join(word for word in dict.fromkeys(line.text.lower().split()) if escape(word) not in shown)
    classes = " ".join(filter(None, ("off" if line.off else "", line.severity)))
    return f"<tr{_attribute('class', classes)}{_attribute('data-text', further)}>{cells}</tr>"


def _cell(column: Column, cell: Cell) -> str:
    classes = " ".join(filter(None, (_classes(column), "bad" if cell.bad else "")))
    value = "" if cell.value is None else f' data-value="{escape(_sortable(cell.value))}"'
    content = cell.markup or escape(cell.text) + (f"<small>{escape(cell.below)}</small>" if cell.below else "")
    return f"<td{_attribute('class', classes)}{value}>{content}</td>"


def _attribute(name: str, text: str) -> str:
    return f' {name}="{escape(text)}"' if text else ""


def _sortable(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.6g}".replace("inf", "Infinity")  # as JavaScript reads it


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
    return f'<span class="name">{breakable}</span>' + (f"<small>{escape(below)}</small>" if below else "")


def name_cell(key: str, below: str = "") -> Cell:
    """A cell with a name, by which it is sorted, and a line under it."""
    return Cell(markup=name(key, below))


def count_cell(count: int) -> Cell:
    """A number of things that should not be."""
    return Cell(str(count or ""), count, bad=count > 0)


def finite(value: float) -> float:
    """`value`, or 0 where it is NaN or Inf: the length of a bar."""
    return value if math.isfinite(value) else 0.0
