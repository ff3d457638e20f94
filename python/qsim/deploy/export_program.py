"""From a traced simulation to a program for ExecuTorch's XNNPACK backend: lower, run, write, verify."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from qsim.atomic import write_atomically
from qsim.deploy.export_report import ExportReport
from qsim.deploy.tracing import Tracing, traced_for
from qsim.deploy.verify_program import compared, inputs_of, verify_program
from qsim.errors import ExportError
from qsim.executorch.program_file import lower
from qsim.executorch.quantized_graph import quantized_graph
from qsim.executorch.session import ExecutorchSession, version
from qsim.integer.programs import returned
from qsim.onnx.export_options import Options
from qsim.runs.batches import Forward
from qsim.runs.report_subject import subject_of
from qsim.runs.snapshot import without_autocast
from qsim.simulation.simulation import Simulation
from qsim.stages import Stages
from qsim.table import decibel
from qsim.trace.runtimes import RUNTIMES
from qsim.warning import warn

_WRONG = 15.0  # dB: integers that differ by one in every layer of a deep network leave more


@without_autocast()
def quantized_program(sim: Simulation, dynamic_shapes: Any) -> ExportedProgram:
    """`QuantSim.quantized_program` documents it."""
    traced = traced_for(sim, RUNTIMES["executorch"], dynamic_shapes, Stages(), [])
    args, kwargs = sim.calls[0]
    module = quantized_graph(traced.program, traced.written()).module
    return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def export_program(
    traced: Tracing,
    file: Path,
    options: Options,
    *,
    verify: Iterable[Any] | None,
    forward: Forward | None,
    seconds: Stages,
    notes: list[str],
) -> ExportReport:
    """Write a simulation that was traced. The program runs on the example inputs before it is written."""
    sim = traced.sim
    args, kwargs = sim.calls[0]
    if elsewhere := {t.device.type for t in sim.model.state_dict().values()} - {"cpu"}:
        found = ", ".join(sorted(elsewhere))
        raise ExportError(f"QuantSim.export: the model is on {found}, and programs are lowered on the CPU: call sim.cpu() before")
    with seconds.stage("quantize"):
        graph = quantized_graph(traced.program.copied(), traced.written())
    with seconds.stage("lower"):
        lowered = lower(graph.module, args, kwargs, options.dynamic_shapes)
    with seconds.stage("run"):
        notes = [*notes, *_tried(sim, lowered.contents)]
    with seconds.stage("write"):
        write_atomically(file, lowered.contents)
    if lowered.outside:
        named = ", ".join(f"{count} {name}" for name, count in sorted(lowered.outside.items()))
        notes.append(f"not for XNNPACK, and left to ExecuTorch's portable kernels, which are slow: {named}")
    verification = None
    if verify is not None:
        with seconds.stage("verify"):
            plain = lower(quantized_graph(traced.program.copied(), {}).module, args, kwargs, options.dynamic_shapes)
            verification = verify_program(sim, graph, lowered.contents, plain.contents, verify, forward)
    about = subject_of(sim.model, sim.config)
    sizes = {file: file.stat().st_size}
    return ExportReport(
        *(file, traced.target.name, 0, sizes, dict(seconds), graph.names, notes, graph.in_float, verification), subject=about
    )


def _tried(sim: Simulation, contents: bytes) -> Iterator[str]:
    """Whether the program runs, and computes what the simulation does, on the example inputs."""
    args, kwargs = sim.calls[0]
    batch = kwargs or args
    try:
        got = ExecutorchSession(contents).run(None, inputs_of(sim, batch))
    except RuntimeError as error:
        raise ExportError(
            f"QuantSim.export: ExecuTorch lowers the model and cannot run it: {error}. Nothing was written; what its kernels were given is "
            "on standard error"
        ) from error
    worst = min((compared(*both).sqnr for both in zip(returned(sim, batch, integer=False), got, strict=True)), default=math.inf)
    if worst < _WRONG:
        said = f"ExecuTorch {version()} computes something else than the simulation: {decibel(worst)} dB on the example inputs"
        warn(f"QuantSim.export: {said}. Find where with verify=True, and leave that in float")
        yield said
