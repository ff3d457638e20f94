"""Layers with a BatchNorm folded into them, on paths that no example took: which of two ran without the other in one call of the model.

A BatchNorm whose layer did not run normalizes what it is given, as it did before it was folded (`layers_alone.py`). Where that is not known
it does nothing: hooks and wrappers change what the layer returned, a graph of its own or a checkpoint runs one of both elsewhere. A layer
that ran without its BatchNorm computes another function than the float model's, and that is said.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode, _get_current_function_mode_stack

from qsim.graph.execute.place import Place
from qsim.graph.record.asker import variable_of_asker
from qsim.graph.record.call_sites import translator_now
from qsim.warning import warn

FOLDED = "_qsim_folded"  # in the __dict__ of both
Names = tuple[str, str]  # of a layer, and of the BatchNorm that is folded into it


class Folded:
    """What a layer and the BatchNorm that is folded into it know of each other; that of a copy of one of them is equal to it.

    Attributes
    ----------
    names : Names
    was : BatchNorm or None
        If it came behind the layer.
    apart : bool
        Whether one of them is in a compiled graph that the model as a whole is not: nobody counts its calls.
    alone : int
        How often the layer ran more than the BatchNorm where no call of the whole model was under way.
    normalized : bool
        What the BatchNorm did last.
    said : bool
        Whether it was said that it does so where it is called by itself.
    """

    def __init__(self, names: Names, was: _BatchNorm | None, apart: bool = False) -> None:
        self.names, self.was, self.apart = names, was, apart
        self.alone, self.normalized, self.said = 0, False, False

    def __reduce__(self) -> tuple[type[Folded], tuple[Names, _BatchNorm | None, bool]]:
        return Folded, (self.names, self.was, self.apart)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folded) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


class Pairs:
    """How often layers ran more than the BatchNorms that are folded into them, in one call of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.alone: dict[Folded, int] = {}
        self.replaced: set[Names] = set()

    def layer_ran(self, folded: Folded) -> None:
        self.alone[folded] = self.alone.get(folded, 0) + 1

    def norm_ran(self, folded: Folded, *, compiled: bool) -> bool:
        """Whether the BatchNorm has to normalize. `compiled`: in the graph of the whole model."""
        if folded.was is None or self.alone.get(folded, 0) > 0:
            self.alone[folded] = self.alone.get(folded, 0) - 1
            return False
        if not compiled and not self._is_counted(folded):
            return False
        if not self._is_there(folded):
            self.replaced.add(folded.names)
            return False
        return True

    def _is_there(self, folded: Folded) -> bool:
        """Whether the layer stands where it stood, and not what may have been made of it."""
        try:
            layer = self.model.get_submodule(folded.names[0])
        except AttributeError:
            return False
        return vars(layer).get(FOLDED) == folded

    def _is_counted(self, folded: Folded) -> bool:
        return not folded.apart and not any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in self.model.modules())

    def note(self, place: Place, *, compiled: bool) -> None:
        """Note which of two ran without the other."""
        for folded, count in self.alone.items():
            if count and (compiled or self._is_counted(folded)):
                layer, norm = folded.names
                alone, other = (layer, norm) if count > 0 else (norm, layer)
                text = (
                    f"'{alone}' ran without '{other}' where '{norm}' is folded into '{layer}': it computes another function than in float"
                )
                place.switch.notice(text, "", "", first=True)
        for layer, norm in self.replaced:
            place.switch.notice(f"'{norm}' is folded into what stood at '{layer}', and does nothing behind another module", "", "")


class _Call(threading.local):
    pairs: Pairs | None = None


_in_float = _Call()  # the call of a whole model with its simulation off that a thread is in


class PairedInFloat:
    """Context in which a model runs with its simulation off."""

    def __init__(self, model: nn.Module, place: Place) -> None:
        self._place, self._pairs = place, Pairs(model)

    def __enter__(self) -> None:
        self._outer, _in_float.pairs = _in_float.pairs, self._pairs

    def __exit__(self, *error: Any) -> None:
        _in_float.pairs = self._outer
        if error[0] is None:
            self._pairs.note(self._place, compiled=False)
            self._place.switch.say()


def note_layer(folded: Folded, *, inside: bool) -> None:
    """Count a call of a layer. `inside`: of a container that runs, or of what qsim runs in some other way."""
    if is_dynamo_compiling():
        _traced_layer()
    elif not _computes_again():
        if (pairs := _pairs_now()) is not None:
            pairs.layer_ran(folded)
        elif not inside:
            folded.alone += 1


def normalizes(folded: Folded, *, inside: bool) -> bool:
    """Count a call of what stands in the place of a BatchNorm. Returns whether it has to normalize what it is given."""
    if is_dynamo_compiling():
        return _traced_norm()
    if not _computes_again():
        if (pairs := _pairs_now()) is not None:
            folded.normalized = pairs.norm_ran(folded, compiled=False)
        elif inside or folded.alone > 0:
            folded.normalized, folded.alone = False, folded.alone - (not inside)
        else:
            folded.normalized = folded.was is not None and not folded.apart
            if folded.normalized and not folded.said:
                folded.said = True
                layer, norm = folded.names
                warn(f"QuantSim: '{norm}' was called by itself, and '{layer}', which it is folded into, not before: it normalizes")
    return folded.normalized


def _computes_again() -> bool:
    """Whether a checkpoint computes again what it did not keep, maybe one of the two alone: in the backward pass."""
    return torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined,no-any-return]


def _pairs_now() -> Pairs | None:
    if (mode := _get_current_function_mode()) is None:  # type: ignore[no-untyped-call]
        return _in_float.pairs
    abroad = getattr(mode, "abroad", None)
    if abroad is None:  # a forward may enter modes of its own
        modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
        abroad = next((found for mode in modes if (found := getattr(mode, "abroad", None)) is not None), None)
    return _in_float.pairs if abroad is None else abroad.pairs


# The same while Dynamo traces, of `folded`, a variable of the function that asks.


def begin_pairs() -> None:
    """A whole model is traced, `self` of the function that asks, in the graph that begins."""
    vars(translator_now().output)["_qsim_pairs"] = Pairs(variable_of_asker("self").value)


def _traced_layer() -> None:
    folded, pairs = _folded_of_asker(), _pairs_in_graph()
    if pairs is None:
        folded.apart = True
    else:
        pairs.layer_ran(folded)


def _traced_norm() -> bool:
    folded, pairs = _folded_of_asker(), _pairs_in_graph()
    if pairs is None:
        folded.apart = True
        return False
    return pairs.norm_ran(folded, compiled=True)


def _folded_of_asker() -> Folded:
    folded: Folded = variable_of_asker("folded").value
    return folded


def _pairs_in_graph() -> Pairs | None:
    pairs: Pairs | None = vars(translator_now().output).get("_qsim_pairs")
    return pairs


def note_pairs_in_graph(place: Place) -> None:
    """As `Pairs.note`, of the graph that is traced."""
    if (pairs := _pairs_in_graph()) is not None:
        pairs.note(place, compiled=True)


for _function in (begin_pairs, _traced_layer, _traced_norm):
    _function._dynamo_marked_constant = True  # type: ignore[union-attr]  # as in qsim.graph.execute.answers
