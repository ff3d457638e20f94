"""Verification of a program for ExecuTorch: what it computes beside the simulation, kernel by kernel and at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from qsim.deploy.parts import Array
from qsim.deploy.times import measured
from qsim.deploy.verification import EXECUTORCH, IN_FLOAT, Difference, Verification
from qsim.errors import ExportError
from qsim.executorch.kernel_by_kernel import integers_at_borders
from qsim.executorch.quantized_graph import DEQUANTIZE, QuantizedGraph
from qsim.executorch.session import ExecutorchSession, version
from qsim.integer.programs import returned
from qsim.runs.batches import Forward, arguments_of, as_batch, calls_made
from qsim.simulation.simulation import Simulation


def verify_program(
    sim: Simulation, graph: QuantizedGraph, contents: bytes, plain: bytes, batches: Iterable[Any], forward: Forward | None
) -> Verification:
    """Run a program, the simulation, and the float model on batches as `calibrate` takes them, and compare.

    Parameters
    ----------
    contents, plain : bytes
        The program of `graph`, and that of the float model.
    """
    session, beside = ExecutorchSession(contents), ExecutorchSession(plain)
    steps, differences = _steps(graph), dict[tuple[str, str], dict[str, Difference]]()
    names = ["output"] if len(steps) == 1 else [f"output_{i}" for i in range(len(steps))]
    borders, times, notes = dict[str, Difference](), None, list[str]()
    for batch in batches if forward is None else map(as_batch, calls_made(sim.called(), batches, forward)):
        inputs = inputs_of(sim, batch)
        if times is None:
            borders = _borders(graph, inputs, notes)
            times = measured(beside, session, inputs)
        got = session.run(None, inputs)
        for mine, results in _references(sim, batch).items():
            grids = dict.fromkeys(names) if mine == IN_FLOAT else dict(zip(names, steps, strict=True))
            outputs = differences.setdefault((mine, EXECUTORCH), {name: Difference(step) for name, step in grids.items()})
            for difference, *both in zip(outputs.values(), results, got, strict=True):
                difference.add(*both)
    if times is None:
        raise ValueError(
            "QuantSim.export: verify= got no batch. Is the iterator used up? The file is written, and was compared with nothing"
        )
    return Verification("", executorch=version(), differences=differences, times=times, borders=borders, notes=notes)


def _borders(graph: QuantizedGraph, inputs: Mapping[str, Array], notes: list[str]) -> dict[str, Difference]:
    """Each kernel by itself; `notes` gets a sentence where ExecuTorch cannot run a program with the integers as inputs."""
    try:
        found = integers_at_borders(graph.module, [torch.from_numpy(x) for x in inputs.values()])
    except (ExportError, RuntimeError) as error:
        notes.append(f"integers at quantizers were not compared, for ExecuTorch cannot run a program with them as inputs: {error}")
        return {}
    return {name: compared(*both, step=1.0) for name, both in found.items()}


def inputs_of(sim: Simulation, batch: Any) -> dict[str, Array]:
    """What a program is given, in order, for a batch as `calibrate` takes it."""
    tensors = [t for t in tree_leaves(arguments_of(batch, sim.examples)) if isinstance(t, Tensor)]
    return {str(i): t.detach().cpu().numpy() for i, t in enumerate(tensors)}


def compared(mine: Array, other: Array, *, step: float | None = None) -> Difference:
    """How two results differ."""
    difference = Difference(step)
    difference.add(mine, other)
    return difference


def _references(sim: Simulation, batch: Any) -> Mapping[str, list[Array]]:
    with sim.in_float():
        floats = returned(sim, batch, integer=False)
    return {"simulation": returned(sim, batch, integer=False), IN_FLOAT: floats}


def _steps(graph: QuantizedGraph) -> list[float | None]:
    """The scale of each output; None where it is not quantized."""
    (end,) = (node for node in graph.module.graph.nodes if node.op == "output")
    results: list[Any] = [node for node in tree_leaves(end.args[0]) if isinstance(node, Node)]
    return [node.args[1] if node.target is DEQUANTIZE else None for node in results]
