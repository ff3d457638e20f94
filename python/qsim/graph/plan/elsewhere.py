"""What the layers of a model do where no example called them: on another path through a forward, or nowhere.

A weight belongs to its layer, and is quantized wherever the layer is called; so are its other parameters if they are where the examples
called it, or in half precision, and what the layer reads with a scale from each token. A result has its layer's own quantizer, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qsim.config.config import Config
from qsim.config.override import SiteInfo
from qsim.graph.plan.actions import Actions, Elsewhere, PlannedQuantizer, Use
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.ledger import Ledger
from qsim.graph.plan.placement import Placement
from qsim.graph.plan.reasons import NOT_REACHED
from qsim.graph.plan.rules import computed_spec, weight_axes, weight_spec
from qsim.graph.plan.specs import is_half
from qsim.graph.record.containers import full_name
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Slot, Tape
from qsim.numbers.spec import TensorSpec
from qsim.operations.functions import WEIGHT
from qsim.operations.recurrent import RECURRENT_LAYERS

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
_OPENED = (*RECURRENT_LAYERS, "MultiheadAttention", "NonDynamicallyQuantizableLinear")


@dataclass(frozen=True)
class _Layer:
    """A weight of a layer that no example called.

    Attributes
    ----------
    path : str
        Of the layer.
    info : SiteInfo
        Of what reads the weight, as overrides may ask for it.
    op : str
        The function that does.
    weight : str
        Where the model has the weight.
    dims : int
    slot : int or None
        Where that function takes it, if the layer calls it itself.
    computed : bool
        Whether the layer computes its weight, by a parametrization or a hook.
    read : bool
        Whether something else reads the weight: transposed, a part of it.
    """

    path: str
    info: SiteInfo
    op: str
    weight: str
    dims: int
    slot: int | None = None
    computed: bool = False
    read: bool = False

    @property
    def key(self) -> str:
        """That of its quantizer."""
        return f"{self.info.name}.weight" if self.computed else self.weight


def elsewhere_of(flow: Dataflow, actions: Mapping[Site, Actions], quantizers: Mapping[str, PlannedQuantizer]) -> dict[str, Elsewhere]:
    """What each leaf that the examples called does elsewhere, by its path."""
    sites: dict[str, list[Site]] = defaultdict(list)
    for site in flow.sites:
        if site.steps[0].leaf and site.visible and not site.moves and not flow.is_constant(site) and not site.training_only:
            sites[site.steps[0].leaf].append(site)
    found = {}
    for leaf, own in sites.items():
        planned = actions.get(own[0], Actions())
        read = {slot: use for slot, use in planned.operands.items() if _is_its_own(quantizers[use.key])}
        results = planned.outputs if len(own) == 1 else {}
        functions = {site.steps[0].key[2] for site in own}
        if (read or results) and len(functions) == 1:
            found[leaf] = Elsewhere(functions.pop(), Actions(read, dict(results)))
    return found


def _is_its_own(planned: PlannedQuantizer) -> bool:
    """Whether a layer quantizes an operand wherever it is called: a parameter, or what it reads if the scale comes from that itself."""
    return planned.role == "weight" or planned.parameter is not None or planned.spec.is_dynamic


def plan_unreached(tape: Tape, ledger: Ledger, config: Config, placement: Placement) -> dict[str, Elsewhere]:
    """Plan the weights of layers that no example called, and what such layers do where they are called, by their paths."""
    found = {}
    for layer in _unreached(tape, ledger.quantizers):
        name, spec = layer.info.name, config.spec_of(layer.info, "weight")
        if layer.key not in ledger.quantizers and placement.weighs(layer.info) and spec is not None:
            spec = weight_spec(spec, weight_axes(layer.op, "weight"), layer.dims)
            if layer.computed:
                ledger.add(layer.key, "weight", computed_spec(spec), layer.op, reader=name, attribute=layer.weight)
            else:
                ledger.add(layer.key, "weight", spec, layer.op, layer.weight, reader=name)
            if not layer.read:
                ledger.leave(f"{name}.output", layer.op, NOT_REACHED)
        biases = _round_biases(layer, tape, ledger, config.spec_of(layer.info, "activation"))
        if layer.slot is not None and layer.key in ledger.quantizers:
            found[layer.path] = Elsewhere(layer.op, Actions({layer.slot: Use(layer.key), **biases}))
    return found


def _round_biases(layer: _Layer, tape: Tape, ledger: Ledger, spec: TensorSpec | None) -> dict[Slot, Use]:
    """In half precision a layer's biases are rounded as its weight is, without a range to choose. Returns those that it hands to its
    function itself."""
    if not is_half(spec):
        return {}
    assert spec is not None
    own = [key for key in tape.shapes if key.rpartition(".")[0] == layer.path and "bias" in key.rpartition(".")[2]]
    for key in own:
        ledger.add(key, "constant", spec, layer.op, key, reader=layer.info.name)
    bias = full_name(layer.path, "bias")
    return {layer.slot + 1: Use(bias)} if layer.slot is not None and bias in own else {}


def _unreached(tape: Tape, quantizers: Mapping[str, PlannedQuantizer]) -> Iterator[_Layer]:
    """The layers that no example called, each weight of theirs by itself."""
    called = {step.leaf for step in tape.steps} | {call.path for call in tape.calls}
    read = {o.source for step in tape.steps for found in step.operands.values() for o in found if o.kind == "const"}
    for path, kind in tape.layers.items():
        if path in called or tape.is_parametrization(path):
            continue
        op, name = _FUNCTIONS.get(kind.name), tape.modules[path]
        if op is not None:
            weight, reader = full_name(path, "weight"), path if kind.leaf else full_name(path, op)
            computed, shape = weight not in tape.shapes, tape.shapes.get(weight)
            if kind.plain or not computed:
                info = SiteInfo(reader, op, name if kind.leaf else None, shape)
                slot = _POSITIONS[op] if kind.leaf or computed else None
                yield _Layer(path, info, op, weight, _dims(op), slot, computed, weight in read)
        elif kind.name in _OPENED:
            weights = [key for key in tape.shapes if key.startswith(f"{path}.") and "weight" in key.removeprefix(f"{path}.")]
            for key in weights:
                if "." not in key.removeprefix(f"{path}.") and key not in quantizers and key not in read:
                    yield _Layer(path, SiteInfo(path, "linear", name, tape.shapes[key]), "linear", key, len(tape.shapes[key]))


def _dims(op: str) -> int:
    """The dimensions of the weight that a function takes."""
    return 2 + int(op[-2]) if op.startswith("conv") else 3 if op == "bilinear" else 2
