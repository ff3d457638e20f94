"""Routes: which operations a container's forward has, found again at run time by the place in the program where each was called."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from qsim.graph.record.call_sites import CallSite, is_written_out
from qsim.graph.record.tape import Call, CallKey, Origin, Slot, Step, Tape
from qsim.operations.functions import name_of, route_name
from qsim.operations.onnx_types import onnx_type


def call_key(site: CallSite, name: str, *, framed: bool = False) -> CallKey:
    """What tells a call from all others of its container, but for the repetitions of a loop.

    Parameters
    ----------
    site : CallSite
    name : str
        Of the function, without underscores: `add` for `add_` and `__add__`.
    framed : bool
        Whether the call is part of a frame: the same wherever the composite function was called.
    """
    if framed:
        return tuple(spot for spot in site.spots if is_written_out(spot)), "", name
    return site.spots, site.leaf_path, name


@dataclass(eq=False)
class Site:
    """One operation of a container: the same call in every recording it appears in.

    Attributes
    ----------
    name : str
        As `Step.name`; a second operation of the same name is ``layer1.0.add_2``.
    steps : list of Step
        The recorded calls.
    """

    name: str
    steps: list[Step] = field(default_factory=list)

    @property
    def layer(self) -> str | None:
        """Of a later call of a layer the name of its first."""
        leaf = self.steps[0].leaf
        return leaf if leaf and leaf != self.name else None

    @property
    def op(self) -> str:
        """The function's name, without underscores."""
        return name_of(self.steps[0].func)

    @property
    def type(self) -> str:
        """The ONNX operator type, by which rules of targets name it."""
        return onnx_type(self.op)

    @property
    def kind(self) -> str:
        return self.steps[0].kind

    @property
    def visible(self) -> bool:
        """Whether a function mode meets the call when the model runs."""
        return all(step.visible for step in self.steps)

    @property
    def replaceable(self) -> bool:
        """Whether a quantizer can stand where it returns its results: see `Step.replaceable`."""
        return all(step.replaceable for step in self.steps)

    @property
    def moves(self) -> bool:
        """Whether it computes nothing: see `Step.moves`."""
        return self.steps[0].moves

    @property
    def evaluated(self) -> list[Step]:
        """The calls that were recorded in evaluation; all of them where none was."""
        return [step for step in self.steps if not step.run] or self.steps

    @property
    def outputs(self) -> int:
        return max((index + 1 for step in self.steps for index in step.results), default=0)

    @property
    def training_only(self) -> bool:
        return all(step.training for step in self.steps)

    def takes_in_training_only(self, slot: Slot) -> bool:
        """Whether no call in evaluation has a floating-point operand there: `x + (noise if self.training else 1.0)`."""
        return all(step.training for step in self.steps if slot in step.operands)

    def operands(self) -> dict[Slot, list[Origin]]:
        """Every origin of every floating-point operand, over all calls."""
        found: dict[Slot, dict[Origin, None]] = defaultdict(dict)
        for step in self.steps:
            for slot, origins in step.operands.items():
                found[slot].update(dict.fromkeys(origins))
        return {slot: list(origins) for slot, origins in found.items()}

    def tensors(self, slot: Slot) -> tuple[object, ...] | None:
        """Which tensors its calls read at an operand; None where that is not known."""
        found = tuple(step.same.get(slot) for step in self.steps)
        return found if all(found) else None

    @property
    def first_operand(self) -> Slot | None:
        """Where every call has a floating-point operand; None if there is no such place."""
        return next((slot for slot in self.steps[0].operands if all(slot in step.operands for step in self.steps)), None)

    def dims(self, slot: Slot) -> int:
        return next(len(step.shapes[slot]) for step in self.steps if slot in step.shapes)


@dataclass
class Route:
    """The operations of one container.

    Attributes
    ----------
    nodes : dict of CallKey to list of int or None
        Where each call leads that a mode meets: to a node, for its first occurrence in a call of the container, its second, and so on.
        None: nowhere.
    sites : list of Site
        The site of each node.
    calls : dict of bool to list of Counter
        How often what is a key of `nodes` or `unmet` was called in each recorded call, of eval (False) and of training.
    unmet : dict of CallKey to list of Site
        Calls that were recorded, and lead nowhere: no mode meets them under Dynamo, and eager modes pass them by. Those of one place in a
        call of the container, and what differs between calls of it, in the order of the examples.
    """

    nodes: dict[CallKey, list[int | None]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    calls: dict[bool, list[Counter[CallKey]]] = field(default_factory=lambda: {False: [], True: []})
    unmet: dict[CallKey, list[Site]] = field(default_factory=dict)

    def site(self, step: Step) -> Site | None:
        """The site that a step leads to, None if there is none yet."""
        nodes = self.nodes.get(step.key, [])
        at = nodes[step.ordinal] if step.ordinal < len(nodes) else None
        return None if at is None else self.sites[at]

    def skips(self, site: Site) -> bool:
        """Whether calls were recorded at the places of a site, here, that are no steps of it: what moves values is one only where it is the
        first to read them."""
        steps = Counter((step.key, step.ordinal) for step in site.steps)
        calls = [called for recorded in self.calls.values() for called in recorded]
        return any(sum(called[key] > ordinal for called in calls) > count for (key, ordinal), count in steps.items())

    def lead(self, step: Step, site: Site) -> None:
        """Have a step, and all others at its place, lead to a site."""
        nodes = self.nodes.setdefault(step.key, [])
        nodes += [None] * (step.ordinal + 1 - len(nodes))
        if nodes[step.ordinal] is None:
            nodes[step.ordinal] = len(self.sites)
            self.sites.append(site)


def build_routes(tape: Tape, is_met: Callable[[Step], bool] = lambda step: step.visible) -> tuple[dict[str, Route], dict[Step, Site]]:
    """The route of every container by path, and the site of every step in the order in which the steps ran.

    Steps that are not met have no node: by default those that Dynamo does not show to a mode, and those of hooks.

    A call in training that no recorded call of eval made at that place, but one made at another, with the same function of the same
    module, of as many tensors, in the same order, is the same site: a forward may have two branches that both begin with `self.conv(x)`.
    """
    routes: dict[str, Route] = defaultdict(Route)
    unmet: dict[tuple[str, CallKey, int], Site] = {}
    evals: dict[str, list[tuple[list[Step], list[Site]]]] = defaultdict(list)
    names, repeats = _Names(), Counter[str]()
    site_of: dict[Step, Site] = {}
    for call in tape.calls:
        route, aligned = routes[call.path], dict[int, Site]()
        if call.training and evals[call.path]:
            recorded = evals[call.path][min(repeats[call.path], len(evals[call.path]) - 1)]
            aligned = _aligned(*recorded, call.steps)
            repeats[call.path] += 1
        for index, step in enumerate(call.steps):
            at = call.path, step.key, step.ordinal
            site = unmet.get(at) or route.site(step) or aligned.get(index) or names.site(step)
            if is_met(step):
                route.lead(step, site)
            else:
                found = route.unmet.setdefault(step.key, [])
                found += [] if site in found else [site]
                unmet[at] = site
            site.steps.append(step)
            site_of[step] = site
        route.calls[call.training].append(_counted(call, route))
        if not call.training:
            evals[call.path].append((call.steps, [site_of[step] for step in call.steps]))
    return dict(routes), {step: site_of[step] for step in tape.steps}


def _counted(call: Call, route: Route) -> Counter[CallKey]:
    return Counter({key: count for key, count in call.called.items() if key in route.nodes or key in route.unmet})


def _aligned(recorded: list[Step], sites: list[Site], steps: list[Step]) -> dict[int, Site]:
    """Sites of an eval call for those of a training call's steps that are the same operations: the longest common runs of calls by name,
    without what either made at a place of its own that the other has too."""
    at, taken = ({(step.key, step.ordinal) for step in call} for call in (recorded, steps))
    if taken <= at or at <= taken:
        return {}
    theirs, ours = ([_operation(step) for step in call] for call in (recorded, steps))
    matches = SequenceMatcher(None, theirs, ours, autojunk=False).get_matching_blocks()
    pairs = [(i + k, j + k) for i, j, length in matches for k in range(length)]
    return {
        j: sites[i] for i, j in pairs if (steps[j].key, steps[j].ordinal) not in at and (recorded[i].key, recorded[i].ordinal) not in taken
    }


def _operation(step: Step) -> tuple[Hashable, ...]:
    """What two calls of one operation have alike: the function, the module, where tensors are passed, and what the call reads of the
    model's parameters and buffers, all or parts of them: attention's own weight as its arguments ask."""
    constants = frozenset((slot, origin) for slot, origins in step.operands.items() for origin in origins if origin.kind == "const")
    return route_name(step.func), step.leaf, frozenset(step.operands), constants


class _Names:
    """Gives each operation a name of its own."""

    def __init__(self) -> None:
        self._given: Counter[str] = Counter()

    def site(self, step: Step) -> Site:
        self._given[step.name] += 1
        count = self._given[step.name]
        return Site(step.name if count == 1 else f"{step.name}_{count}")
