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

_REPLACED = "has no range: .*something else than in the example inputs"
_NEAR = {16: 0.02, 8: 0.15}  # of the largest result: an integer that float kernels round the other way moves those behind it


def files_are_the_simulation(case: Case) -> Failure | None:
    if any(isinstance(s, Apply) and TABLE[s.operation].rough for s in all_statements(case.program)):
        raise Undecided("a program that jumps")
    if "tolist" in source(case.program):
        raise Undecided("a list, of which torch.export traces every number")
    rng = random.Random(f"exported {case.program.seed}")
    target, bits = rng.choice(["onnxruntime", "default"]), rng.choice([16, 8])
    sim = case.simulation((qsim.int16 if bits == 16 else qsim.int8)(target=target))
    call = case.calls[0]
    expected = case.run(sim, call, "no_grad").results
    with same_state(sim.model):
        plain, optimised = _from_the_file(case, sim, call)
    with same_state(sim.model), quietly(), torch.no_grad(), sim.integer():
        args, kwargs = case.loaded.arguments(call, torch.float32)
        integer = [t for t in tensors_of(sim(*args, **kwargs)) if t.numel()]
    for name, found, wanted in (
        ("file", plain, [t for t in expected if t.numel()]),
        ("integers", integer, [t for t in expected if t.numel()]),
        ("optimised file", optimised, integer),
    ):
        if problem := near(found, wanted, _NEAR[bits]):
            return Failure("exported", f"{name}, {bits} bits", f"{target}: {problem}")
    return None


def _from_the_file(case: Case, sim: qsim.QuantSim, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """What ONNX Runtime computes, as it is written and optimised."""
    from qsim.onnx.sessions import session

    args, kwargs = case.loaded.arguments(call, torch.float32)
    given: list[Any] = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            with quietly():
                sim.export(path)
        except (qsim.ExportError, qsim.CaptureError) as refusal:
            raise Undecided(f"refused: {str(refusal).splitlines()[0]}") from refusal
        except Exception as error:
            if isinstance(error, qsim.NoEncodingError) and case.was_told(error, _REPLACED):
                raise Undecided("what a hook puts in its place is not on a grid, as the report of calibration says") from error
            raise Raised("export", error) from error
        found = []
        for optimised in (False, True):
            opened = session(path, optimised=optimised)
            names = [value.name for value in opened.get_inputs()]
            if len(names) != len(given):
                raise Undecided(f"{len(given)} tensors for {len(names)} inputs of the file")
            results = opened.run(None, {name: t.cpu().numpy() for name, t in zip(names, given, strict=True)})
            found.append([torch.from_numpy(value) for value in results if value.size])
    return found[0], found[1]
