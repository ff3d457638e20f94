"""Write what a file holds as an HTML page: encodings, calibration caches, Q/DQ models, numeric logs. With --beside, two files of encodings
or models on one page. The page needs no network; nothing in the file is run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qsim.cli.failure import Failure

if TYPE_CHECKING:
    from qsim.pages.page import Page

HELP = "write a page about encodings, Q/DQ models and numeric logs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--beside", type=Path, metavar="OTHER", help="another file, compared with it tensor by tensor")
    parser.add_argument("--output", type=Path, metavar="PAGE.html", help="default: the name of FILE with .html at its end")
    parser.add_argument("--tensor-names", action="store_true", help="of a model of qsim: name tensors, not modules")


def run(options: argparse.Namespace) -> int:
    from qsim.cli.reading import kind_of

    output = options.output or options.file.with_name(f"{options.file.name}.html")
    if output in (options.file, options.beside):
        raise Failure(f"'{output}' would replace what it is about; expected another --output")
    page = _of_log(options) if kind_of(options.file) == "log" else _of_encodings(options)
    page.write(output)
    print(f"wrote {output}")
    return 0


def _of_log(options: argparse.Namespace) -> Page:
    from dataclasses import replace

    from qsim.analysis.numeric_log_file import read_numeric_log

    if options.beside is not None:
        raise Failure(f"'{options.file}' is a numeric log; --beside compares encodings and Q/DQ models")
    return replace(read_numeric_log(options.file).page(), about=[("file", str(options.file))])


def _of_encodings(options: argparse.Namespace) -> Page:
    from qsim.cli.reading import in_float, kind_of, read_encodings
    from qsim.files.encodings_page import encodings_page

    file = read_encodings(options.file, options.tensor_names)
    about = [("file", str(options.file)), ("format", f"{file.format} {file.version}".strip())]
    beside = None
    if options.beside is not None:
        other = read_encodings(options.beside, options.tensor_names)
        about += [("other file", str(options.beside)), ("its format", f"{other.format} {other.version}".strip())]
        beside = other.entries
    floats: dict[str, str] = {}
    if kind_of(options.file) == "onnx":
        from qsim.onnx.open import open_model

        floats = in_float(open_model(options.file))
    return encodings_page(file.entries, about, beside, floats)
