"""Convert encodings from one format into another: files of qsim, AIMET and TensorRT (calibration caches), and out of Q/DQ ONNX models; and
folders with packed weights (GPTQ, AWQ, compressed-tensors, FP8) into each other.
With --model, turn a calibration cache and the float ONNX model that it was made for into a Q/DQ model, which TensorRT 11 takes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from qsim.cli.choices import one_of
from qsim.cli.failure import Failure

HELP = "convert encodings and packed weights between formats, and calibration caches to Q/DQ models"
_MODEL = ".onnx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="IN", help="encodings, a calibration cache, a Q/DQ model, or a folder with packed weights"
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="replaced as a whole, or left as it was; .onnx needs --model")
    parser.add_argument(
        "--format",
        type=one_of("qsim.cli.writable_formats", "WRITABLE_FORMATS"),
        metavar="FORMAT",
        help="of OUT: qsim, aimet-0.6.1, aimet-1.0.0, aimet-2.0.0, aimet-2.1.0 or tensorrt-cache (default: by its ending); "
        "of a folder compressed-tensors (the default), fp8, gptq, gptq_v2 or awq",
    )
    parser.add_argument("--model", type=Path, metavar="FLOAT.onnx", help="the float model that a calibration cache was made for")
    parser.add_argument("--without", action="append", default=[], metavar="GLOB", help="leave out entries of these names; may be repeated")
    parser.add_argument("--tensor-names", action="store_true", help="from a model of qsim: name tensors, not modules")
    parser.add_argument("--cache-version", metavar="VERSION", help="of TensorRT, in the first line of a cache: 8501, 10300 ...")


def run(options: argparse.Namespace) -> int:
    if options.input.is_dir():
        return _convert_weights(options)
    _check(options)
    from qsim.cli.reading import read_encodings
    from qsim.files import save_encodings

    file = read_encodings(options.input, options.tensor_names).without(*options.without)
    if options.model is not None:
        from qsim.onnx.from_cache import onnx_from_cache

        print(onnx_from_cache(file, options.model, options.output))
        return 0
    format = options.format or ("tensorrt-cache" if options.output.suffix == ".cache" else "qsim")
    if options.cache_version is not None:
        extra = file.extra if file.format == format else {}
        file = replace(file, format=format, version=options.cache_version, extra=extra)
    save_encodings(file, options.output, format)
    count = len(file.activations if format == "tensorrt-cache" else file.entries)
    print(f"wrote {count} encoding{'s' * (count != 1)} as {format}")
    return 0


def _convert_weights(options: argparse.Namespace) -> int:
    from qsim.checkpoints import CHECKPOINT_FORMATS, load_checkpoint, save_checkpoint

    format = options.format or "compressed-tensors"
    if (
        format not in CHECKPOINT_FORMATS
        or options.model is not None
        or options.without
        or options.tensor_names
        or options.cache_version is not None
    ):
        raise Failure(
            f"'{options.input}' is a folder with packed weights; expected --format {', '.join(CHECKPOINT_FORMATS)}, and no other option"
        )
    checkpoint = load_checkpoint(options.input)
    save_checkpoint(checkpoint, options.output, format)
    count = len(checkpoint.weights)
    print(f"wrote {count} weight{'s' * (count != 1)} as {format}")
    return 0


def _check(options: argparse.Namespace) -> None:
    model = options.output.suffix == _MODEL
    if model and options.model is None:
        raise Failure(f"'{options.output}' is to be a model: give the float model with --model, and a calibration cache as IN")
    if options.model is not None and (not model or options.format is not None):
        raise Failure(f"--model makes a Q/DQ model; expected OUT to end in {_MODEL}, and no --format")
    if not options.output.parent.is_dir():
        raise Failure(f"there is no folder '{options.output.parent}': make it first")
    cache = options.format == "tensorrt-cache" or (options.format is None and options.output.suffix == ".cache")
    if options.cache_version is not None and not cache:
        raise Failure("--cache-version is the first line of a calibration cache; expected --format tensorrt-cache")
