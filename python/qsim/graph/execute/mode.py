"""Execute: every container enters a function mode of its own, made fresh for each call, that follows the plan.

Fresh means no shared state: threads that share a model, and recomputation under a checkpoint, each follow their own call.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from qsim._library import LEFT_TO_PYTHON
from qsim.graph.execute.chain_ends import ChainEnds
from qsim.graph.execute.inputs import computes, is_float, with_operands, with_outputs
from qsim.graph.execute.known import FUNCTION_NAMES, is_quiet, note_function
from qsim.graph.execute.left_to_readers import LeftToReaders
from qsim.graph.execute.nodes import HOOK, PASSED, QUIET, STRANGE, Node
from qsim.graph.execute.ownership import dies
from qsim.graph.execute.place import UNKNOWN_PATH, Place, note_longer
from qsim.graph.execute.recurrent_layers import as_one
from qsim.graph.execute.shortcuts import is_plain_eager
from qsim.graph.execute.uncompiled import Uncompiled
from qsim.graph.plan.actions import Readers
from qsim.graph.record.call_sites import CallSite, Spot, call_site, sites_above
from qsim.graph.record.containers import full_name
from qsim.graph.record.resume import keep_unchanged, recompute_under
from qsim.graph.record.subclasses import as_dispatched
from qsim.graph.record.tape import memory_of
from qsim.operations.control_flow import CONTROL_FLOW, follows_values
from qsim.operations.functions import (
    ALIAS,
    COMPOSITE,
    LEFT_OUTSIDE,
    MAC,
    Function,
)
from qsim.operations.recurrent import CELL, owned
from qsim.runs.arguments import Arguments

_frame_at = sys._getframe
_LINK = Node._fields.index("link")  # Dynamo is given plain tuples


class _Depth(threading.local):
    modes = 0


DEPTH = _Depth()  # how many modes of containers a thread is in; not of those that Dynamo traces


class LocalMode(ChainEnds):
    """Follows one call of one container.

    Parameters
    ----------
    place : Place
    training : bool
        The container's own flag.
    container : nn.Module, optional
        None in a frame.
    counts : list of int, optional
        How often each key was called before: where a checkpoint begins to compute again.
    beyond : tuple of Spot
        What lies above that which computes again.
    """

    simulates = True  # False in a run in float beside another one
    skips = True  # whether calls for which nothing is planned need not be shown to `met` and `passed`

    def __init__(
        self,
        place: Place,
        training: bool,
        container: nn.Module | None = None,
        counts: list[int] | None = None,
        beyond: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(place, container, [0] * place.width if counts is None else counts)
        self.left = None if self.abroad is None else LeftToReaders()
        self.training, self.beyond = training, beyond
        self.at = -1  # the node of the last call
        self.hints = place.no_hints if beyond else place.hints  # they know no more of the stack than there is
        self.passed_by = 0  # the calls that lead nowhere and came by, a bit for each
        self.leaf = [""]  # of the composite function that runs; a list: Dynamo loses attributes that are set behind a branch
        self.outer: LocalMode | None = None
        self.uncompiled = Uncompiled(functions_too=place.switch.calls_compiled)
        self.kept: list[Any] = []  # watches of what a checkpoint saves, while it runs again, and what has modes see calls
        nodes = place.fallen if place.switch.falls_back else place.planned
        saves = place.switch.saves and is_plain_eager()
        self.nodes = nodes.with_marks if place.switch.marks else nodes.saving if saves else nodes.plain
        self.plain = nodes.plain
        self.follows = saves and not place.switch.marks and self.skips  # whether calls are followed without Python

    def within(self, outer: Any) -> LocalMode:
        """Called in a container whose mode, if it has one, is `outer`."""
        if isinstance(outer, LocalMode):
            self.abroad, self.outer = outer.abroad, outer
            self.left = None if torch.compiler.is_dynamo_compiling() else outer.left  # the traced mode looks at Dynamo's graph
        return self

    def __enter__(self) -> LocalMode:
        if not torch.compiler.is_dynamo_compiling():  # Dynamo gives up all of a container where it would break the graph under such a mode
            DEPTH.modes += 1
            self.uncompiled.__enter__()
            self.kept.append((keep_unchanged(), _seen()))
            if self.uncompiled.is_behind_a_break and self.container is not None:
                self.place.switch.tell_of_break(self.place.path)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_dynamo_compiling():
            DEPTH.modes -= 1
            self.uncompiled.__exit__(*error)
            for each in filter(None, self.kept.pop()):
                each.__exit__(*error)

    def frame(self, name: str) -> LocalMode:
        """Follows part of a composite function along a route of its own."""
        places = self.place.places
        return type(self)(places.get(full_name(self.leaf[0] or self.place.path, name)) or places[UNKNOWN_PATH], self.training).within(self)

    def end(self, out: Any) -> None:
        """The call of the container is over, and returns `out`."""
        self.place.note_end(self.training, self.counts, self.passed_by)
        if self.left and self.outer is None:
            self.left.note_returned(out)
        if self.outer is None and self.abroad is not None:
            self.abroad.pairs.note(self.place, compiled=False)
        self.tell()

    def tell(self) -> None:
        """Warn of what was noticed, if this is the outermost container."""
        if self.place.switch.unsaid and self.outer is None:
            self.place.switch.say()

    def checkpointed(self, site: CallSite) -> None:
        """Have the checkpoints that a call is the first in run once more as they run now, from here on."""
        for checkpoint, inside in site.checkpoints if self.container is not None else ():
            recompute_under(checkpoint, lambda above=site.spots[inside:]: self.again(above))  # type: ignore[misc]

    def checkpointed_above(self) -> None:
        """Have the checkpoints around this container run once more under the modes of those that they stand in."""
        outer = self.outer
        for site in sites_above(_frame_at(1)):
            while outer is not None and outer.container is not site.container:
                outer = outer.outer
            if outer is not None:
                outer.checkpointed(site)

    def again(self, above: tuple[Spot, ...]) -> LocalMode:
        """The mode for what runs under a checkpoint when it runs once more. `above`: where the checkpoint stands."""
        made: type[LocalMode] = self.place.switch.mode  # type: ignore[assignment]  # eager, whatever this one is
        mode = made(self.place, self.training, self.container, list(self.counts), above + self.beyond)
        mode.begun = self.begun  # the same chains begin
        mode.abroad = None if self.abroad is None else self.abroad.again()
        if self.left is not None:
            self.left.run_again(mode)
        return mode

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, place = kwargs or {}, self.place
        if types:
            func = as_dispatched(func, types)
        if self.follows:
            out = place.known(self, self.hints[self.at], self.counts, self.nodes, func, args, kwargs)
            if out is not LEFT_TO_PYTHON:
                return out
        name = FUNCTION_NAMES.get(func) or note_function(func)
        key, is_new = QUIET, False
        if name in place.names:
            found = place.known.key(self.hints[self.at], name)
            key, is_new = (self.find(name, _frame_at(1)), True) if found is None else (found, False)
        elif name in COMPOSITE or name in LEFT_OUTSIDE or isinstance(func, HigherOrderOperator):
            return self.opened(name, func, args, kwargs, _frame_at(1))
        with torch._C.DisableTorchFunction():
            node = self.node(key, args, kwargs)
            if node >= 0:
                self.at = node
                return self.met(node, func, args, kwargs)
            out, weighted = self.unplanned(node, name, func, args, kwargs)
            is_new = is_new if node == key else node == STRANGE  # called more often than recorded, or with another weight
            if (is_new or name not in place.names) and node != HOOK and not is_quiet(func, args, kwargs) and computes(out):
                self.look(name, _frame_at(1), weighted)
            return out

    def opened(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """A function that is left to the modes outside, or whose inside is the model's."""
        if name not in COMPOSITE or (name in CONTROL_FLOW and (self.place.switch.marks or not follows_values())):
            return func(*args, **kwargs)
        site = call_site(frame)
        self.checkpointed(site)
        self.leaf[0] = site.leaf_path
        if self.place.switch.marks and (marks := self.place.marks_inside(self.leaf[0] or self.place.path)) is not None:
            with torch._C.DisableTorchFunction():
                if (whole := as_one(name, args, marks, self.place.switch.parameter_name)) is not None:
                    return whole
        args, kwargs = self.reached(args, kwargs)
        with self:
            out = COMPOSITE[name](*args, **kwargs)
        return owned(out)

    def reached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a composite function: with quantized weights if the examples never called it, since it reads parts of them."""
        called = self.place.keys or full_name(self.leaf[0] or self.place.path, CELL) in self.place.places
        return (args, kwargs) if called else self.with_weights(args, kwargs) or (args, kwargs)

    def with_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """See `Place.with_weights`."""
        return self.place.with_weights(args, kwargs, self.container)

    def find(self, name: str, frame: FrameType) -> int:
        """The key of a call that no hint tells."""
        place, site = self.place, call_site(frame)
        if self.is_foreign(site):
            return QUIET
        key = place.key_of(site, name, framed=self.container is None, beyond=self.beyond)
        if key >= place.width:
            place.note_strange(site, name, key)
        if site.checkpoints:
            self.checkpointed(site)
        elif not (self.beyond or site.alone):
            place.learn(self.at, name, site, key, frame, framed=self.container is None)
        return key

    def is_foreign(self, site: CallSite) -> bool:
        """Whether a call belongs to a container inside, which was compiled by itself: its quantizers are in its graph."""
        return site.container is not None and self.container is not None and site.container is not self.container

    def node(self, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The node that a call leads to; below 0 where there is none: `STRANGE` if the examples did not show such a call."""
        place = self.place
        if key < 0:
            if key <= PASSED:
                self.passed_by |= 1 << (PASSED - key)
                self.note_passed(PASSED - key, args, kwargs)
                return QUIET
            return key
        nodes = place.nodes_of[key]
        if key >= place.width:
            return nodes[0]  # type: ignore[return-value]
        count = self.counts[key]
        self.counts[key] = count + 1
        if count >= len(nodes):
            return self.more(key)
        node = nodes[count]
        if node is None or not is_float(place.floats[node], args, kwargs):
            return QUIET
        own = place.weights[node]
        if own is not None and self.container is not None:
            slot, weight_of = own
            value = args[slot] if isinstance(slot, int) and slot < len(args) else kwargs.get(str(slot))
            weight = weight_of(self.container)
            if isinstance(value, Tensor) and value is not weight and not self.is_cast(value, weight):  # another branch's, or data
                return STRANGE
        return node

    def more(self, key: int) -> int:
        """The node of a call that is made more often than the examples did: what its leaf does anywhere."""
        self.forget(key)
        found = self.place.beyond[key]
        if found != STRANGE:
            self.place.note_more(key)
        return found

    def forget(self, key: int) -> None:
        """What other containers read behind what no mode meets is from here on not what the calls of the examples handed on."""
        links = [self.nodes[node][_LINK] for node in self.place.nodes_of[key] if node is not None] if self.abroad is not None else []
        for link in links:
            self.abroad.handed.pop(link.name if link is not None else "", None)  # type: ignore[union-attr]

    def met(self, node: int, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that leads to a node."""
        operands, outputs, instead, link, written_out, overwrites, left, older = self.nodes[node]
        goes_on = link is not None and link.before and len(args) == 1  # what it takes is looked at for that
        if self.left and (operands or outputs) and (not goes_on or node in self.place.changing):
            args, kwargs = self.left.read(self.place, node, args, kwargs)
        if link is not None and link.before and not self.has_begun(node, link, args, kwargs):
            outputs, instead = (), None
            self.broken(node, None)
        given_away = overwrites and dies(args, kwargs, func, _frame_at(2))
        if operands:
            if isinstance(operands[-1][0], tuple):
                lengths = [(at, len(given)) for at, given in enumerate(args) if isinstance(given, (tuple, list))]
                note_longer(self.place.token, node, tuple(lengths))
            if node in self.place.conditional:
                operands = self.standing(node, operands, args, kwargs)
            args, kwargs = with_operands(args, kwargs, operands)
        if instead is not None and (quantized := instead(args, kwargs, given_away)) is not None:
            if link is not None and link.remembered:
                self.remember(link.remembered, quantized)
            if self.left:
                self.left.settle(quantized)
            return quantized
        if instead is not None and given_away:
            func, args, kwargs = instead.overwriting(func, args, kwargs)
        out = func(*args, **kwargs) if written_out is None else written_out(func, args, kwargs)
        if link is not None and link.remembered:
            self.remember(link.remembered, out)
        if outputs and overwrites and not given_away and out is args[0]:
            outputs = self.plain[node].outputs
        if given_away or not args or out is not args[0]:
            older = None  # it has no other name, or was not changed in this call
        if outputs:
            out = with_outputs(out, outputs, () if given_away else args)
            if self.left:
                self.left.settle(out)
        if link is not None and isinstance(out, Tensor):
            if link.goes_on:
                self.handed[node] = self.refer(out)
            if link.name and self.abroad is not None:
                self.abroad.handed.setdefault(link.name, []).append(self.refer(out))
        if left is not None:
            self.leave(node, out, left)
        if older is not None:
            self.leave(node, out, older, older=args[0])
        return out

    def leave(self, node: int, out: Any, readers: Readers, *, older: Tensor | None = None) -> None:
        """Look, from now on, who reads what a node returned; or what it changed in place, by its `older` name: not where no quantizer that
        is planned made another tensor of it."""
        if self.left is None or (older is not None and self.place.actions_of[node].outputs and memory_of(older) == memory_of(out)):
            return
        self.left.add(out if older is None else older, readers, self.place, node)

    def unplanned(self, node: int, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """What a call returns that leads to no node, and whether weights were quantized for it."""
        weighted = self.with_weights(args, kwargs) if node == STRANGE and name in MAC else None
        out = self.passed(name, func, *(weighted or (args, kwargs)))
        if node == STRANGE:
            self.note_stranger(out)
        if self.left:
            self.left.note_changed(func, (*args, *kwargs.values()))
        return out, weighted is not None

    def passed(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other call: one that only moves values, or that the examples did not show."""
        return ALIAS.get(name, func)(*args, **kwargs)

    def look(self, name: str, frame: FrameType, weighted: bool) -> None:
        """Note that the examples did not show a call that computes something, whether its weight was quantized or not."""
        site = call_site(frame)
        if self.is_foreign(site):
            return
        if self.place.key_of(site, name, framed=self.container is None, beyond=self.beyond) >= STRANGE:
            self.place.note_strange(site, name, weighted=weighted)
        self.place.names.add(name)  # from now on its place is asked for, and known


def _seen() -> Any:
    """Enters what has modes see calls again, and returns it, where torch shows them none: inside of a function that another mode met, such
    as `torch.autograd.grad`, for which a checkpoint may compute again what it did not keep. None elsewhere."""
    if not torch._C._is_torch_function_all_disabled():
        return None
    seen = torch._C._EnableTorchFunction()
    seen.__enter__()  # type: ignore[no-untyped-call]
    return seen
