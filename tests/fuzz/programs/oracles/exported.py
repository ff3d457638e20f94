"""ONNX Runtime computes from a file, and `sim.integer()` from the traced graph, what the simulation does on the example."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import qsim

from ..case import Case, Failure, Raised, Undecided
from ..ir import Apply, all_statements
from ..loaded import Call
from ..operations import TABLE
from ..results import near, tensors_of
from ..running import quietly, same_state
from ..source import source

_NEAR = 0.02  # of the largest result: grids of 16 bits are 1000 times as fine


def files_are_the_simulation(case: Case) -> Failure | None:
    if any(isinstance(s, Apply) and TABLE[s.operation].rough for s in all_statements(case.program)):
        raise Undecided("a program that jumps")
    if "tolist" in source(case.program):
        raise Undecided("a list, of which torch.export traces every number")
    target = random.Random(f"exported {case.program.seed}").choice(["onnxruntime", "default"])
    sim = case.simulation(qsim.int16(target=target))
    call = case.calls[0]
    expected = case.run(sim, call, "no_grad").results
    with same_state(sim.model):
        found = _from_the_file(case, sim, call)
    if problem := near(found, [t for t in expected if t.numel()], _NEAR):
        return Failure("exported", "file", f"{target}: {problem}")
    with same_state(sim.model), quietly(), torch.no_grad(), sim.integer():
        args, kwargs = case.loaded.arguments(call, torch.float32)
        integer = tensors_of(sim(*args, **kwargs))
    if problem := near(integer, expected, _NEAR):
        return Failure("exported", "integers", f"{target}: {problem}")
    return None


def _from_the_file(case: Case, sim: qsim.QuantSim, call: Call) -> list[Tensor]:
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            with quietly():
                sim.export(path)
        except (qsim.ExportError, qsim.CaptureError) as refusal:
            raise Undecided(f"refused: {str(refusal).splitlines()[0]}") from refusal
        except Exception as error:
            raise Raised("export", error) from error
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    args, kwargs = case.loaded.arguments(call, torch.float32)
    given: list[Any] = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    names = [value.name for value in session.get_inputs()]
    if len(names) != len(given):
        raise Undecided(f"{len(given)} tensors for {len(names)} inputs of the file")
    feeds = {name: t.numpy() for name, t in zip(names, given, strict=True)}
    return [torch.from_numpy(value) for value in session.run(None, feeds) if value.size]
