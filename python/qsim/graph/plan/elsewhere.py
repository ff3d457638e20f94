"""What the layers of a model do where no example called them: on another path through a forward, or nowhere.

A weight belongs to its layer, and is quantized wherever the layer is called. A result has its layer's own quantizer, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qsim.config.override import SiteInfo
from qsim.graph.plan.actions import Actions, Elsewhere, PlannedQuantizer
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.record.containers import full_name
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Tape
from qsim.operations.functions import WEIGHT

# Classes of torch.nn, and the function that each calls with its weight.
_FUNCTIONS = {
    "Linear": "linear",
    "Embedding": "embedding",
    "EmbeddingBag": "embedding_bag",
    "Bilinear": "bilinear",
    **{f"{lazy}Conv{n}d": f"conv{n}d" for n in (1, 2, 3) for lazy in ("", "Lazy")},
    **{f"{lazy}ConvTranspose{n}d": f"conv_transpose{n}d" for n in (1, 2, 3) for lazy in ("", "Lazy")},
}
_POSITIONS = {**{op: position for op, (position, _) in WEIGHT.items()}, "embedding_bag": 1, "bilinear": 2}
# Classes that hand parameters to `linear` out of an inside of their own.
_OPENED = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "MultiheadAttention", "NonDynamicallyQuantizableLinear")


@dataclass(frozen=True)
class Layer:
    """A weight that no example reached.

    Attributes
    ----------
    info : SiteInfo
        Of the layer, as overrides may ask for it.
    op : str
        The function that reads the weight.
    parameter : str
    slot : int or None
        Where that function takes it, if the layer calls it itself.
    """

    info: SiteInfo
    op: str
    parameter: str
    slot: int | None


def elsewhere_of(flow: Dataflow, actions: Mapping[Site, Actions], quantizers: Mapping[str, PlannedQuantizer]) -> dict[str, Elsewhere]:
    """What each leaf that the examples called does elsewhere, by its path."""
    sites: dict[str, list[Site]] = defaultdict(list)
    for site in flow.sites:
        if site.steps[0].leaf and site.visible and not site.moves and not flow.is_constant(site) and not site.training_only:
            sites[site.steps[0].leaf].append(site)
    found = {}
    for leaf, own in sites.items():
        planned = actions.get(own[0], Actions())
        weights = {slot: use for slot, use in planned.operands.items() if quantizers[use.key].role == "weight"}
        results = planned.outputs if len(own) == 1 else {}
        functions = {site.steps[0].key[2] for site in own}
        if (weights or results) and len(functions) == 1:
            found[leaf] = Elsewhere(functions.pop(), Actions(weights, dict(results)))
    return found


def unreached(tape: Tape, quantizers: Mapping[str, PlannedQuantizer]) -> Iterator[Layer]:
    """The layers that no example called, each weight of theirs by itself."""
    called = {step.leaf for step in tape.steps} | {call.path for call in tape.calls}
    read = {o.source for step in tape.steps for found in step.operands.values() for o in found if o.kind == "const"}
    for path, name in tape.modules.items():
        if path in called:
            continue
        op = _FUNCTIONS.get(name)
        if op is not None and full_name(path, "weight") not in read and (shape := tape.shapes.get(full_name(path, "weight"))) is not None:
            yield Layer(SiteInfo(path, op, name, shape), op, full_name(path, "weight"), _POSITIONS[op])
        elif name in _OPENED:
            weights = [key for key in tape.shapes if key.startswith(f"{path}.") and "weight" in key.removeprefix(f"{path}.")]
            for key in weights:
                if "." not in key.removeprefix(f"{path}.") and key not in quantizers and key not in read:
                    yield Layer(SiteInfo(path, "linear", name, tape.shapes[key]), "linear", key, None)
