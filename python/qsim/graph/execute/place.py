"""What one container does while it is simulated: which quantizers stand at which calls, and how a call is recognized."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, count
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from qsim.graph.execute.homes import homes_of
from qsim.graph.execute.inputs import is_cast
from qsim.graph.execute.known import known_calls
from qsim.graph.execute.links import calls_before, ends_between, kept_for_others, links_of, memory_read, passed_link, reads_again
from qsim.graph.execute.lowered import (
    LiveMaker,
    Maker,
    MarkMaker,
    Quantize,
    fallen_site,
    marked,
    planned_site,
    rounding_inside,
    site_beside,
)
from qsim.graph.execute.marks import BiasMark, Mark, RoundingMark
from qsim.graph.execute.nodes import (
    HOOK,
    PASSED,
    QUIET,
    STRANGE,
    Apart,
    Node,
    Nodes,
    WrittenOut,
    own_weight,
    own_weights,
    rename,
    saving_node,
    weights_read,
)
from qsim.graph.execute.noticed import Noticing
from qsim.graph.execute.shortcuts import FrugalMaker, Kept
from qsim.graph.execute.switch import Switch
from qsim.graph.plan.actions import Actions, QuantizationPlan
from qsim.graph.plan.savings import Saving, kept_operands
from qsim.graph.record.call_sites import LEAF, CallSite, Spot, kind_of_code, layer_in
from qsim.graph.record.containers import full_name
from qsim.graph.record.routes import Route, Site, call_key
from qsim.graph.record.tape import CallKey, Slot, Step
from qsim.operations.functions import MAC
from qsim.operations.gates import Gated
from qsim.operations.half import Half
from qsim.quantizers.observer import Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.arguments import Arguments, is_dense

UNKNOWN_PATH = "?"  # in place of the path of a frame that the examples did not show


class Hint(NamedTuple):
    """How to recognize the call that came next the last time without looking at the whole stack: the frames that tell its place, by
    their distance, with the instruction that they are at; the leaf, or what took its place, in whose own function it is; and the key."""

    name: str
    near: int
    near_code: CodeType
    near_at: int
    far: int  # 0: there is no second frame
    far_code: CodeType | None
    far_at: int
    more: tuple[tuple[int, CodeType, int], ...]
    leaf: nn.Module | None
    key: int


class Place(Noticing):
    """What one container does: the quantizers at each of its nodes, and the calls that lead there.

    Read-only while the model runs, but for what it learns: hints, and what ran that the examples did not show.

    Attributes
    ----------
    path : str
        Of the container.
    switch : Switch
    keys : dict of CallKey to int
        Numbers of the calls that lead to nodes. Those behind `width` are of leaves, wherever these are called (`elsewhere`), and of the
        container itself ("") if it is a layer that no example reached.
    nodes_of : list of list of int or None
        By key: the nodes of its first occurrence in a call of the container, its second, and so on; None: nothing is to be done.
    weights_read : list of tuple of (Slot, str)
        By node: where it reads quantized weights, with the keys of their quantizers.
    names : set of str
        Names of functions whose place is asked for.
    quiet : bool
        Whether what runs here and the examples did not show is of no interest: it computes a parameter.
    token : int
        What stands for the place, as it is now, where Dynamo takes constants alone.
    """

    def __init__(
        self,
        path: str,
        plan: QuantizationPlan,
        savings: Mapping[Site, Saving],
        quantizers: Mapping[str, Quantizer],
        kept: dict[tuple[str, ...], Kept],
        switch: Switch,
        leaves: Collection[str] = (),
    ) -> None:
        route = plan.routes.get(path) or Route()
        self.path, self.switch, self.quiet = path, switch, False
        elsewhere = {leaf: plan.elsewhere[at] for leaf, at in {**{leaf: leaf for leaf in leaves}, "": path}.items() if at in plan.elsewhere}
        actions = [found.actions for found in elsewhere.values()]
        self.width, start = len(route.nodes), len(route.sites)
        passed = [key for key, sites in route.unmet.items() if not plan.hidden.isdisjoint(sites)]
        unmet = {**dict.fromkeys(route.unmet, QUIET), **{key: PASSED - number for number, key in enumerate(passed)}}
        self.keys: dict[CallKey, int] = {**unmet, **{key: number for number, key in enumerate(route.nodes)}}
        self.leaf_keys = {(leaf, found.function): self.width + i for i, (leaf, found) in enumerate(elsewhere.items())}
        own_nodes: list[list[int | None]] = [[start + number] for number in range(len(elsewhere))]
        self.nodes_of = [*route.nodes.values(), *own_nodes]
        leaf_nodes = {known: start + number for number, known in enumerate(self.leaf_keys)}
        self.beyond = [leaf_nodes.get((leaf, name), STRANGE) for _, leaf, name in route.nodes]  # of calls made more often than recorded
        self.planned_names = frozenset({key[2] for key in route.nodes} | {found.function for found in elsewhere.values()})
        self.names = {*self.planned_names, *(key[2] for key in route.unmet), *MAC}
        self.actions_of = [*(plan.actions.get(site, Actions()) for site in route.sites), *actions]
        beyond = [None] * len(elsewhere)
        self._savings = [*(savings.get(site, Saving()) for site in route.sites), *(Saving(kept_operands(found, plan)) for found in actions)]
        self._neighbours = [*(plan.regions.neighbours.get(site) for site in route.sites), *beyond]
        self._quantizers, self._kept = quantizers, kept
        saving = [saving_node(*each, quantizers, kept) for each in zip(self.actions_of, self._savings, strict=True)]
        plain, with_marks = ([Node(*planned_site(a, make)) for a in self.actions_of] for make in (LiveMaker(quantizers), MarkMaker()))
        kept_between = kept_for_others(route, plan)
        links = links_of(route, plan, kept_between)
        self.passed_links = [[link for site in route.unmet[key] if (link := passed_link(site, plan)) is not None] for key in passed]
        self._ops = [*(site.op for site in route.sites), *(found.function for found in elsewhere.values())]
        halves = [*(half and half.beside(quantizers) for half in map(plan.halves.get, route.sites)), *beyond]
        live: list[WrittenOut | None] = [half or self._gated(at, LiveMaker(quantizers)) for at, half in enumerate(halves)]
        left, older = ([*map(found.get, route.sites), *beyond] for found in (plan.regions.left_to_readers, plan.regions.older_names))
        for nodes in (plain, saving, with_marks):
            nodes[:] = [n._replace(link=links.get(at), left=left[at], older=older[at]) for at, n in enumerate(nodes)]
        running = [[n._replace(written_out=live[at]) for at, n in enumerate(nodes)] for nodes in (plain, saving)]
        stored = [half and half.in_files(rounding_inside(half.format)) for half in halves]
        traced = [n._replace(written_out=stored[at] or self._gated(at, MarkMaker())) for at, n in enumerate(with_marks)]
        for at, site in enumerate(route.sites):
            for nodes in running if site.moves else ():
                nodes[at] = nodes[at]._replace(operands=tuple((slot, Apart(quantize)) for slot, quantize in nodes[at].operands))
        going_on = {at for at, link in links.items() if link.goes_on or link.name}  # what reads these is known by what they return
        self._renaming = {at for at, site in enumerate(route.sites) if not plan.renamed.isdisjoint(site.steps)} - going_on
        self.planned = Nodes(running[0], running[1], traced)
        rename(self.planned, self._renaming)
        self.fallen = self.planned
        self.sites = [*((site.name, site.steps[0].line) for site in route.sites), *((leaf, "") for leaf in elsewhere)]
        self.floats = [*(site.first_operand for site in route.sites), *beyond]
        own = [
            None if site.steps[0].leaf else own_weight(path, plan, found) for site, found in zip(route.sites, self.actions_of, strict=False)
        ]
        self.weights = [*own, *beyond]
        self.weights_read = weights_read(plan, self.actions_of)
        self.own_weights = own_weights(path, plan, quantizers)
        self.weight_keys, self.rounded = plan.weights, plan.rounded
        self.after, self.memory = calls_before(route, plan, kept_between), memory_read(route, plan)
        self.through = ends_between(route, plan)
        self.first_read, self.again = reads_again(route, plan)
        self.made = {at: plan.regions.made[site] for at, site in enumerate(route.sites) if site in plan.regions.made}
        self.parts = {at: found for at, site in enumerate(route.sites) if (found := _parts(site, self.actions_of[at], plan))}
        asking = {*self.made, *self.parts, *self.after, *self.memory, *(node for node, _ in self.through)}
        self.conditional = {*asking, *self.first_read, *self.again}  # nodes with operands that ask what made them, or who else reads them
        self.places: dict[str, Place] = {}  # of all containers of the model, and of the frames in them, by path
        self.passing = {at for at, site in enumerate(route.sites) if site.moves and route.skips(site)}  # it hands on other values too
        self.known_twice = {at for at, readers in enumerate(older) if readers is not None}  # what they change in place has two names
        self.changing = {at for at, site in enumerate(route.sites) if any(step.changed for step in site.steps)}
        steps = [*(site.steps for site in route.sites), *([] for _ in elsewhere)]
        self.lists = [_lists(*each) for each in zip(self.actions_of, steps, strict=True)]
        self.expect(route, passed)
        self.homes = homes_of(path, plan, quantizers, kept)
        self._forget()

    def _forget(self) -> None:
        self.no_hints: list[tuple[Hint, ...]] = [()] * (len(self.sites) + 1)  # by node, the last entry for the beginning of a call
        self.hints = list(self.no_hints)
        looked_at = self.conditional | self.known_twice  # by `LocalMode.met`
        self.known = known_calls(self.names, self.nodes_of, self.width, self.floats, self.weights, looked_at)
        self.strange: dict[tuple[Spot, ...], None] = {}
        self._be_another()

    def _be_another(self) -> None:
        """What Dynamo took for constants of this place holds no longer."""
        self.token = next(_tokens)
        _places[self.token] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("hints", "known", "no_hints", "strange", "token")}

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        """Of a module that a forward makes a copy of it is the same: what computes there has the model's quantizers."""
        if isinstance(_get_current_function_mode(), self.switch.mode):  # type: ignore[no-untyped-call, arg-type]
            return self
        copied = memo[id(self)] = Place.__new__(Place)
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def outputs_of(self, leaf: nn.Module) -> tuple[tuple[int, Quantize], ...]:
        """What quantizes the results of a leaf wherever it is called."""
        path = vars(leaf).get(LEAF, "")
        keys = [key for (own, _), key in self.leaf_keys.items() if own == path]
        nodes = self.planned.with_marks if self.switch.marks else self.planned.plain
        return nodes[self.nodes_of[keys[0]][0] or 0].outputs if keys else ()

    def standing(self) -> list[Quantizer]:
        """The quantizers that stand here, of the whole model all."""
        keys = self._quantizers if self.path == "" else dict.fromkeys(key for found in self.actions_of for key in found.standing())
        return [self._quantizers[key] for key in keys]

    def release_kept(self) -> None:
        """Give back what was kept of parameters: their memory is their own again, and who writes to it moves nothing."""
        for kept in self._kept.values():
            kept.direct.forget()

    def has_ranges(self) -> bool:
        """Whether anything of the simulation was calibrated."""
        return any(not quantizer.lacks_encoding for quantizer in self._quantizers.values())

    def spans(self, key: str, t: Tensor) -> bool:
        """Whether a constant lies in the range that was observed of those before it, if that is known; what is no number on a grid does."""
        if not t.is_floating_point() or not is_dense(t) or t.is_meta:
            return True
        observer = self._quantizers[key].observer
        return self._quantizers[key].observing or not isinstance(observer, Observer) or observer.spans(t)

    # Which call it is.

    def key_of(self, site: CallSite, name: str, *, framed: bool, beyond: tuple[Spot, ...] = ()) -> int:
        """The number of a call's key, or `STRANGE`, `HOOK` or `QUIET`.

        Parameters
        ----------
        site : CallSite
        name : str
            Of the function, as keys have it.
        framed : bool
            As in `call_key`.
        beyond : tuple of Spot
            What lies above the function that runs again.
        """
        if site.hook:
            return HOOK
        spots, leaf, _ = call_key(site, name, framed=framed)
        found = self.keys.get((spots + beyond, leaf, name))
        return self.leaf_keys.get((leaf, name), STRANGE) if found is None else found

    def learn(self, at: int, name: str, site: CallSite, key: int, frame: FrameType, *, framed: bool) -> None:
        """Remember how a call was recognized that came after node `at`; `frame`: where it stood, at distance 1 of the mode."""
        wanted = len(call_key(site, name, framed=framed)[0])
        kept: list[tuple[int, CodeType, int]] = []
        distance, above = 1, frame
        while len(kept) < wanted:
            if kind_of_code(above.f_code) == "kept":
                kept.append((distance, above.f_code, above.f_lasti))
            distance, above = distance + 1, above.f_back  # type: ignore[assignment]
        if not kept:
            return
        far = kept[1] if len(kept) > 1 else (0, None, 0)
        leaf = None if framed else layer_in(_frame_at(frame, kept[0][0]))
        hint = Hint(name, *kept[0], *far, tuple(kept[2:]), leaf, key)  # type: ignore[call-arg]
        self.hints[at] = (hint, *self.hints[at][: _HINTS - 1])

    def with_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any], container: nn.Module | None = None) -> Arguments | None:
        """The arguments of a call that the examples did not show, with the model's weights quantized: they are wherever they are read,
        and in half precision biases beside them; casts of those in the container too. None where no weight is among them."""
        given = [*args, *kwargs.values()]
        names = [self._name_of(value, container) for value in given]
        if self.weight_keys.keys().isdisjoint(names):
            return None
        changed = [self.quantized(value, self.weight_keys.get(n) or self.rounded.get(n)) for value, n in zip(given, names, strict=True)]
        if all(new is old for new, old in zip(changed, given, strict=True)):
            return None
        return tuple(changed[: len(args)]), dict(zip(kwargs, changed[len(args) :], strict=True))

    def _name_of(self, value: Any, container: nn.Module | None) -> str:
        """The name of the parameter that a value is, or is a cast of; "" for all else."""
        if isinstance(value, nn.Parameter):
            return self.switch.parameter_name(value)
        if container is None or not isinstance(value, Tensor):
            return ""
        return next((full_name(self.path, ".".join(of.path)) for of, *_ in self.own_weights if is_cast(value, of(container))), "")

    def marks_inside(self, layer: str) -> Mapping[str, Mark | BiasMark] | None:
        """What stands at the parameters of a recurrent layer, by name; None where something else in it is quantized, or falls back."""
        frames = [frame for path, frame in self.places.items() if path.startswith(f"{layer}.")]
        if not frames or any(frame.fallen is not frame.planned for frame in frames):
            return None
        names = {key: name for name, key in self.weight_keys.items()}
        marks: dict[str, Mark | BiasMark] = {}
        for actions in (found for frame in frames for found in frame.actions_of):
            keys = [use.key for use in actions.operands.values()]
            if actions.outputs or actions.gate is not None or not names.keys() >= set(keys):
                return None
            marks.update({names[key]: Mark(key) for key in keys})
            if actions.bias is not None:
                marks[actions.bias.parameter] = BiasMark(actions.bias.input, actions.bias.weight)
        return marks

    def quantized(self, value: Any, key: str | None) -> Any:
        """A value by the quantizer of a key, which does not observe it, or in the format that this falls back to. None: as it is."""
        if key is None:
            return value
        format = self.switch.format_of(key)
        return marked(value, key, format) if self.switch.marks else self._quantizers[key].quantize(value, fallback=format)

    # Fallback.

    def fall_back(self, formats: Mapping[str, str], kept: dict[tuple[str, ...], Kept]) -> None:
        """From now on the operations in `formats`, by name, compute in these float formats. `kept` as in the constructor."""
        self.fallen = Nodes(*(list(nodes) for nodes in self.planned)) if formats else self.planned
        for home in self.homes.values():
            home.fall_back(formats)
        for at, (actions, around) in enumerate(zip(self.actions_of, self._neighbours, strict=True)):
            if around is None:
                for nodes in self.fallen:
                    if isinstance(half := nodes[at].written_out, Half) and half.is_in_float(formats):
                        nodes[at] = nodes[at]._replace(operands=(), written_out=None)
                continue
            if not around.is_concerned(formats):
                continue
            parameters = {actions.operands[slot].key for slot in self._savings[at].kept & actions.operands.keys()}
            makers: list[Maker] = [LiveMaker(self._quantizers), FrugalMaker(self._quantizers, parameters, kept), MarkMaker()]
            for nodes, make in zip(self.fallen, makers, strict=True):
                if around.operation in formats:
                    found = fallen_site(actions, around, formats, make, renamed=at in self._renaming)
                else:
                    found = site_beside(nodes[at].operands, nodes[at].outputs, around, formats, make)
                format = formats.get(around.operation, "float32")
                half = None
                if format != "float32":
                    half = Half(
                        self._ops[at], format, narrow=False, given_half=True, writes=0 in around.changed, keys=tuple(actions.standing())
                    )
                    half = half.beside(self._quantizers)
                    half = half.in_region(RoundingMark(format, True)) if nodes is self.fallen.with_marks else half
                written_out = half if around.operation in formats else nodes[at].written_out
                nodes[at] = Node(*found, link=nodes[at].link, written_out=written_out, left=nodes[at].left, older=nodes[at].older)
        rename(self.fallen, self._renaming)
        self._be_another()

    def _gated(self, at: int, make: Maker) -> Gated | None:
        """What runs a node with its gate quantized; None for one that has none."""
        key = self.actions_of[at].gate
        return None if key is None else Gated(self._ops[at], make.quantized(key, True))


_HINTS = 4  # so many different calls may follow one and be recognized at once
_tokens = count()
_places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()


def place_of(token: int) -> Place:
    """The place that a token stands for."""
    return _places[token]


def note_longer(token: int, node: int, lengths: tuple[tuple[int, int], ...]) -> None:
    """See `Noticing.note_longer`; what Dynamo takes for a constant."""
    place_of(token).note_longer(node, lengths)


def _lists(actions: Actions, steps: Sequence[Step]) -> dict[int | str, int]:
    """The operands that are lists of which entries are quantized, with the number of entries that the examples showed."""
    quantized = {slot[0] for slot in actions.operands if isinstance(slot, tuple)}
    found = dict.fromkeys(quantized, 0)
    for slot in chain(actions.operands, *(step.operands for step in steps)):
        if isinstance(slot, tuple) and slot[0] in quantized:
            found[slot[0]] = max(found[slot[0]], slot[1] + 1)
    return found


def _parts(site: Site, actions: Actions, plan: QuantizationPlan) -> dict[Slot, tuple[int, int]]:
    """The operands that are parts of parameters with a scale for each channel: the axis of these, and how many there are."""
    found = {}
    for slot, use in actions.operands.items():
        axis, shape, origins = plan.quantizers[use.key].spec.axis, site.steps[0].shapes.get(slot), site.steps[0].operands.get(slot, ())
        if isinstance(axis, int) and shape is not None and {(o.kind, o.direct) for o in origins} == {("const", False)}:
            found[slot] = axis, shape[axis]
    return found


def _frame_at(frame: FrameType, distance: int) -> FrameType:
    for _ in range(distance - 1):
        frame = frame.f_back  # type: ignore[assignment]
    return frame
