"""Measured rows as text: lines for the terminal, tables for docs/performance.md.

python benchmarks/report.py bench.json docs/performance.md    # writes the tables between the document's markers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PEERS = (  # compute something
    "torch core",
    "torch.compile",
    "torch formula",
    "cast there and back",
    "HistogramObserver",
    "aminmax",
    "aminmax of the axis",
    "mul",
    "add",
)


def title(operator: str, case: str, dtype: str) -> str:
    return f"{operator}: {case}, {dtype}"


def size(row: Row) -> str:
    n = row["elements"]
    return f"2^{n.bit_length() - 1}" if n > 1 and n & (n - 1) == 0 else f"{n:,}"


def ratios(row: Row) -> str:
    return ", ".join(f"{value:.3g} {name}" for name, value in row["ratios"].items())


def time(row: Row) -> str:
    each = row["ns_per_element"]
    return f"{each:.3g} ns" if each < 1e3 else f"{each / 1e3:.3g} us"


def speed(row: Row) -> str:
    return f"{row['gb_per_s']:.1f}" if row["gb_per_s"] else ""


def bar(found: Row) -> str:
    sign, verdict = ("<=", "met") if found["met"] else (">", "MISSED")
    return f"{found['against']} {found['value']:.3g} {sign} {found['limit']:.3g} {verdict}"


def line(row: Row) -> str:
    what = title(row["operator"], row["case"], row["dtype"])
    rate = f"{speed(row)} GB/s" if row["gb_per_s"] else ""
    bars = f"   [{'; '.join(bar(found) for found in row['bars'])}]" if row["bars"] else ""
    return f"{what:58} {size(row):>10} x{row['threads']} {time(row):>9} {rate:>11}   {ratios(row)}{bars}"


def bars_of(rows: list[Row]) -> Iterator[str]:
    found = [(row, one) for row in rows for one in row["bars"]]
    yield f"\n{sum(one['met'] for _, one in found)} of {len(found)} bars met; not met:"
    for row, one in found:
        if not one["met"]:
            yield f"  {title(row['operator'], row['case'], row['dtype'])}, {size(row)} x{row['threads']}: {bar(one)}"


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    for cells in [header, ["---"] * len(header), *rows]:
        yield "| " + " | ".join(cells) + " |"


def what(row: Row) -> list[str]:
    return [row["case"], row["dtype"], size(row), str(row["threads"])]


def markdown(machine: dict[str, Any], rows: list[Row]) -> Iterator[str]:
    yield f"Run of {machine['date']}: {machine['cpu']}, {machine['cores']} cores, CPU level {machine['level']},"
    yield f"torch {machine['torch']}, Python {machine['python']}."
    yield "A ratio is our time over theirs: below 1 we are faster."
    yield ""
    yield "### Bars"
    yield ""
    bars = [
        [row["operator"], *what(row), one["against"], f"{one['limit']:.3g}", f"{one['value']:.3g}", "yes" if one["met"] else "**no**"]
        for row in rows
        for one in row["bars"]
    ]
    yield from table(["operator", "case", "dtype", "size", "threads", "against", "at most", "measured", "met"], bars)
    for operator, group in groupby(sorted(rows, key=lambda row: row["operator"]), key=lambda row: row["operator"]):
        yield ""
        yield f"### {operator}"
        yield ""
        cells = [[*what(row), time(row), speed(row), ratios(row)] for row in group]
        yield from table(["case", "dtype", "size", "threads", "per element", "GB/s", "ratio to"], cells)
    yield ""
    yield "### Where a peer is as fast or faster"
    yield ""
    slower = [
        [row["operator"], *what(row), name, f"{value:.2f}"]
        for row in rows
        for name, value in row["ratios"].items()
        if name in PEERS and value >= 0.95
    ]
    yield from table(["operator", "case", "dtype", "size", "threads", "peer", "ratio"], slower)


def write(document: Path, measured: Row) -> None:
    before, _, rest = document.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    lines = "\n".join(markdown(measured["machine"], measured["rows"]))
    document.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}")


if __name__ == "__main__":
    write(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text()))
