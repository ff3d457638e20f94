"""Layers of a simulation that are wrapped, or have hooks that return another tensor, as adapters do: in float it is the float model with
the same wrappers, also where BatchNorms are folded; and a wrapper that only calls its layer changes nothing, or it is said."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qsim

from ..case import Case, Failure, Undecided, in_float
from ..loaded import Call
from ..results import near, same_bits
from ..running import Outcome, quietly, run, same_state

_TOLERANCE = 1e-8  # of float64: a folded BatchNorm is rounded differently
_MOST = 3  # layers of a program


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, then: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.then = inner, then

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.then(self.inner(*args, **kwargs))


def _itself(out: Any) -> Any:
    return out


def _another(out: Any) -> Any:
    return out.clone() if isinstance(out, Tensor) else out


def _adapted(out: Any) -> Any:
    """An adapter's: something of its own is added."""
    return out + 0.25 * torch.tanh(out) if isinstance(out, Tensor) and out.is_floating_point() else out


_WAYS: dict[str, Callable[[Any], Any]] = {"a wrapper": _itself, "a clone": _another, "an adapter": _adapted}


def _wrap(model: nn.Module, path: str, way: str, hook: bool) -> None:
    if hook:
        model.get_submodule(path).register_forward_hook(lambda _, args, out: _WAYS[way](out))
        return
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    wrapper = _Wrapper(model.get_submodule(path), _WAYS[way])
    wrapper.training = holder.training
    setattr(holder, name, wrapper)


def wrappers_stay(case: Case) -> Failure | None:
    rng = random.Random(f"wrapped {case.program.seed}")
    way, hook = rng.choice(list(_WAYS)), rng.random() < 0.3
    layers = _layers(case)
    if not layers:
        raise Undecided("no layer of torch.nn that runs by its own name")
    sim = case.simulation(qsim.int8(), torch.float64)
    chosen = rng.sample(layers, min(len(layers), rng.randint(1, _MOST)))
    calls, expected = _in_float(case, chosen, way, hook)
    before = [case.run(sim, call, "no_grad", torch.float64) for call in calls]
    for path in chosen:
        _wrap(sim.model, path, way, hook)
    how = f"{way}{', by a hook' * hook}"
    said = False
    for call, outcome in zip(calls, expected, strict=True):
        with in_float(sim):
            found = case.run(sim, call, "no_grad", torch.float64)
        said = said or any("sees other tensors than in the float model" in text for text in case.warned)  # what a BatchNorm is folded into
        if not said and (problem := near(found.results, outcome.results, _TOLERANCE)):
            return Failure("wrapped", f"in float, {how}", f"{chosen}, {call.name}: {problem}")
    said = False
    for call, outcome in zip(calls, before, strict=True):
        after = case.run(sim, call, "no_grad", torch.float64)
        said = said or bool(case.warned)  # once, of a layer
        if way == "a wrapper" and not said and (problem := same_bits(after.results, outcome.results)):
            return Failure("wrapped", f"simulated, {how}", f"{chosen}, {call.name}: {problem}")
    return None


def _in_float(case: Case, chosen: list[str], way: str, hook: bool) -> tuple[list[Call], list[Outcome]]:
    """The calls that the float model can run with such layers, and what it gives."""
    calls, outcomes = [], []
    for call in case.calls:
        model = case.float_model(torch.float64)
        for path in chosen:
            _wrap(model, path, way, hook)
        try:
            with quietly(), same_state(model):
                outcomes.append(run(model, case.loaded, call, "no_grad", torch.float64))
        except Exception:
            continue  # the program asks for what its layers are
        calls.append(call)
    return calls, outcomes


def _layers(case: Case) -> list[str]:
    """Paths of layers that have no name beside, and that run in the example's call."""
    model, ran = case.float_model(torch.float64), set[str]()
    leaves = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).__module__.startswith("torch.nn.modules") and not list(module.children()) and path
    }
    alone = {path for path, module in leaves.items() if sum(module is other for other in leaves.values()) == 1}
    for path in alone:
        leaves[path].register_forward_hook(lambda *_, path=path: ran.add(path))
    with quietly():
        run(model, case.loaded, case.calls[0], "no_grad", torch.float64)
    return sorted(ran)
