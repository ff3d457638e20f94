"""A layer that is called by itself does what it does in the model, or leaves its result in float; and the model runs as before."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn

import qsim

from ..case import Case, Failure, Raised, Undecided, kept_batch_norms
from ..results import near, same_bits
from ..running import quietly

_LAYERS = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.ReLU, nn.Hardswish, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax)
_TOLERANCE = 1e-6


def layers_by_themselves(case: Case) -> Failure | None:
    sim = case.simulation(dataclasses.replace(kept_batch_norms(qsim.int8()), bias=False))
    met = _met(case, sim)
    if not met:
        raise Undecided("no layer of torch.nn that runs, of those with one tensor to take and one to return")
    quantizers, example = sim.quantizers(), case.calls[0]
    names = {parameter: name for name, parameter in sim.model.named_parameters()}
    before = case.run(sim, example, "no_grad")
    for path, (given, there) in met.items():
        layer = sim.model.get_submodule(path)
        plain = copy.deepcopy(case.float_model().get_submodule(path)).eval()
        quantize = quantizers.get(names.get(getattr(layer, "weight", None), ""))
        with quietly() as noted, torch.no_grad():
            if quantize is not None:
                plain.weight.copy_(quantize(plain.weight))
            try:
                found = layer(given.clone())
            except Exception as error:
                raise Raised(f"{type(plain).__name__} by itself", error) from error
            result = plain(given.clone())
            own = [q for name, q in quantizers.items() if name.endswith(".output") and torch.equal(q(there), there)]
            problems = [near([found], [each], _TOLERANCE) for each in (there, result, *(q(result) for q in own))]
        if all(problems):
            return Failure("layers alone", type(plain).__name__, f"{path}: {problems[0]}")
        if quantize is not None and not any("was called by itself" in note for note in _said(noted, sim)):
            return Failure("layers alone", "without a word", path)
    if problem := same_bits(case.run(sim, example, "no_grad").results, before.results):
        return Failure("layers alone", "changes the model", problem)
    return None


def _said(noted: list, sim: qsim.QuantSim) -> list[str]:
    return [*(str(w.message) for w in noted), *sim.summary().notes]


def _met(case: Case, sim: qsim.QuantSim) -> dict[str, tuple[Tensor, Tensor]]:
    """By the paths of layers: what the example's call gives them first, and what they return there."""
    met: dict[str, tuple[Tensor, Tensor]] = {}
    given: dict[str, Tensor] = {}
    handles = []
    for path, layer in sim.model.named_modules():
        if isinstance(layer, _LAYERS) and not layer._forward_pre_hooks and not layer._forward_hooks:
            handles += [
                layer.register_forward_pre_hook(lambda _, args, path=path: given.update({path: args[0].detach().clone()})),
                layer.register_forward_hook(
                    lambda _, args, out, path=path: met.setdefault(path, (given[path], out.detach().clone())) and None
                ),
            ]
    case.run(sim, case.calls[0], "no_grad")
    for handle in handles:
        handle.remove()
    return {path: (x, y) for path, (x, y) in met.items() if not x.is_nested}
