"""What Dynamo runs while it traces a container, with constant arguments, and takes the result for a constant of the graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsim.graph.execute.folded_pairs import note_pairs_in_graph
from qsim.graph.execute.forms import GONE_THROUGH, Form, form_of
from qsim.graph.execute.known import QUIET_NAMES
from qsim.graph.execute.left_to_readers import Slots, note_returned_by_graph, read_in_graph, traced_left_to_readers
from qsim.graph.execute.nodes import QUIET, STRANGE, is_on
from qsim.graph.execute.place import note_longer, place_of
from qsim.graph.record.asker import function_of, held_by_modules, nodes_of_asker, traced_is_cast, variable_of_asker
from qsim.graph.record.call_sites import traced_call_site, traced_caller
from qsim.graph.record.containers import full_name
from qsim.graph.record.tape import Slot
from qsim.operations.functions import ALIAS, COMPOSITE, CONSTRUCTORS, CREATION, DROPOUTS, SAME, Function

# What Dynamo traces apart: where the functions stand that are.
APART: dict[str, tuple[int | str, ...]] = {"tag_activation_checkpoint": (0,), "cond": (1, 2, "true_fn", "false_fn")}
_UNTOLD = 1 << 30  # how often something was called in a branch that may not have been taken: more often than examples did


def traced_way(name: str, framed: bool) -> str:
    """Which calls are more than a node, or none: traced apart, outside, the model's inside, or replaced where nothing is planned; or ""."""
    if name in APART and not framed:
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
    if node is None or place.weights[node] is not None:
        return STRANGE, None, ()
    return node, place.floats[node], read_in_graph(place, node)


def traced_read(token: int, node: int) -> Slots:
    """What `read_in_graph` finds at a node, if it is one. Called for `args` and `kwargs`, variables of the function that asks."""
    return read_in_graph(place_of(token), node) if node >= 0 else ()


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


_asked = (
    traced_way,
    traced_key,
    traced_call,
    traced_read,
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
for _function in _asked:
    _function._dynamo_marked_constant = True  # type: ignore[union-attr]  # what `torch.compiler.assume_constant_result` does, without importing Dynamo
