"""Quantize a float ONNX model for a runtime: observed on data in ONNX Runtime, ranges by qsim's methods, written with QuantizeLinear and
DequantizeLinear, and compared with the float model on the same data. Exits with 1 if its outputs are further from it than --sqnr."""

from __future__ import annotations

import argparse
from pathlib import Path

from qsim.cli.choices import number, one_of
from qsim.cli.failure import Failure

HELP = "quantize a float ONNX model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="FLOAT.onnx")
    parser.add_argument("--output", type=Path, required=True, metavar="OUT.onnx", help="replaced as a whole, or left as it was")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="BATCH.npz", help="one array for each input, by its name or in order"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="cut the arrays into batches (default: a file is one batch)")
    parser.add_argument(
        "--target",
        type=one_of("qsim.onnx_ptq.quantize_onnx", "ONNX_TARGETS"),
        default="onnxruntime",
        metavar="RUNTIME",
        help="onnxruntime (the default)",
    )
    parser.add_argument(
        "--method",
        type=one_of("qsim.numbers.range_methods", "SEARCHES"),
        metavar="METHOD",
        help="how ranges are chosen, as in qsim.TensorSpec(method=); tf_enhanced by default",
    )
    parser.add_argument("--sqnr", type=number, metavar="DB", help="what every output must keep beside the float model")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    if options.output.resolve() == options.model.resolve():
        raise Failure(f"--output '{options.output}' is the float model; expected another file")
    if not options.output.parent.is_dir():
        raise Failure(f"there is no folder '{options.output.parent}': make it first")
    from qsim.cli.onnx_inputs import InputBatches
    from qsim.onnx.open import open_proto
    from qsim.onnx.sessions import session
    from qsim.onnx_ptq.quantize_onnx import quantize_onnx

    open_proto(options.model)  # bounds and tensors outside the folder, before anything else opens it
    data = InputBatches(options.data, options.batch_size, session(options.model).get_inputs())
    report = quantize_onnx(options.model, data, options.output, options.target, method=options.method, progress=not options.quiet)
    print(report)
    worst = report.worst
    if options.sqnr is not None and not worst >= options.sqnr:
        print(f"an output has {worst:.1f} dB beside the float model; {options.sqnr:g} were asked for")
        return 1
    return 0
