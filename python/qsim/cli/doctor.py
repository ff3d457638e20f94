"""Find where NaN, Inf and lost accuracy come from when a model runs on a target. THIS RUNS CODE: the package is imported from the current
folder, and its function is called; it returns the model, or a tuple (model, example_inputs). Exits with 1 if errors were found."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsim.cli.choices import number, one_of
from qsim.cli.failure import Failure

if TYPE_CHECKING:
    import torch
    from torch import nn

HELP = "find where NaN, Inf and lost accuracy come from (runs the package that is named)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", metavar="PACKAGE.MODULE:FUNCTION", help="imported from the current folder and called without arguments")
    parser.add_argument(
        "--data", type=Path, nargs="+", metavar="FILE.npz", help="arrays by the names of forward's arguments, or in their order"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="cut the arrays into batches (default: a file is one batch)")
    parser.add_argument(
        "--target",
        type=one_of("qsim.clinic", "TARGETS"),
        default="float32",
        metavar="TARGET",
        help="float32 (the default), bf16, tensorrt-fp16, onnxruntime-fp16, coreml-fp16; in int8: onnxruntime, tensorrt, openvino, coreml, "
        "executorch",
    )
    parser.add_argument("--max-batches", type=int, metavar="N", help="by default all of the data")
    parser.add_argument("--seconds", type=number, metavar="S", help="what may be spent")
    parser.add_argument("--probes", type=int, metavar="N", help="executions in half precision that may be spent")
    parser.add_argument("--sqnr", type=number, metavar="DB", help="what the output must keep beside float32")
    parser.add_argument("--save-input", type=Path, metavar="FILE.pt", help="where the smallest input that makes NaN or Inf is written")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="write the diagnosis as a page too")
    parser.add_argument("--plan", type=Path, metavar="FOLDER", help="write what to keep in float32, as tools that build engines take it")
    parser.add_argument("--onnx", type=Path, metavar="FLOAT.onnx", help="the exported model, for the files of --plan that name its nodes")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    if options.onnx is not None and options.plan is None:
        raise Failure("--onnx is for the files of a plan; expected --plan FOLDER beside it")
    from qsim.clinic import TARGETS, doctor

    if options.plan is not None and TARGETS[options.target].format is None:
        raise Failure(
            f"--plan says what half precision needs in float32, and {options.target!r} runs nothing in it; choose another --target"
        )
    model, example = _built(options.build)
    if options.data is None and example is None:
        raise Failure(f"nothing to run the model on: give --data, or let {options.build} return (model, example_inputs)")
    data = [example] if options.data is None else _Batches(options, model)
    diagnosis = doctor(
        model,
        data,
        options.target,
        max_batches=options.max_batches,
        seconds=options.seconds,
        probes=options.probes,
        sqnr=options.sqnr,
        save_input=options.save_input,
        progress=not options.quiet,
    )
    written = None
    if options.html is not None:
        diagnosis.save(options.html)
    if options.plan is not None and diagnosis.plan is not None:
        written = diagnosis.plan.write(options.plan, options.onnx, None if options.onnx is None else next(iter(data)))
    print(diagnosis.to_json() if options.json else diagnosis)
    if written is not None and not options.json:
        print(f"written:\n{written}")
    return int(any(finding.severity == "error" for finding in diagnosis.findings))


def _built(name: str) -> tuple[nn.Module, Any]:
    """The model, and its example inputs if there are any."""
    package, separator, function = name.partition(":")
    if not (separator and package and function):
        raise Failure(f"got {name!r}; expected package.module:function, such as networks.resnet:build")
    sys.path.insert(0, os.getcwd())
    try:
        try:
            build = getattr(importlib.import_module(package), function, None)
        finally:
            sys.path.remove(os.getcwd())
    except Exception as error:
        raise Failure(f"importing {package!r} failed: {type(error).__name__}: {error}") from error
    if not callable(build):
        raise Failure(f"{package!r} has no function {function!r}")
    try:
        made = build()
    except Exception as error:
        raise Failure(f"{name} failed: {type(error).__name__}: {error}") from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    from torch import nn

    if not isinstance(model, nn.Module):
        raise Failure(f"{name} returned {type(model).__name__}; expected a module, or a tuple (module, example_inputs)")
    return model, example


class _Batches:
    """What `qsim.doctor` takes: read again whenever it goes through them, one file at a time."""

    def __init__(self, options: argparse.Namespace, model: nn.Module) -> None:
        self._files, self._size = options.data, options.batch_size
        self._arguments = inspect.signature(model.forward).parameters

    def __iter__(self) -> Iterator[Any]:
        import torch

        from qsim.cli.arrays import batches, read_npz
        from qsim.files.file_place import FilePlace

        for path in self._files:
            for arrays in batches(read_npz(path), self._size, FilePlace(str(path))):
                yield self._batch({name: torch.from_numpy(array) for name, array in arrays.items()})

    def _batch(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """By name if these are names of arguments; in order otherwise."""
        if set(tensors) <= set(self._arguments):
            return dict(tensors)
        values = tuple(tensors.values())
        return values[0] if len(values) == 1 else values
