"""From a simulation to a file: trace, check, translate, write, verify."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsim.deploy.borders import borders
from qsim.deploy.capture import Program, capture
from qsim.deploy.carry import carry_marks
from qsim.deploy.constants import fold_marked
from qsim.deploy.export_report import ExportReport
from qsim.deploy.hoist import hoist_marks
from qsim.deploy.marked import Marked, objections, per_channel, refusal
from qsim.deploy.targets import Target
from qsim.deploy.tensorrt import commands
from qsim.errors import ExportError
from qsim.files.atomic import write_atomically
from qsim.sim.sharding import sharded_modules
from qsim.stages import Stages

if TYPE_CHECKING:
    from qsim.deploy.onnx_model import Options
    from qsim.sim.export import Export


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

    def __init__(self, sim: Export, target: Target) -> None:
        if sharded_modules(sim):
            raise ExportError("QuantSim.export: fully_shard holds the weights; load the state into a simulation that is not sharded")
        borders(sim).check()
        self.sim, self.target = sim, target
        self.program: Program = capture(sim, *sim._calls[0])
        fold_marked(self.program.exported)
        if target.carries:
            carry_marks(self.program.exported.graph, per_channel(sim.quantizers()))
            hoist_marks(self.program.exported.graph, sim.encodings())
            self.program.exported.graph_module.recompile()
        self.marked = Marked.of(self.program)
        self.objections = objections(self.marked, sim.quantizers(), sim._weights(), target)


def export(
    traced: Tracing,
    file: Path,
    options: Options,
    *,
    external_data: bool | None,
    verify: Iterable[Any] | None,
    seconds: Stages,
    notes: list[str],
) -> ExportReport:
    """Write a simulation that was traced. `QuantSim.export` documents the rest."""
    from qsim.deploy import lint, onnx_file, onnx_model

    sim, target = traced.sim, traced.target
    if traced.objections:
        raise ExportError(refusal(traced.objections, target))
    with seconds.stage("translate"):
        released = sim._released()
        quantizers = {key: quantizer for key, quantizer in sim.quantizers().items() if key not in released}
        built = onnx_model.build(traced.program, traced.marked, quantizers, target, options)
    with seconds.stage("write"):
        large = onnx_model.size_of(built.model) > onnx_file.LARGE
        files = onnx_file.write(built.model, file, external_data=large if external_data is None else external_data)
        if built.fallback and target.name == "tensorrt":
            files.append(file.with_name(f"{file.name}.trtexec"))
            write_atomically(files[-1], commands(file.name, built.fallback).encode())
    verification = None
    if verify is not None:
        from qsim.deploy.verify import verify_simulation

        with seconds.stage("verify"):
            verification = verify_simulation(sim, file, verify)
    sizes = {written: written.stat().st_size for written in files}
    linted = lint.lint(built.model, target.name)
    opset = built.model.opset_imports[""]
    notes = [*notes, *built.notes]
    return ExportReport(file, target.name, opset, sizes, dict(seconds), built.names, notes, linted, verification, built.fallback)
