"""From a simulation to a file: trace, check, translate, write, verify."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qsim.atomic import write_atomically
from qsim.deploy.export_report import ExportReport
from qsim.deploy.tensorrt import commands
from qsim.deploy.tracing import Tracing, traced_for
from qsim.onnx.export_options import Options
from qsim.runs.batches import Forward, iterate
from qsim.runs.report_subject import subject_of
from qsim.runs.snapshot import without_autocast
from qsim.simulation.simulation import Simulation
from qsim.stages import Stages
from qsim.trace.runtimes import Runtime, target_of
from qsim.warning import warn

# Endings of files that are written here, or by other tools from those.
_ENDINGS = (".onnx", ".pte", ".pt", ".pth", ".pt2", ".engine", ".plan", ".trt", ".xml", ".mlmodel", ".mlpackage", ".tflite")


def checked_path(path: str | os.PathLike[str]) -> Path:
    """`path`, if a file can be written there."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"QuantSim.export: got path={type(path).__name__}; expected a file's name, such as sim.export('model.onnx')")
    file = Path(path)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"QuantSim.export: got path={str(path)!r}; there is no folder {str(file.parent)!r}: make it first")
    if file.is_dir():
        raise IsADirectoryError(f"QuantSim.export: got path={str(path)!r}, which is a folder; expected a file, such as 'model.onnx'")
    return file


def check_installed(extra: str = "onnx", modules: Sequence[str] = ("onnx", "onnxscript")) -> None:
    """Raise an ImportError unless the packages of an extra are there."""
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise ImportError(f"QuantSim.export needs {error.name}: pip install qsim[{extra}]") from error


def _check(target: Runtime, options: Options, file: Path) -> None:
    """Raise an error unless the packages that write for a target are there, it has what `options` ask for, and `file` is named so."""
    own = ".onnx" if target.reads_onnx else ".pte"
    if file.suffix in _ENDINGS and file.suffix != own:
        raise ValueError(f"QuantSim.export: got path={str(file)!r} for {target.name!r}; expected a name such as 'model{own}'")
    if target.reads_onnx:
        check_installed()
        return
    check_installed("executorch", ["executorch"])
    given = {name: getattr(options, name) for name in ("opset", "input_names", "output_names", "external_data")}
    refused = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if refused:
        raise ValueError(f"QuantSim.export: got {', '.join(refused)} for {target.name!r}, which reads no ONNX: leave them out")


@without_autocast()
def export(
    sim: Simulation,
    path: str | os.PathLike[str],
    target: str | None,
    options: Options,
    *,
    verify: Iterable[Any] | bool,
    forward: Forward | None = None,
) -> ExportReport:
    """`QuantSim.export` documents it."""
    file, wanted = checked_path(path), target_of(target, sim.config)
    if options.dynamic_shapes is not None and not options.dynamic_batch:
        raise ValueError(
            "QuantSim.export: got dynamic_batch=False and dynamic_shapes=; expected one of them: leave the batch out of the latter"
        )
    _check(wanted, options, file)
    seconds, notes = Stages(), list[str]()
    traced = traced_for(sim, wanted, options.dynamic_shapes, seconds, notes)
    args, kwargs = sim.calls[0]
    batches = iterate(verify, None, False, "QuantSim.export") if not isinstance(verify, bool) else [kwargs or args] if verify else None
    write = _written
    if not wanted.reads_onnx:
        from qsim.deploy.export_program import export_program as write
    return write(traced, file, options, verify=batches, forward=None if verify is True else forward, seconds=seconds, notes=notes)


def _written(
    traced: Tracing,
    file: Path,
    options: Options,
    *,
    verify: Iterable[Any] | None,
    forward: Forward | None,
    seconds: Stages,
    notes: list[str],
) -> ExportReport:
    """Write a simulation that was traced."""
    from qsim.onnx import file as onnx_file
    from qsim.onnx import lint, openvino_sessions, sessions
    from qsim.onnx import model as onnx_model

    sim, target = traced.sim, traced.target
    with seconds.stage("translate"):
        quantizers = traced.written()
        built = onnx_model.build(traced.program, traced.mark_uses, quantizers, target, options)
    with seconds.stage("write"):
        large = onnx_model.size_of(built.model) > onnx_file.LARGE
        files = onnx_file.write(built.model, file, external_data=large if options.external_data is None else options.external_data)
        if built.fallback and target.name == "tensorrt":
            files.append(file.with_name(f"{file.name}.trtexec"))
            write_atomically(files[-1], commands(file.name, built.fallback).encode())
    verification = None
    if verify is not None:
        from qsim.deploy import times
        from qsim.deploy.verify import verify_simulation

        with seconds.stage("verify"):
            write_float = partial(times.write_float, traced.plain, traced.mark_uses, quantizers, target, options)
            verification = verify_simulation(sim, file, verify, built.model, write_float, forward)
    elif not large and find_spec("onnxruntime") is not None:
        from qsim.deploy.verify import tried

        with seconds.stage("run"):
            said = tried(sim, file, built.model)
        if said:
            warn(f"QuantSim.export: {said}. See what differs with verify=True, and leave the operation in float or out of the file")
            notes.append(said)
    sizes = {written: written.stat().st_size for written in files}
    session_options, more = dict[str, str](), list[str]()
    if target.name == "onnxruntime":
        session_options, more = sessions.entries(built.model)
    elif target.name == "openvino":
        more = openvino_sessions.notes(built.model)
    linted = lint.lint(built.model, target.name)
    opset = built.model.opset_imports[""]
    notes = [*notes, *built.notes, *more]
    about = subject_of(sim.model, sim.config)
    return ExportReport(
        *(file, target.name, opset, sizes, dict(seconds), built.names, notes, linted, verification, built.fallback, session_options),
        subject=about,
    )
