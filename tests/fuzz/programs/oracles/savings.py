"""Savings change no bit of a result or a gradient, and nothing that the caller holds changes its values afterwards."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

import qsim

from ..case import Case, Failure, Undecided
from ..results import by_name, equal, same_bits

_CONFIGS = {
    "int8": qsim.int8(),
    "int4": qsim.int4(),
    "symmetric": dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(symmetric=True)),
    "fp8": qsim.fp8(),
    "float bias": dataclasses.replace(qsim.int8(), bias=False),
    "learnable": dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(learnable=True)),
}


def any_config(seed: int) -> qsim.Config:
    rng = random.Random(f"config {seed}")
    return _CONFIGS[rng.choices(list(_CONFIGS), [6, 1, 1, 1, 1, 1])[0]]


def savings_change_nothing(case: Case) -> Failure | None:
    sim = case.simulation(any_config(case.program.seed))
    try:
        plain = copy.deepcopy(sim)
    except Exception as error:
        raise Undecided(f"no copy: {error}") from error
    plain.savings = False
    held: list[tuple[str, Tensor, Tensor]] = []
    for call in case.calls:
        for mode in case.modes(call):
            for attempt in ("first", "second"):  # what one call keeps may reach the next
                expected, found = case.run(plain, call, mode), case.run(sim, call, mode)
                path = "the example's path" if call.recorded else "another path"
                if problem := same_bits(found.results, expected.results):
                    return Failure("savings", f"{path}, {mode}", f"{call.name}, {attempt} time: {problem}")
                if problem := same_bits(*by_name(found.gradients, expected.gradients)):
                    return Failure(
                        "savings", f"gradients, {path}, {mode}", f"{call.name}, {attempt} time: {problem}, of {list(expected.gradients)}"
                    )
                held += [(f"{call.name}, {mode}", t, t.detach().clone()) for t in found.live]
                changed = [where for where, t, before in held if not equal(t.detach(), before)]
                changed += [call.name for t, before in zip(found.live, found.results, strict=False) if same_bits([t], [before])]
                if changed:
                    return Failure("savings", f"a held tensor changes, {path}", f"{call.name}, {mode}: of {changed[0]}")
    return _after_writing(case, sim, plain)


def _after_writing(case: Case, sim: qsim.QuantSim, plain: qsim.QuantSim) -> Failure | None:
    """Parameters are written to, in the ways that there are, between calls that read them."""
    example = case.calls[0]
    for way, write in _WRITES.items():
        case.run(sim, example, "no_grad")
        for model in (sim.model, plain.model):
            for name, p in list(model.named_parameters()):
                owner, _, attribute = name.rpartition(".")
                write(model.get_submodule(owner), attribute, p)
            if write is _few_elements_past_the_version:
                model.eval()  # as the documents ask one to
        expected, found = case.run(plain, example, "no_grad"), case.run(sim, example, "no_grad")
        if problem := same_bits(found.results, expected.results):
            return Failure("savings", f"parameters that were written to, {way}", problem)
    return None


def _one_of(p: Tensor) -> Tensor:
    """A view of one element, which no sample of a few words need see."""
    return p.detach().view(-1)[(p.numel() * 5) // 7]


def _past_the_version(module: nn.Module, name: str, p: Tensor) -> None:
    """As code for moving averages writes."""
    p.data.lerp_(torch.ones_like(p), 0.05)


def _few_elements(module: nn.Module, name: str, p: Tensor) -> None:
    with torch.no_grad():
        _one_of(p).add_(0.75)


def _few_elements_past_the_version(module: nn.Module, name: str, p: Tensor) -> None:
    _one_of(p.data).add_(-0.5)


def _other_memory(module: nn.Module, name: str, p: Tensor) -> None:
    other = p.data.clone()
    _one_of(other).mul_(1.5)
    p.data = other


def _other_parameter(module: nn.Module, name: str, p: Tensor) -> None:
    setattr(module, name, nn.Parameter(p.detach() * 0.9))


_WRITES: dict[str, Callable[[nn.Module, str, Tensor], None]] = {
    "through data": _past_the_version,
    "in a few elements": _few_elements,
    "in a few elements, through data": _few_elements_past_the_version,
    "other memory": _other_memory,
    "another parameter": _other_parameter,
}
