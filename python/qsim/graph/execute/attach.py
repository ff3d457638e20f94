"""Attach: each container's class is swapped for a subclass whose forward follows the plan. Module paths and state-dict keys stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn

from qsim.graph.execute.inputs import Inputs
from qsim.graph.execute.layers_alone import OWN, Pair, link_layers, pair, release_layer, simulate_alone
from qsim.graph.execute.methods import PLACE
from qsim.graph.execute.place import UNKNOWN_PATH, Place
from qsim.graph.execute.shortcuts import Kept
from qsim.graph.execute.simulated import simulated, written_as
from qsim.graph.execute.switch import Switch
from qsim.graph.plan.actions import QuantizationPlan
from qsim.graph.plan.savings import Saving
from qsim.graph.record.call_sites import LEAF
from qsim.graph.record.containers import containers, leaf_paths, leaves, parametrizing
from qsim.graph.record.routes import Site
from qsim.graph.record.telling import Telling
from qsim.quantizers.quantizer import Quantizer


def attach(
    model: nn.Module,
    plan: QuantizationPlan,
    savings: Mapping[Site, Saving],
    quantizers: Mapping[str, Quantizer],
    switch: Switch,
    pairs: Iterable[Pair] = (),
) -> list[str]:
    """Make every container of `model` follow the plan. Returns a sentence for each that could not be made to. `pairs`: layers, with the
    BatchNorms that are folded into them."""
    notes: list[str] = []
    kept: dict[tuple[str, ...], Kept] = {}
    found = dict(containers(model))
    switch.model = model
    for leaf, path in leaf_paths(model).items():
        vars(leaf)[LEAF] = path
    made = {path: Place(path, plan, savings, quantizers, kept, switch) for path in {*plan.routes, UNKNOWN_PATH} - found.keys()}
    for path, module in found.items():
        inside = [vars(m)[LEAF] for m in module.modules() if LEAF in vars(m)]  # it may call those of containers inside
        made[path] = Place(path, plan, savings, quantizers, kept, switch, inside)
    computing = parametrizing(model)
    for path, place in made.items():
        place.places, place.quiet = made, f"{path}.".startswith(computing)
    planned = {*plan.elsewhere, *(name.rpartition(".")[0] for name in plan.weights)}
    met: Counter[type] = Counter()
    for path, module in found.items():
        original = type(module)
        try:
            module.__class__ = simulated(original, tuple(made[path].homes), met[original])  # type: ignore[arg-type]  # Module's __hash__
        except TypeError as error:
            notes.append(Telling(f"'{path}' is not simulated: its class {original.__name__} takes no subclass here ({error})"))
            continue
        met[original] += 1
        inputs = Inputs(original, plan, quantizers, switch.written) if path == "" and plan.inputs else None
        vars(module)[PLACE] = (made[path], inputs)
        for layer in leaves(module):
            if vars(layer)[LEAF] in planned:
                simulate_alone(layer)
        link_layers(module)
    pair(model, pairs)
    return [*notes, *_with_dense_gradients(model, plan)]


def _with_dense_gradients(model: nn.Module, plan: QuantizationPlan) -> list[str]:
    """The gradient of a quantized table goes through its quantizer, which knows dense ones."""
    notes: list[str] = []
    for parameter in filter(None, (planned.parameter for planned in plan.quantizers.values())):
        path = parameter.rpartition(".")[0]
        owner = model.get_submodule(path)
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
            owner.sparse = False
            notes.append(
                Telling(
                    f"'{path}' has sparse=True, and is quantized: its gradient is dense here, which SparseAdam does not take (Adam does)"
                )
            )
    return notes


def fall_back(model: nn.Module, formats: Mapping[str, str], quantizers: Mapping[str, Quantizer]) -> None:
    """From now on the operations in `formats`, by name, compute in these float formats, and all others as planned."""
    kept: dict[tuple[str, ...], Kept] = {}
    for place in places(model):
        place.fall_back(formats, kept)
    for module in model.modules():
        if PLACE in vars(module) and (inputs := vars(module)[PLACE][1]) is not None:
            inputs.fall_back(formats, quantizers)


def detach(model: nn.Module) -> nn.Module:
    """Undo `attach`: every container runs as it was written, and so do layers that were taken out of a simulation."""
    for module in model.modules():
        release_layer(module)
        vars(module).pop(LEAF, None)
        vars(module).pop(OWN, None)
        if vars(module).pop(PLACE, None) is not None:
            module.__class__ = written_as(type(module))  # type: ignore[assignment]
    return model


def places(model: nn.Module) -> list[Place]:
    """The places of all containers that follow a plan, and of the frames in them."""
    found = [vars(module)[PLACE][0] for module in model.modules() if PLACE in vars(module)]
    return list(dict.fromkeys(place for one in found[:1] for place in one.places.values()))
