"""Show what a file holds: encodings of qsim, AIMET or TensorRT (calibration caches), Q/DQ ONNX models of any tool, logs of
qsim.numeric_log. The content tells the kind of file. Nothing in it is run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsim.cli.choices import one_of

if TYPE_CHECKING:
    from torch import Tensor

    from qsim.analysis.numeric_log_file import NumericLog
    from qsim.files import Entry

HELP = "show encodings, calibration caches, Q/DQ models and numeric logs"
_COLUMNS = ("name", "role", "type", "scale", "zero point", "min", "max", "axis", "block")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")
    parser.add_argument("--tensor-names", action="store_true", help="of a model of qsim: name tensors, not modules")
    parser.add_argument(
        "--target",
        type=one_of("qsim.trace.runtimes", "ONNX_RUNTIMES"),
        metavar="RUNTIME",
        help="of a model, by whose rules to say what runs in float: onnxruntime, tensorrt, openvino, coreml (default: its own)",
    )


def run(options: argparse.Namespace) -> int:
    from qsim.analysis.numeric_log_file import read_numeric_log
    from qsim.cli.reading import kind_of
    from qsim.table import text_table

    kind = kind_of(options.file)
    if kind == "log":
        log = read_numeric_log(options.file)
        print(json.dumps(_log(log), indent=1, allow_nan=False) if options.json else log)
        return 0
    facts, entries = _model(options) if kind == "onnx" else _file(options.file)
    if options.json:
        print(json.dumps({**facts, "entries": {name: _fields(entry) for name, entry in entries.items()}}, indent=1, allow_nan=False))
        return 0
    lists = {name: value for name, value in facts.items() if isinstance(value, Mapping)}
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value and name not in lists))
    if entries:
        print(text_table(_COLUMNS, [_row(name, entry) for name, entry in entries.items()], _COLUMNS[3:7]))
    for title, lines in lists.items():
        if lines:
            print("\n".join([f"{title.replace('_', ' ')} ({len(lines)}):", *(f"  {name}: {why}" for name, why in lines.items())]))
    return 0


def _file(path: Path) -> tuple[dict[str, Any], Mapping[str, Entry]]:
    from qsim.files import load_encodings

    file = load_encodings(path)
    extra = ", ".join(sorted(file.extra))
    return {"format": file.format, "version": file.version, "encodings": len(file.entries), "also": extra}, file.entries


def _model(options: argparse.Namespace) -> tuple[dict[str, Any], Mapping[str, Entry]]:
    from qsim.cli.reading import in_float
    from qsim.files.file_place import FilePlace
    from qsim.onnx.encodings import encodings_of
    from qsim.onnx.open import open_model

    model = open_model(options.file)
    file = encodings_of(model, FilePlace(str(options.file)), tensor_names=options.tensor_names)
    facts = {
        "format": "onnx",
        "opset": file.version,
        "made by": " ".join(filter(None, [model.producer_name, model.producer_version])),
        "target": model.metadata_props.get("qsim.target") or "",
        "nodes": len(model.graph),
        "encodings": len(file.entries),
        "in_float": in_float(model, options.target),
    }
    return facts, file.entries


def _fields(entry: Entry) -> dict[str, Any]:
    return {"role": entry.role, "note": entry.note, **({} if entry.encoding is None else entry.encoding.to_dict())}


def _row(name: str, entry: Entry) -> list[str]:
    encoding = entry.encoding
    if encoding is None:
        return [name, entry.role or "", entry.note, *[""] * 6]
    layout = ["" if part is None else str(part) for part in (encoding.axis, encoding.block_size)]
    numbers = [_span(t) for t in (encoding.scale, encoding.zero_point, encoding.min, encoding.max)]
    return [name, entry.role or "", encoding.dtype, *numbers, *layout]


def _span(values: Tensor) -> str:
    """One number, or the smallest and the largest of several."""
    low, high = float(values.min()), float(values.max())
    return f"{low:.6g}" if low == high else f"{low:.4g} .. {high:.4g}"


def _log(log: NumericLog) -> dict[str, Any]:
    """As JSON, which has no NaN: None."""
    columns = ("steps", "min", "max", "rms", "nans", "infs")
    layers = {name: {column: [_finite(v) for v in getattr(log[name], column)] for column in columns} for name in log.layers}
    return {
        "format": "qsim-numeric-log",
        "steps": log.steps,
        "training": log.training,
        "first_nonfinite": log.first_nonfinite,
        "layers": layers,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
