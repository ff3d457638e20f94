"""Layers with a BatchNorm folded into them, on paths that no example took: how often a layer ran without it, in one call of the model.

A BatchNorm that runs on what its layer did not return normalizes that, as it did before it was folded (`layers_alone.py`). A layer whose
result is not normalized there computes another function than the float model's, and that is said.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode

from qsim.graph.execute.place import Place
from qsim.graph.record.call_sites import translator_now

FOLDED = "_qsim_folded"  # in the __dict__ of both
Names = tuple[str, str]  # of a layer, and of the BatchNorm that is folded into it


class Folded:
    """What a layer and the BatchNorm that is folded into it know of each other.

    Attributes
    ----------
    names : Names
    was : BatchNorm or None
        If it came behind the layer.
    returned : dict of int to weakref
        What the layer returned last where it was called by itself, or in float, by thread.
    """

    def __init__(self, names: Names, was: _BatchNorm | None) -> None:
        self.names, self.was = names, was
        self.returned: dict[int, weakref.ref[Tensor]] = {}

    def __reduce__(self) -> tuple[type[Folded], tuple[Names, _BatchNorm | None]]:
        return Folded, (self.names, self.was)

    def note_returned(self, out: Any) -> None:
        if isinstance(out, Tensor):
            self.returned[threading.get_ident()] = weakref.ref(out)

    def has_returned(self, x: Tensor) -> bool:
        """Whether it is what the layer returned last."""
        return (last := self.returned.get(threading.get_ident())) is not None and last() is x


def note_run(folded: Folded, count: int) -> int:
    """Count a call. Returns how often the layer ran without the BatchNorm up to now."""
    if is_dynamo_compiling():
        return _traced_run(folded.names[0], folded.names[1], count)
    if (abroad := getattr(_get_current_function_mode(), "abroad", None)) is None:  # type: ignore[no-untyped-call]
        return 0
    unpaired: dict[Folded, int] = abroad.unpaired
    unpaired[folded] = found = unpaired.get(folded, 0) + count
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
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


# The same while Dynamo traces.


def _traced_run(layer: str, norm: str, count: int) -> int:
    unpaired = _unpaired_in_graph()
    unpaired[layer, norm] = found = unpaired.get((layer, norm), 0) + count
    return found


def _unpaired_in_graph() -> dict[Names, int]:
    found: dict[Names, int] = vars(translator_now().output).setdefault("_qsim_unpaired", {})
    return found


def note_unpaired_in_graph(place: Place) -> None:
    """As `note_unpaired`, of the graph that is traced."""
    note_unpaired(place, _unpaired_in_graph())


_traced_run._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in qsim.graph.execute.traced
