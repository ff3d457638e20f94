"""Layers with a BatchNorm folded into them, on paths that no example took.

A BatchNorm that runs on what its layer did not return normalizes that, as it did before it was folded. A layer whose result is not
normalized there computes another function than the float model's, and that is said.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode

from qsim.graph.execute.place import Place
from qsim.graph.record.call_sites import translator_now

FOLDED = "_qsim_folded"  # in the __dict__ of both: their names
WAS = "_qsim_was"  # in that of what stands in a BatchNorm's place: that, if it came behind the layer
Names = tuple[str, str]  # of a layer, and of the BatchNorm that is folded into it
Pair = tuple[Names, _BatchNorm, bool]  # with that, and whether it came before the layer


def pair(model: nn.Module, pairs: Iterable[Pair]) -> None:
    """Have the calls counted of layers, and of what stands in the place of the BatchNorms that are folded into them."""
    for names, bn, before in pairs:
        layer, norm = map(model.get_submodule, names)
        if "forward" in vars(layer) and type(norm) is nn.Identity and "forward" not in vars(norm):
            vars(layer)[FOLDED] = vars(norm)[FOLDED] = names
            vars(norm)[WAS] = None if before else bn
            vars(norm)["forward"] = functools.partial(_forward, norm)


def unpair(module: nn.Module) -> None:
    """Undo it for one module."""
    if vars(module).pop(FOLDED, None) is not None and WAS in vars(module):
        del vars(module)[WAS], vars(module)["forward"]


def _forward(norm: nn.Module, x: Tensor) -> Tensor:
    bn: _BatchNorm | None = vars(norm)[WAS]
    if note_run(norm, -1) >= 0 or bn is None:
        return x
    note_run(norm, 1)
    mean, variance, weight, bias = (
        None if t is None else t.detach().to(x.device, x.dtype) for t in (bn.running_mean, bn.running_var, bn.weight, bn.bias)
    )
    return F.batch_norm(x, mean, variance, weight, bias, eps=bn.eps)


def note_run(module: nn.Module, count: int) -> int:
    """Count a call of a module, if it is one of a pair. Returns how often the layer ran without the BatchNorm up to now."""
    if FOLDED not in vars(module):
        return 0
    layer, norm = vars(module)[FOLDED]
    if is_dynamo_compiling():
        return _traced_run(layer, norm, count)
    if (abroad := getattr(_get_current_function_mode(), "abroad", None)) is None:  # type: ignore[no-untyped-call]
        return 0
    return _counted(abroad.unpaired, layer, norm, count)


def _counted(unpaired: dict[Names, int], layer: str, norm: str, count: int) -> int:
    unpaired[layer, norm] = found = unpaired.get((layer, norm), 0) + count
    return found


def note_unpaired(place: Place, unpaired: dict[Names, int]) -> None:
    """Note which of two ran without the other in a call of the model. Of a pair that stands half in what is compiled by itself nothing is
    known."""
    for (layer, norm), count in unpaired.items():
        if count and not any(_is_compiled(m) for m in place.switch.model.modules()):  # type: ignore[union-attr]
            alone, other = (layer, norm) if count > 0 else (norm, layer)
            text = f"'{alone}' ran without '{other}' where '{norm}' is folded into '{layer}': it computes another function than in float"
            place.switch.notice(text, "", "", first=True)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


# The same while Dynamo traces.


def _traced_run(layer: str, norm: str, count: int) -> int:
    return _counted(_unpaired_in_graph(), layer, norm, count)


def _unpaired_in_graph() -> dict[Names, int]:
    found: dict[Names, int] = vars(translator_now().output).setdefault("_qsim_unpaired", {})
    return found


def note_unpaired_in_graph(place: Place) -> None:
    """As `note_unpaired`, of the graph that is traced."""
    note_unpaired(place, _unpaired_in_graph())


_traced_run._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in qsim.graph.execute.traced
