"""The same weights simulated for another target, with ranges from what was observed for the first one.

Both simulations are traced. Without their marks, and the gates that marks are for, the graphs are the same, node by node, so the tensor
that a new quantizer stands at is found among those that the old ones stand at.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from torch import nn
from torch.fx import Node

from qsim.batch_norm.folded_states import fold_what_is_loaded
from qsim.batch_norm.statistics import batch_norms
from qsim.config.profile import PROFILES, Profile
from qsim.errors import CalibrationError
from qsim.graph.execute.attach import detach
from qsim.graph.execute.marks import BIAS, QUANTIZED
from qsim.graph.plan.actions import PlannedQuantizer
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.observer import encoding_of_range
from qsim.quantizers.quantizer import Quantizer
from qsim.quantizers.running_observer import RunningObserver
from qsim.runs.arguments import Arguments
from qsim.simulation.range_choice import fit_biases
from qsim.simulation.simulation import Simulation
from qsim.trace.capture import Program, capture
from qsim.trace.marks_behind_moves import key_of, moved_from

Sim = TypeVar("Sim", bound=Simulation)
Position = tuple[int, int] | str  # in the trace of which call, or what the model holds
Place = tuple[Position, Position]
Places = Mapping[str, set[Place]]


def retarget(sim: Sim, target: str | Profile, calls: Sequence[Arguments] | None = None) -> Sim:
    """`QuantSim.retarget` documents it. `calls`: the example calls that it is made for, all of them by default."""
    sim.check_calibrated()
    twin, calls = copy.deepcopy(sim).eval(), sim.calls if calls is None else calls
    twin.fall_back({})
    before = _places(twin, calls)
    detach(twin.model)
    made = type(sim)(twin.model, [args or kwargs for args, kwargs in calls], dataclasses.replace(sim.config, target=target), inplace=True)
    _go_on(made, sim)
    sources = _sources(before, _places(made, calls))
    old, new = twin.quantizers(), made.quantizers()
    unseen = []
    for key, planned in made.decisions.quantizers.items():
        if planned.parameter is not None:
            _take_weight(new[key], planned, sim, made.model)
        elif planned.range is None:
            found = [old[name] for name in sources.get(key, ())]
            if not _take_activation(new[key], found):
                unseen.append(key)
        else:
            new[key].enabled = all(old[name].enabled for name in sources.get(key, ()))
    if unseen:
        name = made.config.profile.name
        shown = ", ".join(map(repr, unseen[:8])) + (f" and {len(unseen) - 8} more" if len(unseen) > 8 else "")
        wanted = repr(name) if name in PROFILES else f"the profile {name!r}"
        raise CalibrationError(
            f"QuantSim.retarget: {name!r} quantizes {shown}, which {sim.config.profile.name!r} leaves in float, inside an operation or as "
            "the model's result, so that no range was observed there. Simulate the model for that target, and calibrate it: "
            f"QuantSim(model, example_inputs, dataclasses.replace(sim.config, target={wanted}))"
        )
    fit_biases(made, made.decisions.biases)
    made.fall_back({name: format for name, format in sim.quantization.formats.items() if name in made.decisions.operations})
    return made


def _go_on(made: Simulation, sim: Simulation) -> None:
    """What became of a simulation since it was made holds for the new one, too."""
    made.folds = sim.folds + made.folds
    fold_what_is_loaded(made.model, made.folds)
    _know_restored(made, sim)
    made.frozen |= sim.frozen & set(batch_norms(made.model))
    if sim.read is not None:
        read = {planned.parameter for key, planned in sim.decisions.quantizers.items() if key in sim.read}
        made.read = frozenset(key for key, planned in made.decisions.quantizers.items() if planned.parameter in read)


def _know_restored(made: Simulation, sim: Simulation) -> None:
    keys = {planned.parameter: key for key, planned in made.decisions.quantizers.items() if planned.parameter is not None}
    called = {key: keys.get(sim.quantization.path_of(key), "") if key else "" for key in sim.quantization.restored}
    found = made.quantization.restored
    for key, did in sim.quantization.restored.items():
        found[called[key]] = found.get(called[key], 0) | did
    made.quantization.restored = found
    made.bind(filter(None, (called[key] for key in sim.bound_weights())))


def _take_weight(quantizer: Quantizer, planned: PlannedQuantizer, sim: Simulation, model: nn.Module) -> None:
    """The encoding that the same parameter has, if it fits, which keeps trained and raised scales; otherwise one from its values."""
    for key, other in sim.decisions.quantizers.items():
        if other.parameter == planned.parameter:
            quantizer.enabled = sim.quantizers()[key].enabled
            if (encoding := _kept(sim.quantizers()[key], quantizer.spec)) is not None:
                quantizer.set_encoding(encoding)
                return
    if quantizer.spec.has_scale:
        quantizer.compute_encoding_from(attrgetter(str(planned.parameter))(model).detach())


def _take_activation(quantizer: Quantizer, sources: list[Quantizer]) -> bool:
    """An encoding from what several quantizers observed; False if that is nothing."""
    spec = quantizer.spec
    quantizer.enabled = not sources or any(source.enabled for source in sources)
    if not sources:
        return not spec.has_scale
    known = [encoding for source in sources if (encoding := source.encoding) is not None]
    seen = [source for source in sources if source.counts.elements]
    mergeable = [s for s in seen if not isinstance(s.observer, RunningObserver) and s.observer.axis == spec.axis]
    if not isinstance(quantizer.observer, RunningObserver):
        for source in mergeable:
            quantizer.merge(source)
    if not spec.has_scale:
        return True
    if len(sources) == 1 and (kept := _kept(sources[0], spec)) is not None:
        quantizer.set_encoding(kept)
    elif len(mergeable) == len(sources) and not isinstance(quantizer.observer, RunningObserver):
        used = sources[0].spec  # has the method last used, which the config does not know
        quantizer.compute_encoding(used.method, percentile=used.percentile, gamma=used.gamma)
    elif len(known) == len(sources) and spec.axis is None:  # nothing but ranges is known: of a state dict, or that follow the batches
        low, high = (min(e.min.min() for e in known), max(e.max.max() for e in known))
        quantizer.set_encoding(encoding_of_range(low.float(), high.float(), spec))
    else:
        return False
    return True


def _kept(source: Quantizer, spec: TensorSpec) -> Encoding | None:
    """The encoding of `source`, if a quantizer with `spec` could have chosen it."""
    encoding, own = source.encoding, source.spec
    grids = [(s.quant_min, s.quant_max, s.axis, s.block_size, s.encoding_dtype, s.symmetric) for s in (own, spec)]
    return encoding if grids[0] == grids[1] else None


def _gates(sim: Simulation) -> set[str]:
    return {key for key, planned in sim.decisions.quantizers.items() if planned.role == "gate"}


def _sources(old: Places, new: Places) -> Mapping[str, dict[str, None]]:
    """For each quantizer of `new`, those of `old` at the same tensors, or at tensors that these are moved from."""
    return {key: {name: None for place in tensors for name in _at(place, old)} for key, tensors in new.items()}


def _at(place: Place, places: Places) -> list[str]:
    exact = [key for key, tensors in places.items() if place in tensors]
    return exact or [key for key, tensors in places.items() if any(base == place[1] for _, base in tensors)]


def _places(sim: Simulation, calls: Sequence[Arguments]) -> Places:
    """For each quantizer of a simulation the tensors that it stands at in these calls: see `_places_in`."""
    gates, found = _gates(sim), dict[str, set[Place]]()
    for call, (args, kwargs) in enumerate(calls):
        program = capture(sim, args, kwargs, open_batch=False)  # positions alone are asked for: open sizes take a third of the time
        for key, places in _places_in(program, gates, call).items():
            found.setdefault(key, set()).update(places)
    return found


def _places_in(program: Program, gates: Collection[str], call: int) -> Places:
    """For each quantizer, but for those of gates, the tensors that it stands at, and those that they are moved from: by their positions
    among all but marks and gates, without which a product with a gate is the activation that others have. What the model holds goes by
    its name: a BatchNorm that is a layer of its own has other parameters."""
    nodes, held = program.exported.graph.nodes, {node: node.name for node in program.held}
    inside = {node.args[0] for node in nodes if key_of(node) in gates}
    counted = (node for node in nodes if not _is_mark(node) and node not in inside and node not in held)
    position: dict[Node, Position] = {**held, **{node: (call, i) for i, node in enumerate(counted)}}
    found: dict[str, set[Place]] = {}
    for node in nodes:
        if (key := key_of(node)) is not None and key not in gates:
            tensor = _behind_marks(node)
            base = tensor
            while (moved := moved_from(base)) is not None:
                base = _behind_marks(moved)
            found.setdefault(key, set()).add((position[tensor], position[base]))
    return found


def _is_mark(node: Node) -> bool:
    return node.op == "call_function" and node.target in (QUANTIZED, BIAS)


def _behind_marks(node: Node) -> Node:
    while _is_mark(node):
        node = node.args[0]  # type: ignore[assignment]
    return node
