"""The simulation computes what the hand-written one does: one quantizer at the end of each chain, weights per channel, int32 biases.

In float64: sums in another order then differ by 1e-15, which is far from any rounding edge, so that what differs is a quantizer.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

import qsim

from ..case import Case, Failure, Undecided
from ..dataflow import NotUnderstood
from ..grids import Widths
from ..interpret import Interpreter
from ..ir import all_statements
from ..loaded import Call
from ..machine import Machine
from ..results import by_name, near
from ..running import quietly, same_state, weighted

_TOLERANCE = 1e-7
_GRADIENTS = 1e-5  # of sums that cancel: a float32 scale of a float64 weight may be off by its last bit
_EDGE = 1e-7  # steps: nearer to a rounding edge than this, the order of sums may decide


def widths_of(seed: int) -> Widths:
    rng = random.Random(f"widths {seed}")
    weight_bits, activation_bits = rng.choice(((8, 8), (8, 8), (4, 8), (4, 4)))
    return Widths(weight_bits, activation_bits, rng.random() < 0.2, rng.random() < 0.6)


def config_of(widths: Widths, seed: int) -> qsim.Config:
    return qsim.Config(
        weight=qsim.TensorSpec(bits=widths.weight_bits, symmetric=True, axis=0, method="minmax"),
        activation=qsim.TensorSpec(bits=widths.activation_bits, symmetric=widths.symmetric, signed=True, method="minmax"),
        bias=widths.bias,
        batch_norm="keep" if seed % 2 else "fold",
    )


def both(case: Case) -> tuple[qsim.QuantSim, Interpreter]:
    """A calibrated simulation, and the hand-written one on the same model."""
    widths = widths_of(case.program.seed)
    sim = case.simulation(config_of(widths, case.program.seed), torch.float64)
    try:
        interpreter = Interpreter(Machine(widths), case.program, sim.model)
        _calibrate(interpreter, case)
    except NotUnderstood as reason:
        raise Undecided(str(reason)) from reason
    with torch.no_grad():
        for buffer in interpreter.states():  # as an earlier call may have left them: calibration puts back what it found
            buffer.copy_(torch.linspace(-0.4, 0.6, buffer.numel()))
    return sim, interpreter


def as_written_by_hand(case: Case) -> Failure | None:
    sim, interpreter = both(case)
    machine, understood = interpreter.m, False
    reentrant = any(getattr(s, "checkpoint", "") == "reentrant" for s in all_statements(case.program))
    for call in case.calls:
        for mode in case.modes(call, train=case.program.seed % 3 == 0 and not _draws(case)):
            if mode == "train" and reentrant:  # without an input that needs a gradient torch computes none
                continue
            machine.closest = 0.5
            try:
                results, gradients = by_hand(interpreter, call, mode)
            except NotUnderstood:
                continue
            understood = True
            found = case.run(sim, call, mode, torch.float64)
            if machine.closest < _EDGE:
                continue
            path = "the example's path" if call.recorded else "another path"
            if problem := near(found.results, results, _TOLERANCE):
                return Failure("hand-written", f"{path}, {mode}", f"{call.name}: {problem}")
            if problem := near(*by_name(found.gradients, gradients), _GRADIENTS):
                return Failure("hand-written", f"gradients, {path}, {mode}", f"{call.name}: {problem}, of {list(gradients)}")
    if not understood:
        raise Undecided("no call is understood")
    return None


def _draws(case: Case) -> bool:
    """Whether random numbers are drawn in training: by how many calls, the hand-written simulation does not know."""
    return any("Dropout" in member.source for c in case.program.containers for member in c.members)


def _calibrate(interpreter: Interpreter, case: Case) -> None:
    machine, recorded = interpreter.m, [call for call in case.calls if call.recorded][:2]
    interpreter.model.eval()
    with torch.no_grad(), same_state(interpreter.model), quietly():
        with same_state(interpreter.model):
            interpreter.run(_doubles(recorded[0]), recorded[0].flags)
        machine.plan()
        for call in recorded:
            interpreter.run(_doubles(call), call.flags)
        machine.calibrated()


def _doubles(call: Call) -> dict[str, Tensor | None]:
    return {name: t.double().clone() if t is not None and t.is_floating_point() else t for name, t in call.tensors.items()}


def by_hand(interpreter: Interpreter, call: Call, mode: str) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Results and gradients, by the names of the model's parameters."""
    model, tensors = interpreter.model, _doubles(call)
    model.train(mode == "train")
    torch.manual_seed(interpreter.program.seed)
    interpreter.m.missed, interpreter.m.skipped = [], set()
    with quietly(), same_state(model):
        if mode == "no_grad":
            with torch.no_grad():
                return interpreter.run(tensors, call.flags), {}
        inputs = {f"input {name}": t for name, t in tensors.items() if t is not None and t.is_floating_point()} if mode == "grad" else {}
        for t in inputs.values():
            t.requires_grad_()
        results = interpreter.run(tensors, call.flags)
        total = sum((weighted(t) for t in results if t.requires_grad), torch.zeros((), dtype=torch.float64))
        wanted = {**dict(model.named_parameters()), **inputs}
        if not total.requires_grad:
            return [t.detach() for t in results], {}
        found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        return [t.detach() for t in results], dict(zip(wanted, found, strict=True))
