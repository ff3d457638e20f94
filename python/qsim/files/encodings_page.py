"""Encodings of a file as a page, alone or beside those of another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qsim.files.difference import difference
from qsim.files.encoding_file import Entry, role_of
from qsim.numbers.encoding import Encoding
from qsim.pages.chart import Axis, Chart, Series
from qsim.pages.curves import Curves
from qsim.pages.markup import Cell, Column, Fact, Line, name_cell, table, tiles
from qsim.pages.page import Page

_COLUMNS = 100_000  # of the curves of all scales on one page
_FAR = 0.01  # share by which a scale differs that is marked


def encodings_page(
    entries: Mapping[str, Entry],
    about: Sequence[tuple[str, str]],
    beside: Mapping[str, Entry] | None = None,
    more: Mapping[str, str] | None = None,
) -> Page:
    """What a file holds, in its order.

    Parameters
    ----------
    entries : mapping of str to Entry
    about : sequence of (str, str)
        The head of the page: the file, its format.
    beside : mapping of str to Entry, optional
        Of another file: each entry is compared with the one of its name.
    more : mapping of str to str, optional
        Operations that run in float, and why.
    """
    columns = [Column("tensor", wide=True), Column("type"), *(Column(head, number=True) for head in ("scale", "zero point", "min", "max"))]
    columns += [] if beside is None else [Column("scale differs", number=True), Column("beside it", wide=True)]
    most = max(64, _COLUMNS // max(1, len(entries)))
    lines = [_line(name, entry, beside, most) for name, entry in entries.items()]
    facts: list[Fact] = [("encodings", str(sum(entry.encoding is not None for entry in entries.values())))]
    body = ""
    if beside is not None:
        pairs = [(entry.encoding, beside[name].encoding) for name, entry in entries.items() if name in beside]
        differ = [one for one, other in pairs if one is not None and other is not None and difference(one, other) != (0.0, "")]
        missing = [name for name in beside if name not in entries]
        facts += [("in both", str(len(pairs))), ("that differ", str(len(differ))), ("only in the other", str(len(missing)))]
        if missing:
            body = table("Only in the other file", "", [Column("tensor", wide=True)], [Line([name_cell(name)]) for name in missing])
    if more:
        rows = [Line([name_cell(name), Cell(why)]) for name, why in more.items()]
        body += table(
            "In float",
            "Operations that have an integer kernel and run in float.",
            [Column("operation", wide=True), Column("why", wide=True)],
            rows,
        )
    chart = _chart(entries, beside)
    note = "Ranges are what the grid holds; a row with several scales opens them."
    body = tiles(facts) + table("Tensors", note, columns, lines, chart) + body
    return Page("Encodings", "Grids of the tensors of a model", body, about, chart)


def _line(name: str, entry: Entry, beside: Mapping[str, Entry] | None, most: int) -> Line:
    encoding = entry.encoding
    role = role_of(name, entry)
    if encoding is None:
        cells = [name_cell(name, role), Cell(entry.note), *(Cell(value=math.nan) for _ in range(4))]
        return Line([*cells, *([] if beside is None else [Cell(value=math.nan), Cell()])])
    first = name_cell(name, role)
    if encoding.scale.numel() > 1 and isinstance(encoding.axis, int) and encoding.block_size is None:
        first = Cell(markup=first.markup + Curves(f"channel of axis {encoding.axis}", {"scale": encoding.scale}).markup(most))
    spans = (encoding.scale, encoding.zero_point, encoding.min, encoding.max)
    cells = [
        first,
        Cell(encoding.dtype, below=_layout(encoding)),
        *(_span_cell(*(float(end) for end in (t.min(), t.max()))) for t in spans),
    ]
    if beside is None:
        return Line(cells)
    other = beside.get(name)
    if other is None or other.encoding is None:
        return Line([*cells, Cell(value=math.nan), Cell("not in the other file" if other is None else other.note)], severity="warning")
    share, what = difference(encoding, other.encoding)
    far = "error" if math.isinf(share) else "warning" if what or share > _FAR else ""
    shown = Cell("" if math.isinf(share) else f"{100 * share:.3g} %", share, bad=bool(far))
    return Line([*cells, shown, Cell(what)], severity=far)


def _layout(encoding: Encoding) -> str:
    parts = [
        f"axis {encoding.axis}" if encoding.axis is not None else "",
        f"blocks of {encoding.block_size}" if encoding.block_size else "",
    ]
    return ", ".join(filter(None, parts))


def _span_cell(low: float, high: float) -> Cell:
    """One number, or the smallest and the largest of several, by which it is sorted."""
    return Cell(f"{low:.6g}" if low == high else f"{low:.4g} .. {high:.4g}", high)


def _chart(entries: Mapping[str, Entry], beside: Mapping[str, Entry] | None) -> Chart | None:
    names = list(entries)
    places = [i for i, name in enumerate(names) if entries[name].encoding is not None]
    if not places:
        return None
    series = [Series("this file", "inside", [_held(entries[names[i]].encoding) for i in places])]
    if beside is not None:
        others = [beside[names[i]].encoding if names[i] in beside else None for i in places]
        series.append(Series("the other file", "third", [_held(encoding) for encoding in others]))
    axes = Axis("tensor, in the order of the file"), Axis("largest magnitude held", logarithmic=True)
    return Chart("Largest magnitude that each grid holds", *axes, series, places)


def _held(encoding: Encoding | None) -> float:
    return math.nan if encoding is None else max(abs(float(encoding.min.min())), abs(float(encoding.max.max())))
