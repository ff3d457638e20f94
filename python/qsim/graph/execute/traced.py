"""Execute, while Dynamo traces: the same plan, with the place of each call asked for at that time, a constant of the graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from qsim.graph.execute.chain_ends import ChainEnds
from qsim.graph.execute.folded_pairs import note_pairs_in_graph
from qsim.graph.execute.forms import GONE_THROUGH, Form, drops_nothing, form_of, in_form
from qsim.graph.execute.inputs import computes, is_float
from qsim.graph.execute.known import QUIET_NAMES
from qsim.graph.execute.left_to_readers import Slots, note_returned_by_graph, on_grids, read_in_graph, traced_left_to_readers
from qsim.graph.execute.links import Link
from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.nodes import QUIET, STRANGE, is_on
from qsim.graph.execute.place import Place, note_longer, place_of
from qsim.graph.execute.switch import Switch
from qsim.graph.plan.actions import Readers
from qsim.graph.record.asker import function_of, held_by_modules, nodes_of_asker, traced_is_cast, variable_of_asker
from qsim.graph.record.call_sites import traced_call_site, traced_caller
from qsim.graph.record.containers import full_name
from qsim.graph.record.tape import Slot
from qsim.operations.functions import ALIAS, ARRAY, COMPOSITE, CONSTRUCTORS, CREATION, DROPOUTS, ON_ARRAYS, READ_QUANTIZED, SAME, Function
from qsim.runs.arguments import Arguments

# What Dynamo traces apart: where the functions stand that are.
_APART: dict[str, tuple[int | str, ...]] = {"tag_activation_checkpoint": (0,), "cond": (1, 2, "true_fn", "false_fn")}
_LEFT = Readers(frozenset(), False)  # in place of whoever reads a result
_UNTOLD = 1 << 30  # how often something was called in a branch that may not have been taken: more often than examples did


class TracedMode(LocalMode):
    """What a container runs under while Dynamo traces it: the place of a call is asked for at that time, and is a constant then."""

    def __init__(
        self,
        place: Place,
        training: bool,
        container: nn.Module | None = None,
        counts: list[int] | None = None,
        switch: Switch | None = None,
    ) -> None:
        ChainEnds.__init__(self, place, container, [0] * place.width if counts is None else counts)
        self.training, self.leaf, self.outer, self.passed_by = training, [""], None, 0
        self.switch = place.switch if switch is None else switch
        self.raw: Slots = ()
        self.nodes = TracedNodes(place, self.switch)  # type: ignore[assignment]
        leave_to_python()

    def __enter__(self) -> LocalMode:
        if not torch.compiler.is_dynamo_compiling():  # behind a graph break: what Dynamo began with runs in Python, all of it
            self.__class__ = self.switch.mode  # type: ignore[assignment]
            eager: Any = self.switch.mode(self.place, self.training, self.container, self.counts)
            vars(self).update({**vars(eager), **vars(self), "nodes": eager.nodes})
        return LocalMode.__enter__(self)

    def node(self, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if 0 <= key < len(self.counts):
            node, slot, self.raw = traced_call(self.place.token, key, self.counts[key])
            if node != STRANGE:
                self.counts[key] += 1
                return node if is_float(slot, args, kwargs) else QUIET
        return super().node(key, args, kwargs)

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What runs under a checkpoint, under a mode of its own: Dynamo traces it apart, and may not change this one there."""

        def run(*args: Any, **kwargs: Any) -> Any:
            mode = TracedMode(self.place, self.training, self.container, list(self.counts), self.switch)
            mode.trusted, mode.begun, mode.abroad = [*self.trusted, *self.handed], dict(self.begun), None
            with mode:
                out = function(*args, **kwargs)
            traced_leave(tuple(mode.counts), tuple(mode.handed))
            return out

        return run

    def more(self, key: int) -> int:
        traced_more(self.place.token, key)
        self.forget(key)
        return self.place.beyond[key]

    def broken(self, node: int, slot: Slot | None) -> None:
        traced_broken(self.place.token, node, slot)

    def refer(self, t: Tensor) -> Any:
        return t

    def remember(self, name: str, out: Any) -> None:
        if self.abroad is not None:
            self.abroad.memory.setdefault(name, []).append(out)

    def is_of(self, names: tuple[str, ...], t: Any, where: tuple[int, Slot]) -> bool:
        return self.abroad is None or self.abroad.trusts or any(name in self.abroad.memory for name in names)  # Dynamo knows no memory

    def is_read_again(self, name: str, t: Any, where: tuple[int, Slot]) -> bool:
        known = [] if self.abroad is None or self.abroad.trusts else self.abroad.memory.get(name, [])
        # What is no tensor is the memory of one that is not compiled with this, which Dynamo does not know.
        return not known or any(t is other or not isinstance(other, Tensor) for other in known)

    def is_constant(self, key: str, t: Any) -> bool:
        return traced_is_constant(self.place.token, key) if isinstance(t, Tensor) else True

    def is_cast(self, value: Any, weight: Any) -> bool:
        return traced_is_cast()

    def strayed(self, where: tuple[int, Slot]) -> bool:
        if self.abroad is not None and not self.abroad.trusts:
            for link, operation in self.place.through.get(where, ()):
                handed = [t for name in link.before or () for t in self.abroad.handed.get(str(name), ())]
                if any(isinstance(t, weakref.ref) for t in handed):  # of a container that is not compiled with this one
                    if link.name in self.abroad.strayed:
                        return True
                elif handed and not traced_takes(operation):
                    return True
        return False

    def checkpointed_above(self) -> None:
        pass  # what Dynamo traced runs again as it was traced

    def leave(self, node: int, out: Any, readers: Readers, *, older: Tensor | None = None) -> None:
        traced_left_to_readers(self.place.token, node, older is not None)

    def end(self, out: Any) -> None:
        traced_end(self.place.token, self.training, tuple(self.counts), self.outer is None)

    def with_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        known, given = False, [*args, *kwargs.values()]
        within: LocalMode = self
        while within.container is None:  # in a frame: part of a recurrent layer of the container around it
            if within.outer is None:
                return None
            within = within.outer
        for parameter_of, key, quantizer, is_weight in within.place.own_weights:  # no others can be told while Dynamo traces
            parameter = parameter_of(within.container)
            if parameter is None:  # the layer was replaced
                continue
            read = [value is parameter or self.is_cast(value, parameter) for value in given]
            known = known or (is_weight and any(read))
            format = within.place.switch.format_of(key)
            given = [quantizer.quantize(value, fallback=format) if is_read else value for value, is_read in zip(given, read, strict=True)]
        return (tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))) if known else None

    def passed(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in DROPOUTS and drops_nothing(*args, **kwargs):
            return args[0]  # as in eager mode, where chains go through it; to Dynamo its result is another tensor
        return super().passed(name, func, args, kwargs)

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, place = kwargs or {}, self.place
        name = getattr(func, "__name__", "")
        way = traced_way(name, self.container is None)  # most calls go none of these, and Dynamo takes its time for each question
        if way == "apart":
            parts = _APART[name]
            if self.abroad is not None:
                self.abroad.trusts = True
            args = tuple([self.inside(each) if at in parts else each for at, each in enumerate(args)])
            kwargs = {key: self.inside(each) if key in parts else each for key, each in kwargs.items()}
            out = func(*args, **kwargs)
            counts, handed = traced_left(name == "cond")
            self.counts[:] = counts  # in place: Dynamo loses attributes that are set behind a branch
            self.trusted.extend(handed)
            return out
        if way == "outside" or (way != "inside" and isinstance(func, HigherOrderOperator)):
            return func(*args, **kwargs)
        if args and isinstance(args[0], ARRAY):  # outside the model's graph, as in eager
            return ON_ARRAYS.get(name, func)(*args, **kwargs)
        if way == "inside":
            self.leaf[0] = traced_leaf()
            if name == "while_loop":
                traced_loop(place.token)
            args, kwargs = self.reached(args, kwargs)
            with self:
                return COMPOSITE[name](*args, **kwargs)
        key = traced_key(place.token, name, self.container is None)
        if key != QUIET and (form := traced_form(func)) is not None and len(args) <= len(form[0]):
            args, kwargs = in_form(form, args, kwargs)
        with torch._C.DisableTorchFunction():
            if key == QUIET:
                return func(*args, **kwargs) if way == "" else self.passed(name, func, args, kwargs)
            node = self.node(key, args, kwargs)
            if node >= 0:
                return self.met(node, func, *(on_grids(place, args, kwargs, self.raw) if self.raw else (args, kwargs)))
            out, weighted = self.unplanned(node, name, func, args, kwargs)
            if node == STRANGE and name not in READ_QUANTIZED and computes(out):
                traced_strange(place.token, name, weighted)
            return out


class TracedNodes:
    """The nodes of a place, in place of a list of them: put together, while Dynamo traces, from constants and from what stands there."""

    def __init__(self, place: Place, switch: Switch) -> None:
        self.place, self.switch = place, switch

    def __getitem__(self, node: int) -> tuple[Any, ...]:  # the fields of a `Node`: to make one takes Dynamo longer than all the rest here
        place, switch = self.place, self.switch
        operands, outputs, link, is_written_out, is_left, is_older = traced_node(place.token, node, switch.falls_back, switch.marks)
        written_out = None
        if is_written_out:
            nodes = place.fallen if switch.falls_back else place.planned
            written_out = (nodes.with_marks if switch.marks else nodes.plain)[node].written_out
        made = None if link is None else Link(*link)
        operands, outputs = switch.standing.find(operands), switch.standing.find(outputs)
        return operands, outputs, None, made, written_out, False, _LEFT if is_left else None, _LEFT if is_older else None


def switch_of(place: Place, outer: Any) -> Switch:
    """The switch of a container that runs under a mode, which may have it: Dynamo compares, in each call, all ways that lead to one."""
    if isinstance(outer, TracedMode) and traced_shares(outer.place.token, place.token):
        return outer.switch
    return place.switch


# What Dynamo runs while it traces, with constant arguments, and takes the result for a constant.


def traced_way(name: str, framed: bool) -> str:
    """Which calls are more than a node, or none: traced apart, outside, the model's inside, or replaced where nothing is planned; or ""."""
    if name in _APART and not framed:
        return "apart"
    if name in CONSTRUCTORS:
        return "outside"
    if name in COMPOSITE:
        return "inside"
    return "replaced" if name in DROPOUTS or name in ALIAS else ""


def traced_key(token: int, name: str, framed: bool) -> int:
    """The key of a call; `QUIET` for one that computes nothing, if no node is there."""
    place, known = place_of(token), SAME.get(name, name)
    name, quiet = known.strip("_"), {known, known.strip("_")} & QUIET_NAMES
    if quiet and name not in place.planned_names:
        return QUIET
    site = traced_call_site()
    key = QUIET if site.hidden else place.key_of(site, name, framed=framed)
    if key >= place.width:
        place.note_strange(site, name, key)
    return QUIET if quiet and key == STRANGE else key


def traced_call(token: int, key: int, count: int) -> tuple[int, Slot | None, Slots]:
    """The node of a call that the examples show, its first operand, and what `read_in_graph` finds; `STRANGE` where more than that decides.
    Called for `args` and `kwargs`, variables of the function that asks."""
    place = place_of(token)
    nodes = place.nodes_of[key]
    node = nodes[count] if count < len(nodes) else None
    raw = () if node is None else read_in_graph(place, node)
    return (STRANGE, None, raw) if node is None or place.weights[node] is not None else (node, place.floats[node], raw)


def traced_node(token: int, node: int, falls_back: bool, marks: bool) -> tuple[Any, ...]:
    """Operands and results of a node with what stands there, its link, whether it is written out, whether its result is left to readers,
    and whether what it changes is, by an older name."""
    place = place_of(token)
    nodes, tell = place.fallen if falls_back else place.planned, place.switch.standing.tell
    found = (nodes.with_marks if marks else nodes.plain)[node]
    told = [tuple((at, tell(quantize)) for at, quantize in there) for there in (found.operands, found.outputs)]
    link = None if found.link is None else tuple(tuple(each) if isinstance(each, frozenset) else each for each in found.link)
    return *told, link, is_on(found.written_out), found.left is not None, found.older is not None


def traced_form(function: Function) -> Form | None:
    caller = getattr(F, getattr(function, "__name__", ""), None)
    is_through = caller in GONE_THROUGH and traced_caller() is caller.__code__
    return form_of(caller if is_through else function)


def traced_shares(token: int, other: int) -> bool:
    return place_of(token).switch is place_of(other).switch


def traced_leaf() -> str:
    return traced_call_site().leaf_path


# Behind a checkpoint: counts, and what it hands on. The modes of all containers that it stands in trace it, each around the next.
_left: list[tuple[tuple[int, ...], tuple[int, ...]]] = []


def traced_leave(counts: tuple[int, ...], handed: tuple[int, ...]) -> None:
    _left.append((counts, handed))


def traced_left(either: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`either`: of the last two functions one runs. Where both hand something on, what they lead to goes on with it."""
    counts, handed = _left.pop()
    if either:
        others, other = _left.pop()
        counts = tuple(count if count == another else _UNTOLD for count, another in zip(counts, others, strict=True))
        handed = (*handed, *other) if handed and other else ()
    return counts, handed


_asking: dict[int, str] = {}  # calls that the examples do not show, in functions that ask whether they are compiled; by their place


def traced_strange(token: int, name: str, weighted: bool) -> None:
    place, site, name = place_of(token), traced_call_site(), SAME.get(name, name).strip("_")
    if site.asks:
        _asking[token] = f"'{full_name(place.path, name)}' ({site.line})"
    place.note_strange(site, name, weighted=weighted)


def traced_more(token: int, key: int) -> None:
    place = place_of(token)
    if place.beyond[key] != STRANGE:
        place.note_more(key)


def traced_loop(token: int) -> None:
    where = f"({traced_call_site().line}) in '{place_of(token).path or 'the model'}'"
    raise RuntimeError(
        f"QuantSim: the steps of while_loop {where} have quantizers of their own, and a compiled graph holds one step for all. Run this "
        "simulation without torch.compile, or write a loop of Python's."
    )


def traced_takes(operation: str) -> bool:
    """Whether the graph has an operation of this name that takes any of `handed`, a variable of the function that asks; a graph before this
    one, for all that is known, of what this one is given."""
    nodes = [item.as_proxy().node for item in variable_of_asker("handed").items]
    return any(node.op == "placeholder" or any(function_of(user) == operation for user in node.users) for node in nodes)


def traced_broken(token: int, node: int, slot: Slot | None) -> None:
    place_of(token).note_broken(node, slot)


def traced_is_constant(token: int, key: str) -> bool:
    """Whether nothing that the graph is given is in `t`, a variable of the asking function: it was made there, or is what a module has."""
    asked = [*nodes_of_asker("t")]
    left = [*asked]
    while left:
        node = left.pop()
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, Tensor):
            held = [held_by_modules(node) for node in asked]
            return all(t is not None and place_of(token).spans(key, t) for t in held)
        is_number = isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))  # a size, say
        left += [] if node.op == "get_attr" or is_number or function_of(node) in CREATION else node.all_input_nodes
    return True


def traced_end(token: int, training: bool, counts: tuple[int, ...], is_root: bool) -> None:
    """Called for `out`, a variable of the function that asks."""
    place, asking = place_of(token), _asking.pop(token, None)
    if is_root:
        note_returned_by_graph()
        note_pairs_in_graph(place)
    missed = place.note_end(training, list(counts), None)
    if missed and asking is not None:
        raise RuntimeError(
            f"QuantSim: {asking} runs in place of {missed[0]}, in a function that asks whether it is being compiled: the compiled graph "
            "would hold other quantizers than the plan. Run this simulation without torch.compile, or have the model take one way in both."
        )
    place.switch.say()


def leave_to_python() -> None:
    """Keep Dynamo from compiling the modes by themselves: behind a graph break functions run in eager mode, under them."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    alone = LocalMode.__torch_function__.__code__, TracedMode.__torch_function__.__code__, LocalMode.end.__code__
    for code in alone:
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    for function in (TracedMode.__enter__, LocalMode.__enter__, LocalMode.__exit__):  # which turn it off and on
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


_asked = (
    traced_way,
    traced_key,
    traced_call,
    traced_node,
    traced_form,
    traced_shares,
    traced_leaf,
    traced_leave,
    traced_left,
    traced_strange,
    traced_more,
    traced_loop,
    traced_takes,
    traced_broken,
    traced_is_constant,
    traced_is_cast,
    note_longer,
    traced_left_to_readers,
    traced_end,
)
for _function in (*_asked, leave_to_python):
    _function._dynamo_marked_constant = True  # type: ignore[union-attr]  # what `torch.compiler.assume_constant_result` does, without importing Dynamo
