"""What holds after each step, whatever the steps were. Each oracle returns what is wrong, or ""."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import qsim

from ..programs.results import near, same_bits
from .hand import Hand, quantized
from .life import Life, Skip, run, savings
from .steps.copies import same_switches
from .subjects import Call

Oracle = Callable[[Life, Call], str]


def savings_change_nothing(life: Life, call: Call) -> str:
    """Results and gradients are those without savings; what was kept from earlier is asked first."""
    sim = life.sim
    with savings(sim, True):
        first, again = run(sim, call), run(sim, call)
        gradients = run(sim, call, gradients=True)
        after = run(sim, call)
    with savings(sim, False):
        plain, plain_gradients = run(sim, call), run(sim, call, gradients=True)
    for name, found in (("", first), ("again: ", again), ("after a call with gradients: ", after)):
        if problem := same_bits(found, plain):
            return f"{name}{problem}"
    if problem := same_bits(gradients, plain_gradients):
        return f"with gradients: {problem}"
    if life.dtype is not torch.float32:
        return ""
    with torch.autocast("cpu", torch.bfloat16):
        with savings(sim, True):
            first = run(sim, call)
        with savings(sim, False):
            plain = run(sim, call)
    problem = same_bits(first, plain)
    return f"under autocast: {problem}" if problem else ""


def copies_are_equal(life: Life, call: Call) -> str:
    """A deep copy computes the same bits."""
    try:
        copied = copy.deepcopy(life.sim)
    except RuntimeError as error:
        if "graph leaves" in str(error):  # torch's word on the float model too, once it was pruned or normalized
            raise Skip from error
        raise
    if problem := same_bits(run(copied, call), run(life.sim, call)):
        return problem
    again = copy.deepcopy(copied)
    problem = same_bits(run(copied.train(), call), run(again.train(), call))
    return f"in training: {problem}" if problem else ""


def states_are_equal(life: Life, call: Call) -> str:
    """A simulation that is made anew and loads the state computes the same bits."""
    if life.is_rebuilt or len(life.changes) > life.folded_later:
        raise Skip
    fresh = life.fresh()
    fresh.load_state_dict(life.sim.state_dict())
    same_switches(life.sim, fresh)
    return same_bits(run(fresh, call), run(life.sim, call))


def float_is_the_model(life: Life, call: Call) -> str:
    """In float the simulation is the plain model with its weights."""
    expected = run(life.twin(), call)
    with life.sim.in_float():
        return same_bits(run(life.sim, call), expected)


def as_by_hand(life: Life, call: Call) -> str:
    """The simulation is what its documents and `qsim.reference` make of the quantizers as they are now."""
    hand, by_hand = Hand(life.sim), life.subject.by_hand
    if len(life.changes) > life.folded_later:
        raise Skip
    if by_hand is None or life.config.target != "default" or life.sim.training or life.sim.quantization.formats:
        raise Skip
    if any(m.training for m in life.sim.model.modules()) or not all(q.spec.has_scale for q in life.sim.quantizers().values()):
        raise Skip  # a half format has more quantizers
    with torch.no_grad():
        expected = by_hand(hand, *call[0], **call[1])
    if problem := same_bits(run(life.sim, call), [expected]):
        return problem
    if life.dtype.itemsize < 4 or any(q.spec.is_float for q in life.sim.quantizers().values()):
        return ""
    gradients = run(life.sim, call, gradients=True, by=functools.partial(by_hand, hand))
    problem = near(run(life.sim, call, gradients=True), gradients, 1e-4)
    return f"with gradients: {problem}" if problem else ""


def weights_by_hand(life: Life, call: Call) -> str:
    """With the quantizers of weights alone, the simulation is the plain model with its weights on their grids."""
    sim, quantizers = life.sim, life.sim.quantizers()
    if sim.training or sim.quantization.formats or life.subject.shares:  # a table that is a layer's weight is quantized in one of both
        raise Skip
    weights = {id(w): key for key, w in sim.weights().items()}
    names = {name: weights[id(p)] for name, p in sim.model.named_parameters(remove_duplicate=False) if id(p) in weights}
    if len(set(names.values())) < len(weights):
        raise Skip  # computed from others
    was = {key: q.enabled for key, q in quantizers.items()}
    twin = life.twin()
    with torch.no_grad():
        for name, p in twin.named_parameters(remove_duplicate=False):
            if (key := names.get(name)) is not None and was[key]:
                p.data = quantized(quantizers[key], p)
    try:
        for key, q in quantizers.items():
            q.enabled = was[key] and key in weights.values()
        found = run(sim, call)
    finally:
        for key, q in quantizers.items():
            q.enabled = was[key]
    expected = run(twin, call)
    # In half precision numbers in the model are tensors of the format, whatever is off.
    written_out = life.subject.made.__name__ == "Recurrent" or not all(q.spec.has_scale for q in quantizers.values())
    if written_out and life.dtype.itemsize < 4:
        raise Skip
    return near(found, expected, 1e-3) if written_out else same_bits(found, expected)


def compiled_is_eager(life: Life, call: Call) -> str:
    """What was compiled once, steps ago perhaps, changes no more than the order of sums."""
    if not life.compiles or life.sim.training or life.dtype is not torch.float32:
        raise Skip
    if life.compiled is None or life.compiled._orig_mod is not life.sim:
        torch._dynamo.reset()
        life.compiled = torch.compile(life.sim, backend="aot_eager")
    return near(run(life.compiled, call), run(life.sim, call), 1e-5)


def integers_are_new(life: Life, call: Call) -> str:
    """On integers a simulation computes what a copy does, which knows no trace and no integers of earlier steps."""
    if life.sim.training or life.subject.is_stateful or any(m.training for m in life.sim.model.modules()):
        raise Skip
    if life.changes:
        raise Skip
    copied = copy.deepcopy(life.sim)
    with copied.integer():
        expected = run(copied, call)
    with life.sim.integer():
        return same_bits(run(life.sim, call), expected)


def files_are_the_simulation(life: Life, call: Call) -> str:
    """What is exported computes the simulation up to a step of its last grid; integers compute the file."""
    if life.subject.is_stateful or life.dtype is not torch.float32 or life.config.target not in ("default", "onnxruntime"):
        raise Skip
    if any(m.training for m in life.sim.modules()) or any(
        q.spec.is_float or q.spec.bits not in (4, 8) for q in life.sim.quantizers().values()
    ):
        raise Skip
    path = os.path.join(life.folder, "exported.onnx")
    args, kwargs = life.examples()[0]
    report = life.sim.export(path, "onnxruntime", verify=[{"x": args[0], **kwargs} if kwargs else args])
    verification = report.verification
    assert verification is not None
    apart = verification.differences["simulation", "not optimised"]
    wrong = [f"{name}: {d}" for name, d in apart.items() if not (d.largest <= (1 if d.step is not None else 1e-3) or d.sqnr > 30)]
    return "; ".join(wrong)


ORACLES: dict[str, tuple[Oracle, float]] = {
    "savings": (savings_change_nothing, 1.0),
    "copies": (copies_are_equal, 0.7),
    "states": (states_are_equal, 0.15),
    "float": (float_is_the_model, 0.7),
    "hand": (as_by_hand, 1.0),
    "weights": (weights_by_hand, 0.6),
    "compiled": (compiled_is_eager, 1.0),
    "integers": (integers_are_new, 0.04),
    "exported": (files_are_the_simulation, 0.02),
}


def state_of(sim: qsim.QuantSim) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in sim.state_dict().items()}


def settings_of(sim: qsim.QuantSim) -> dict[str, Any]:
    """What no state dict has: switches, modes, what learns."""
    found: dict[str, Any] = {key: (q.enabled, q.observing) for key, q in sim.quantizers().items()}
    found |= {f"module {name}": module.training for name, module in sim.named_modules()}
    found |= {f"parameter {name}": (p.requires_grad, p.dtype) for name, p in sim.named_parameters()}
    return found


def state_changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
    """The first entry that differs."""
    if before.keys() != after.keys():
        return f"entries {sorted(before.keys() ^ after.keys())}"
    return next((f"{name}: {problem}" for name, t in before.items() if (problem := same_bits([after[name]], [t]))), "")


def quiet() -> warnings.catch_warnings[Any]:
    return warnings.catch_warnings(action="ignore")  # type: ignore[call-overload]
