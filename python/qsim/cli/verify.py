"""Run a Q/DQ model in ONNX Runtime on batches, with all of its optimisations and with none, and compare; and beside a float model. Tells
which operations did not become integer kernels, and why. Exits with 1 if results differ by more than --tolerance steps, or are further
from the reference than --sqnr."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsim.cli.choices import number
from qsim.cli.failure import Failure

if TYPE_CHECKING:
    from qsim.cli.arrays import Array
    from qsim.deploy.verification import Verification

HELP = "run a Q/DQ model in ONNX Runtime and compare"
_REFERENCE = "reference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="BATCH.npz", help="one array for each input, by its name or in order"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="cut the arrays into batches (default: a file is one batch)")
    parser.add_argument("--reference", type=Path, metavar="FLOAT.onnx", help="a model with the same inputs and outputs to compare with")
    parser.add_argument(
        "--tolerance", type=number, default=0.0, metavar="STEPS", help="difference of the two graphs that is fine (default: 0)"
    )
    parser.add_argument("--sqnr", type=number, metavar="DB", help="what the outputs must keep beside the reference")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    if options.sqnr is not None and options.reference is None:
        raise Failure("--sqnr compares with a reference; expected --reference FLOAT.onnx")
    from qsim.deploy.verify import verify
    from qsim.onnx.open import open_proto

    for path in filter(None, (options.model, options.reference)):
        open_proto(path)  # bounds and tensors outside the folder, before anything else opens it
    result = verify(options.model, _runs(options))
    print(json.dumps(_fields(result), indent=1, allow_nan=False) if options.json else result)
    if not result.differences and not options.json:
        print("nothing was compared: the model is for a runtime that is not here; give --reference")
    failures = list(_failures(result, options))
    if failures and not options.json:
        print("\n".join(failures))
    return int(bool(failures))


def _runs(options: argparse.Namespace) -> Iterator[tuple[Mapping[str, Array], Mapping[str, Sequence[Array]]]]:
    from qsim.cli.onnx_inputs import InputBatches
    from qsim.onnx.sessions import session

    taken = session(options.model, optimised=False)
    reference = None if options.reference is None else session(options.reference, optimised=True)
    if reference is not None and len(reference.get_outputs()) != len(taken.get_outputs()):
        raise Failure(f"the reference has {len(reference.get_outputs())} outputs, the model {len(taken.get_outputs())}; expected as many")
    for inputs in InputBatches(options.data, options.batch_size, taken.get_inputs()):
        if reference is None:
            yield inputs, {}
            continue
        renamed = dict(zip([value.name for value in reference.get_inputs()], inputs.values(), strict=True))
        yield inputs, {_REFERENCE: reference.run(None, renamed)}


def _failures(result: Verification, options: argparse.Namespace) -> Iterator[str]:
    """A sentence for each comparison that is worse than was asked for."""
    for (mine, other), outputs in result.differences.items():
        for name, found in outputs.items():
            if mine != _REFERENCE and found.mismatching and found.largest > options.tolerance:
                yield (
                    f"'{name}': {found.mismatching} of {found.elements} integers differ, {mine} to {other}, by up to {found.largest:g} "
                    f"steps; --tolerance is {options.tolerance:g}"
                )
            if mine == _REFERENCE and options.sqnr is not None and not found.sqnr >= options.sqnr:
                yield f"'{name}' ({other}) has {found.sqnr:.1f} dB beside the reference; --sqnr asks for {options.sqnr:g}"


def _fields(result: Verification) -> dict[str, Any]:
    compared = [
        {
            "compared": [mine, other],
            "output": name,
            "elements": d.elements,
            "top1": d.top1,
            "mismatching": d.mismatching,
            "largest": _number(d.largest),
            "step": d.step,
            "sqnr": _number(d.sqnr),
        }
        for (mine, other), outputs in result.differences.items()
        for name, d in outputs.items()
    ]
    return {"onnxruntime": result.version, "differences": compared, "in_float": result.in_float}


def _number(value: float) -> float | str:
    """JSON has neither NaN nor Inf."""
    return value if math.isfinite(value) else str(value)
