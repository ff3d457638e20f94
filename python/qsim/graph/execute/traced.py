"""Execute, while Dynamo traces: the same plan, with the place of each call asked for at that time, a constant of the graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from qsim.graph.execute.answers import (
    APART,
    traced_broken,
    traced_call,
    traced_end,
    traced_form,
    traced_is_constant,
    traced_key,
    traced_leaf,
    traced_leave,
    traced_left,
    traced_loop,
    traced_more,
    traced_node,
    traced_read,
    traced_shares,
    traced_strange,
    traced_takes,
    traced_way,
)
from qsim.graph.execute.chain_ends import ChainEnds
from qsim.graph.execute.forms import drops_nothing, in_form
from qsim.graph.execute.inputs import computes, is_float
from qsim.graph.execute.left_to_readers import Slots, on_grids, traced_left_to_readers
from qsim.graph.execute.links import Link
from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.nodes import QUIET, STRANGE
from qsim.graph.execute.place import Place
from qsim.graph.execute.switch import Switch
from qsim.graph.plan.actions import Readers
from qsim.graph.record.asker import traced_is_cast
from qsim.graph.record.tape import Slot
from qsim.operations.functions import ARRAY, COMPOSITE, DROPOUTS, ON_ARRAYS, READ_QUANTIZED, Function
from qsim.runs.arguments import Arguments

_LEFT = Readers(frozenset(), False)  # in place of whoever reads a result


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
            left = eager.left if self.outer is None else self.outer.left
            vars(self).update({**vars(eager), **vars(self), "nodes": eager.nodes, "left": left})
        return LocalMode.__enter__(self)

    def node(self, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if 0 <= key < len(self.counts):
            node, slot, self.raw = traced_call(self.place.token, key, self.counts[key])
            if node != STRANGE:
                self.counts[key] += 1
                return node if is_float(slot, args, kwargs) else QUIET
        node = super().node(key, args, kwargs)
        if (raw := traced_read(self.place.token, node)) != self.raw:  # Dynamo lets nobody set attributes inside of an autograd.Function
            self.raw = raw
        return node

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
            parts = APART[name]
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


def leave_to_python() -> None:
    """Keep Dynamo from compiling the modes by themselves: behind a graph break functions run in eager mode, under them."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    alone = LocalMode.__torch_function__.__code__, TracedMode.__torch_function__.__code__, LocalMode.end.__code__
    for code in alone:
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    for function in (TracedMode.__enter__, LocalMode.__enter__, LocalMode.__exit__):  # which turn it off and on
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


leave_to_python._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `qsim.graph.execute.answers`
