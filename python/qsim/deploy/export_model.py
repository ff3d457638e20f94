"""From a simulation to a file: trace, check, translate, write, verify."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from qsim.atomic import write_atomically
from qsim.deploy.export_report import ExportReport
from qsim.deploy.retarget import retarget
from qsim.deploy.tensorrt import commands
from qsim.errors import CalibrationError, ExportError
from qsim.onnx.export_options import Options
from qsim.runs.batches import Forward, iterate
from qsim.runs.sharding import sharded_modules
from qsim.simulation.borders import borders
from qsim.simulation.report_subject import subject_of
from qsim.simulation.simulation import Simulation
from qsim.stages import Stages
from qsim.trace.capture import Program, capture
from qsim.trace.constants import fold_marked
from qsim.trace.idle_slices import drop_idle_slices
from qsim.trace.integer_forms import use_integer_forms
from qsim.trace.mark_uses import MarkUses, objections, per_channel, refusal
from qsim.trace.marks_before_rectifiers import mark_before_rectifiers
from qsim.trace.marks_behind_moves import mark_behind_moves
from qsim.trace.runtimes import Runtime, target_of
from qsim.trace.token_scales import put_scales_behind, with_scale_one


def checked_path(path: str | os.PathLike[str]) -> Path:
    """`path`, if a file can be written there."""
    file = Path(path)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"QuantSim.export: got path={str(path)!r}; there is no folder {str(file.parent)!r}: make it first")
    if file.is_dir():
        raise IsADirectoryError(f"QuantSim.export: got path={str(path)!r}, which is a folder; expected a file, such as 'model.onnx'")
    return file


def check_installed() -> None:
    """Raise an ImportError unless the packages that write ONNX are there."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"QuantSim.export needs {error.name}: pip install qsim[onnx]") from error


class Tracing:
    """A simulation traced for a target, and what that cannot express."""

    def __init__(self, sim: Simulation, target: Runtime, dynamic_shapes: Any = None) -> None:
        if sharded_modules(sim):
            raise ExportError("QuantSim.export: fully_shard holds the weights; load the state into a simulation that is not sharded")
        borders(sim).check()
        self.sim, self.target = sim, target
        self.program: Program = capture(sim, *sim.calls[0], dynamic_shapes)
        fold_marked(self.program.exported)
        drop_idle_slices(self.program.exported.graph)
        self.plain = self.program.copied()  # as it is without the target's marks
        self.quantizers = sim.quantizers()
        if target.tokens:
            put_scales_behind(self.program.exported.graph, self.quantizers)
            self.quantizers = with_scale_one(self.quantizers)
        if target.marks_moves:
            mark_behind_moves(self.program.exported.graph, per_channel(self.quantizers))
            encodings = {key: encoding for key, encoding in sim.encodings().items() if sim.quantizers()[key].enabled}
            mark_before_rectifiers(self.program.exported.graph, sim.encodings())
            use_integer_forms(self.program.exported.graph, encodings)
        self.program.exported.graph_module.recompile()
        self.mark_uses = MarkUses.of(self.program)
        self.objections = objections(self.mark_uses, self.quantizers, sim.weights(), target)


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
    file, wanted = checked_path(path), target_of(target, sim.config.profile)
    if options.dynamic_shapes is not None and not options.dynamic_batch:
        raise ValueError(
            "QuantSim.export: got dynamic_batch=False and dynamic_shapes=; expected one of them: leave the batch out of the latter"
        )
    check_installed()
    seconds, notes = Stages(), list[str]()
    with seconds.stage("trace"):
        traced = Tracing(sim, wanted, options.dynamic_shapes)
    if traced.objections and wanted.name != sim.config.profile.name:
        with seconds.stage("retarget"):
            traced = Tracing(_retargeted(traced, notes), wanted, options.dynamic_shapes)
    args, kwargs = sim.calls[0]
    batches = iterate(verify, None, False, "QuantSim.export") if not isinstance(verify, bool) else [kwargs or args] if verify else None
    return _written(traced, file, options, verify=batches, forward=None if verify is True else forward, seconds=seconds, notes=notes)


def _retargeted(traced: Tracing, notes: list[str]) -> Simulation:
    """The simulation for the target of `traced`, which cannot express it as it is."""
    name, own = traced.target.name, traced.sim.config.profile.name
    try:
        made = retarget(traced.sim, name)
    except CalibrationError as error:
        raise ExportError(f"{refusal(traced.objections, traced.target)}\n{error}") from error
    first, reasons = next(iter(traced.objections.items()))
    notes.append(
        f"simulated for {own!r}, written as sim.retarget({name!r}): {len(traced.objections)} tensors cannot be expressed as they are "
        f"('{first}': {reasons[0]})"
    )
    warnings.warn(
        f"QuantSim.export: the simulation was made for {own!r}, whose results {name} cannot reproduce; the file holds "
        f"sim.retarget({name!r}), whose results differ. Evaluate that, or simulate with target={name!r}",
        stacklevel=4,
    )
    return made


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
    if traced.objections:
        raise ExportError(refusal(traced.objections, target))
    with seconds.stage("translate"):
        released = sim.released()
        quantizers = {key: quantizer for key, quantizer in traced.quantizers.items() if key not in released}
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
