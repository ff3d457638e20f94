"""torch's branches and loops by values, as Python has them.

In eager mode torch compiles what calls one, so that gradients reach the weights that its functions read. A simulation runs in Python: it
follows the functions themselves, and every operation in them is one of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Sequence[Any], more: Sequence[Any] = ()
) -> tuple[Any, ...]:
    values = tuple(value.clone() if isinstance(value, Tensor) else value for value in carried)  # never one that was given
    while cond_fn(*values, *more):
        values = tuple(body_fn(*values, *more))
    return values


def _scan(combine_fn: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Sequence[Any] = ()) -> Any:
    carried: Any = tuple(init)
    outputs = []
    for step in zip(*xs, strict=True):
        carried, out = combine_fn(*tree_leaves(carried), *step, *additional_inputs)
        outputs.append(out)
    return carried, _stacked(outputs)


def _map(f: Callable[..., Any], xs: Sequence[Tensor], pos_args: Sequence[Any], **_: Any) -> Any:  # torch 2.14 tells more, for its tracers
    return _stacked([f(*step, *pos_args) for step in zip(*xs, strict=True)])


def _stacked(outputs: Sequence[Any]) -> Any:
    return tree_map(lambda *each: None if each[0] is None else torch.stack(each), *outputs)


CONTROL_FLOW: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan, "map_impl": _map}


def follows_values() -> bool:
    """Whether values are there to decide by: not while a graph is traced for all of them, nor under a transform of `torch.func`."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None
