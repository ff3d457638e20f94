"""Which operations compute on constants alone: exporters evaluate them once, in float32, and engines see their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Origin, Step, Tape
from qsim.operations.functions import ALIAS, Function, route_name
from qsim.runs.arguments import tensors_in


def candidates(tape: Tape, sites: dict[str, Site]) -> frozenset[str]:
    """Operations that, as far as the recording shows, read constants alone. It takes what came out of unseen code for a constant."""
    constant: set[Step] = set()

    def is_constant(origin: Origin) -> bool:
        return origin.source in constant if isinstance(origin.source, Step) else origin.kind == "const"

    for step in tape.steps:
        if not step.transformed and all(is_constant(o) for o in (*(o for origins in step.operands.values() for o in origins), *step.side)):
            constant.add(step)
    return frozenset(name for name, site in sites.items() if all(step in constant for step in site.steps))


class Remembering:
    """A visitor that keeps the results of some operations."""

    def __init__(self, names: frozenset[str]) -> None:
        self.results: dict[str, list[Tensor]] = {name: [] for name in names}

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if name in self.results:
            self.results[name] += [t.clone() for t in tensors_in(out)]
        return out

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ALIAS.get(route_name(func), func)(*args, **kwargs)


def unmoved(names: frozenset[str], run: Callable[[Remembering, Any], object], arguments: Any) -> frozenset[str]:
    """Those of the operations whose results stay the same when all arguments are others; none if the model does not run on others."""
    if not names:
        return names
    as_given, on_others = Remembering(names), Remembering(names)
    run(as_given, arguments)
    try:
        run(on_others, tree_map_only(Tensor, _other, arguments))
    except Exception:  # it checks its arguments: nothing is known to be constant
        return frozenset()
    return frozenset(name for name in names if _equal(as_given.results[name], on_others.results[name]))


def _other(t: Tensor) -> Tensor:
    """A tensor of the same shape with other numbers; indices stay within their range."""
    moved = t.flatten().roll(1).reshape(t.shape)
    return moved * 0.75 if t.is_floating_point() else moved


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(left, right, strict=True))
