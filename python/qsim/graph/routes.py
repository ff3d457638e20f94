"""Routes: where in a container's forward an operation stands, found again at run time by the names of the functions called so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from qsim.graph.functions import Function, name_of, route_name, visible
from qsim.graph.onnx_types import onnx_type
from qsim.graph.tape import Origin, Slot, Step, Tape


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
        return visible(self.steps[0].func)

    @property
    def outputs(self) -> int:
        return max(step.outputs for step in self.steps)

    @property
    def training_only(self) -> bool:
        return all(step.training for step in self.steps)

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
        return next(step.dims[slot] for step in self.steps if slot in step.dims)


@dataclass
class Route:
    """The calls of one container as a trie: node, function name, next node. Node 0 starts a call in eval, node 1 one in training."""

    next: list[dict[str, int]] = field(default_factory=lambda: [{}, {}])
    sites: list[Site | None] = field(default_factory=lambda: [None, None])
    # Path of the n-th frame that is entered at a node, and of the last one of a name: a sequence may be longer than the recorded one.
    frames: dict[tuple[int, int | str], str] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)  # operations that no mode meets under Dynamo, and that are met in eager all the same


def build_routes(tape: Tape, is_visible: Callable[[Function], bool] = visible) -> tuple[dict[str, Route], dict[Step, Site]]:
    """The route of every container by path, and the site of every step in the order in which the steps ran.

    Operations that are not `is_visible` have no node: by default those that Dynamo does not show to a mode.

    Eval and training have tries of their own, because a model may call other functions there (stochastic depth, NAFNet's pooling);
    a training step that aligns with an eval step is the same site.
    """
    routes: dict[str, Route] = defaultdict(Route)
    unseen: dict[tuple[str, int, int], Site] = {}  # by path, node, and how many unseen steps stand between that node and this one
    evals: dict[str, list[tuple[list[Step], list[Site]]]] = defaultdict(list)
    names, repeats = _Names(), Counter[str]()
    site_of: dict[Step, Site] = {}
    for call in tape.calls:
        route, at, since, sites = routes[call.path], int(call.training), 0, []
        aligned: dict[int, Site] = {}
        if call.training and evals[call.path]:
            aligned = _aligned(*evals[call.path][min(repeats[call.path], len(evals[call.path]) - 1)], call.steps)
            repeats[call.path] += 1
        passed = [at]
        for index, step in enumerate(call.steps):
            if is_visible(step.func):
                at, since = _follow(route, at, route_name(step.func)), 0
                site = route.sites[at] = route.sites[at] or aligned.get(index) or names.site(step)
            else:
                since += 1
                route.unseen.add(name_of(step.func))
                site = unseen[call.path, at, since] = unseen.get((call.path, at, since)) or aligned.get(index) or names.site(step)
            site.steps.append(step)
            sites.append(site)
            passed.append(at)
            site_of[step] = site
        entered = Counter[int]()
        for before, frame in call.frames:
            route.frames.setdefault((passed[before], entered[passed[before]]), frame)
            route.frames[passed[before], frame.rpartition(".")[2]] = frame
            entered[passed[before]] += 1
        if not call.training:
            evals[call.path].append((call.steps, sites))
    return dict(routes), {step: site_of[step] for step in tape.steps}


def _follow(route: Route, at: int, name: str) -> int:
    """The node that `name` leads to, made if there is none."""
    if name not in route.next[at]:
        route.next[at][name] = len(route.next)
        route.next.append({})
        route.sites.append(None)
    return route.next[at][name]


def _aligned(recorded: list[Step], sites: list[Site], steps: list[Step]) -> dict[int, Site]:
    """Sites of an eval call for those of a training call's steps that are the same operations: the longest common runs."""
    theirs, ours = ([(route_name(step.func), step.leaf) for step in call] for call in (recorded, steps))
    matches = SequenceMatcher(None, theirs, ours, autojunk=False).get_matching_blocks()
    return {j + k: sites[i + k] for i, j, length in matches for k in range(length)}


class _Names:
    """Gives each operation a name of its own."""

    def __init__(self) -> None:
        self._given: Counter[str] = Counter()

    def site(self, step: Step) -> Site:
        self._given[step.name] += 1
        count = self._given[step.name]
        return Site(step.name if count == 1 else f"{step.name}_{count}")
