"""A traced graph without operations in place: what follows in `qsim.trace` takes a node for a value that stays what it is.

An operation in place becomes the one that returns a new tensor, and whoever looks at the same memory afterwards, by whatever name, reads
that: ``y[:, 1:] += z`` is ``slice_scatter(y, y[:, 1:] + z)``. PyTorch's own way, `ExportedProgram.run_decompositions`, traces everything
once more, which takes longer than the first time, and takes reshapes apart. It is taken where memory is shared in other ways than below,
and where a `torch.vmap` is in the graph, of which it leaves what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import predispatch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from qsim.graph.execute.marks import QUANTIZED
from qsim.operations.functions import DROPOUTS
from qsim.trace.fx_nodes import ancestors, arguments, reshape_sizes
from qsim.trace.idle_nodes import CASTS
from qsim.trace.outputs import name_results

_aten = torch.ops.aten
DROPOUT_OPERATORS = tuple(getattr(_aten, name).default for name in DROPOUTS)


def without_in_place(exported: ExportedProgram) -> ExportedProgram:
    """The program with operations that return new tensors alone; itself, changed, where that can be said node by node.

    What it does to its inputs is left out: a caller's tensors are not written to. What it leaves in its buffers it writes at its end.
    """
    if not _maps(exported.graph) and (not any(map(writes, exported.graph.nodes)) or _Rewriting(exported).succeeded()):
        return exported
    made: ExportedProgram = exported.run_decompositions({})
    made._verifiers = exported.verifiers  # which allow for what is written at the end
    outputs, specs = made.graph.output_node(), made.graph_signature.output_specs
    results = list(zip(specs, outputs.args[0], strict=True))  # type: ignore[arg-type]
    places = {spec.target: node for spec, node in held_inputs(made)}
    for spec, value in results:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            _write_at_the_end(places[spec.target], value)  # type: ignore[arg-type]
    kept = [(spec, value) for spec, value in results if spec.kind is OutputKind.USER_OUTPUT]
    outputs.args, specs[:] = (tuple(value for _, value in kept),), [spec for spec, _ in kept]
    made.graph_module.recompile()
    return made


def mapped_marks(graph: Graph) -> list[str]:
    """Keys of the quantizers whose marks stand within a `torch.vmap`, on a tensor that it maps over."""
    if not _maps(graph):
        return []
    levels: dict[Node, set[Any]] = {}
    for node in graph.nodes:
        levels[node] = set[Any]().union(*(levels[operand] for operand in node.all_input_nodes))
        if node.target is predispatch._add_batch_dim:
            levels[node].add(node.args[2])
        elif node.target is predispatch._remove_batch_dim:
            levels[node].discard(node.args[1])
    return [str(node.args[1]) for node, found in levels.items() if found and node.target is QUANTIZED]


def _maps(graph: Graph) -> bool:
    return any(node.target is predispatch._add_batch_dim for node in graph.nodes)


def held_inputs(exported: ExportedProgram) -> Iterator[tuple[InputSpec, Node]]:
    """The placeholders of what the model holds."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            yield spec, nodes[spec.arg.name]


def _write_at_the_end(place: Node, value: Node) -> None:
    with place.graph.inserting_before(place.graph.output_node()):
        written = place.graph.call_function(_aten.copy_.default, (place, value))
    written.meta = dict(value.meta)


def writes(node: Node) -> bool:
    """Whether a node changes a tensor that it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def kept_state(exported: ExportedProgram) -> list[str]:
    """The buffers that a run writes to, and of which its results depend on what they held before."""
    written = {node.args[0] for node in exported.graph.nodes if writes(node)}
    needed = ancestors(exported.graph.output_node().all_input_nodes)
    return [str(spec.target) for spec, node in held_inputs(exported) if node in written & needed]


class _Rewriting:
    """Of one graph, which is changed only where all of it can be.

    Names are the nodes that look at the same memory: what made it, views, and results of operations in place.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        self._exported = exported
        self._functions = {node: _functional(node) for node in exported.graph.nodes if writes(node)}
        self._order = {node: i for i, node in enumerate(exported.graph.nodes)}
        self._memory = _memory(exported.graph)
        self._places = {memory: node for node, memory in self._memory.items() if node.op == "placeholder"}
        self._written: dict[Node, Node] = {}  # what these hold once they are written to
        self._names: dict[int, list[Node]] = {}
        for node, memory in self._memory.items():
            self._names.setdefault(memory, []).append(node)
        self._parents = {node: operand for node in self._memory if (operand := self._shared_operand(node)) is not None}
        # How a name looks at its parent, where it is not the parent.
        self._views = {node: node for node in self._parents if not writes(node) and node.target not in _AS_IT_IS}

    def succeeded(self) -> bool:
        """Whether the graph has no operation in place any more."""
        if not all(self._can_be_rewritten(node) for node in self._functions):
            return False
        for node in self._functions:
            self._rewrite(node)
        held = {node for _, node in held_inputs(self._exported)}
        for place, value in self._written.items():
            if place in held:
                _write_at_the_end(place, value)
        name_results(self._exported)
        self._exported.graph.lint()
        self._exported.graph_module.recompile()
        return True

    def _can_be_rewritten(self, node: Node) -> bool:
        own: Any = node.args[0]
        if self._functions[node] is None or own not in self._memory:
            return False
        views = [self._views[name] for name in self._up_from(own) if name in self._views]
        made, *others = self._names[self._memory[own]]
        known = made.op in ("placeholder", "call_function") and all(name.op == "call_function" for name in others)
        return known and all(map(_can_be_written_through, views))

    def _shared_operand(self, node: Node) -> Node | None:
        return next((x for x in node.all_input_nodes if self._memory.get(x) == self._memory[node]), None)

    def _up_from(self, name: Node) -> list[Node]:
        """A name that has a parent, the parent, if that has one, and so on."""
        found = []
        while name in self._parents:
            found.append(name)
            name = self._parents[name]
        return found

    def _rewrite(self, node: Node) -> None:
        """Have `node` return a new tensor, and everything behind it read that, or what the memory then holds under other names."""
        own: Any = node.args[0]
        names, place = self._names[self._memory[own]], self._order[node]
        earlier = [name for name in names if self._order[name] < place]
        readers = {name: [reader for reader in name.users if self._order[reader] > place] for name in earlier}
        _call(node, self._functions[node])
        self._parents.pop(node)
        now, self._last, made = {own: node}, node, node
        for name in self._up_from(own):
            made = now[self._parents[name]] = self._written_through(name, made)
        if (held := self._places.get(self._memory[own])) is not None:
            self._written[held] = made
        for name in earlier:
            if readers[name]:
                self._look_again(name, now)
        for name, behind in readers.items():
            for reader in behind:
                reader.replace_input_with(name, now[name])
        self._follow(now, [name for name in names if self._order[name] > place], place)

    def _written_through(self, name: Node, value: Node) -> Node:
        """The parent of a name that holds a value."""
        if (view := self._views.get(name)) is None:
            return value
        target, args = _WRITTEN_THROUGH[view.target](view, self._parents[name], value)  # type: ignore[index]
        with view.graph.inserting_after(self._last):
            self._last = view.graph.call_function(target, args)
        self._last.meta = {**view.meta, "val": self._parents[name].meta["val"]}
        return self._last

    def _look_again(self, name: Node, now: dict[Node, Node]) -> None:
        """Add what a name shows of the memory as it is now."""
        if name in now:
            return
        self._look_again(self._parents[name], now)
        parent, view = now[self._parents[name]], self._views.get(name)
        if view is None:
            now[name] = parent
            return
        operand = self._shared_operand(view)
        with view.graph.inserting_after(self._last):
            self._last = now[name] = view.graph.node_copy(view, lambda x: parent if x is operand else x)

    def _follow(self, now: dict[Node, Node], later: list[Node], place: int) -> None:
        """The names are now those in `now`, and the later ones."""
        for name in later:
            self._parents[name] = now.get(self._parents[name], self._parents[name])
        for name, new in now.items():
            self._order[new], self._memory[new] = place, self._memory[name]
            if name in self._views:
                self._parents[new], self._views[new] = now[self._parents[name]], self._views[name]
        self._names[self._memory[next(iter(now))]] = [*dict.fromkeys(now.values()), *later]


def _memory(graph: Graph) -> dict[Node, int]:
    """What tells tensors that share memory: storages of the fake tensors that PyTorch traced with, of which views have the same.

    A dropout returns in evaluation what it is given, which those do not know.
    """
    found: dict[Node, int] = {}
    same: dict[int, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, Tensor) and first.layout is torch.strided:
            storage = first.untyped_storage()._cdata
            if node.target in DROPOUT_OPERATORS and node.args[-1] is False and node.args[0] in found:
                same[storage] = found[node.args[0]]
            found[node] = same.get(storage, storage)
    return found


def _functional(node: Node) -> tuple[Any, Tensor] | None:
    """The operation that computes the same and changes nothing, and what it makes of fake tensors; None where there is none."""
    target: Any = node.target
    name = target.overloadpacket.__name__
    packet = getattr(_aten, name[:-1], None) if target.namespace == "aten" and name.endswith("_") else None
    function = getattr(packet, target._overloadname, None)
    if function is None or function._schema.is_mutable or not isinstance(node.args[0], Node):
        return None
    # By position a first argument may have another name: `dropout_(self, ...)`, `dropout(input, ...)`.
    own, other = ([(a.name if node.kwargs else "", str(a.type)) for a in one._schema.arguments] for one in (target, function))
    args: Any
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])  # type: ignore[misc]
    made = function(*args, **kwargs) if own == other else None
    return (function, made) if isinstance(made, Tensor) and made.dtype is args[0].dtype else None  # in place the type stays


def _call(node: Node, functional: Any) -> None:
    """Have a node be what `_functional` found for it."""
    node.target, made = functional
    if node.target is _aten.copy.default and _are_alike(*node.args[:2]):
        node.target, node.args, node.kwargs = _aten.clone.default, node.args[1:2], {}
    node.meta = {**node.meta, "val": made}


def _are_alike(x: Any, y: Any) -> bool:
    """Whether two tensors have one type and one shape, as far as sizes that are open can be told."""
    ours, theirs = x.meta["val"], y.meta["val"]
    return ours.dtype is theirs.dtype and list(map(str, ours.shape)) == list(map(str, theirs.shape))


def _scattered(function: Any) -> Callable[[Node, Node, Node], tuple[Any, tuple[Any, ...]]]:
    return lambda view, parent, value: (function, (parent, value, *list(arguments(view).values())[1:]))


def _reshaped(view: Node, parent: Node, value: Node) -> Any:
    return _aten.reshape.default, (value, reshape_sizes(parent.meta["val"].shape))


def _moved_back(view: Node, parent: Node, value: Node) -> Any:
    return view.target, (value, *view.args[1:])


_AS_IT_IS = (*CASTS, _aten.contiguous.default, *DROPOUT_OPERATORS)  # what shares memory with its operand then is the operand
_WRITTEN_THROUGH: dict[Any, Callable[[Node, Node, Node], tuple[Any, tuple[Any, ...]]]] = {
    _aten.slice.Tensor: _scattered(_aten.slice_scatter.default),
    _aten.select.int: _scattered(_aten.select_scatter.default),
    **dict.fromkeys((_aten.transpose.int, _aten.numpy_T.default, _aten.t.default), _moved_back),
    **dict.fromkeys((_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints), _reshaped),
}


def _can_be_written_through(view: Node) -> bool:
    reshaped = _WRITTEN_THROUGH.get(view.target) is _reshaped
    return view.target in _WRITTEN_THROUGH and (not reshaped or reshape_sizes(view.args[0].meta["val"].shape) is not None)  # type: ignore[union-attr]
