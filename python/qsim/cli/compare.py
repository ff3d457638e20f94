"""Compare two files of encodings, or Q/DQ models, tensor by tensor: what only one of them has, and how far scales and zero points differ.
Exits with 1 if they differ."""

from __future__ import annotations

import argparse
from pathlib import Path

from qsim.cli.choices import number

HELP = "compare two files of encodings, or Q/DQ models"
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A", help="encodings, a calibration cache, or a Q/DQ model")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument("--tensor-names", action="store_true", help="of models of qsim: name tensors, not modules")
    parser.add_argument("--tolerance", type=number, default=0.0, metavar="SHARE", help="difference of a scale that is fine (default: 0)")


def run(options: argparse.Namespace) -> int:
    from qsim.cli.reading import read_encodings
    from qsim.files.difference import difference
    from qsim.table import text_table

    files = [read_encodings(path, options.tensor_names).encodings for path in (options.first, options.second)]
    only = [[name for name in mine if name not in other] for mine, other in (files, files[::-1])]
    rows = []
    for name in (name for name in files[0] if name in files[1]):
        share, what = difference(files[0][name], files[1][name])
        if what or share > options.tolerance:
            rows.append((share, name, what or f"scale differs by {100 * share:.3g} %"))
    rows.sort(key=lambda row: -row[0])
    print(f"{len(files[0].keys() & files[1].keys())} tensors in both, {len(rows)} differ")
    if rows:
        print(text_table(("name", "difference"), [row[1:] for row in rows]))
    for path, names in zip((options.first, options.second), only, strict=True):
        if names:
            print(f"only in {path} ({len(names)}): {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}")
    return int(bool(rows or any(only)))
