"""Where NaN and Inf begin: the first operation, forward or backward, that makes them out of finite numbers."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OUTSIDE = "outside the model"
_LABEL = "qsim.module"  # in the metadata of autograd nodes
_UNINITIALIZED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"})


@dataclass(frozen=True)
class Event:
    """An operation that turned finite numbers into NaN or Inf.

    Attributes
    ----------
    step : int
        Which one, from 0.
    module : str
        Path of the innermost module that ran it; "" for the model itself, "outside the model" for the loss and the like.
    op : str
        "mul", or "MulBackward0" for a gradient.
    backward : bool
    what : str
        "NaN" or "Inf".
    """

    step: int
    module: str
    op: str
    backward: bool
    what: str

    def __str__(self) -> str:
        where = self.module if self.module == _OUTSIDE else f"in '{self.module}'" if self.module else "in the model itself"
        return f"step {self.step}, {'backward' if self.backward else 'forward'}: {self.op} {where} made {self.what} of finite numbers"


class NonFiniteError(RuntimeError):
    """A training step met NaN or Inf. `events` are the operations that made them, first one first.

    Examples
    --------
    >>> layer = torch.nn.Linear(4, 2)
    >>> with qsim.Watch(layer) as watch:
    ...     (layer(torch.ones(1, 4)) / 0).sum().backward()
    ...     try:
    ...         watch.step()
    ...     except NonFiniteError as error:
    ...         found = error.events[0]
    >>> found.op, found.step
    ('div', 0)
    """

    def __init__(self, message: str, events: list[Event]) -> None:
        super().__init__(message)
        self.events = events


class Watch:
    """Watches the training steps of a model; `QuantSim.watch` makes one.

    Every operation leaves two flags on the device; `step` reads them together, so a step waits for the device once.

    Attributes
    ----------
    steps : int
        How many steps were finished.

    Examples
    --------
    >>> layer = torch.nn.Linear(4, 2)
    >>> with Watch(layer) as watch:
    ...     layer(torch.ones(1, 4)).sum().backward()
    ...     watch.step()
    >>> watch.steps
    1
    """

    def __init__(self, model: nn.Module) -> None:
        self.steps = 0
        self._names = {module: path for path, module in model.named_modules()}
        self._path: list[str] = []
        self._seen: list[tuple[str, str, bool, Tensor]] = []
        self._undo = ExitStack()

    def __enter__(self) -> Watch:
        for module in self._names:
            self._undo.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            self._undo.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        self._undo.enter_context(_Operations(self))
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._undo.close()
        if kind is None:
            self.check()

    def step(self) -> None:
        """End a step: call it after ``loss.backward()``, before ``optimizer.step()``. Raises NonFiniteError as `check`."""
        self.check()
        self.steps += 1

    def check(self) -> None:
        """Raise a NonFiniteError that names what made NaN or Inf since the last step."""
        seen, self._seen = self._seen, []
        if not seen:
            return
        home = seen[0][3].device
        flags = torch.stack([flag.to(home) for *_, flag in seen]).tolist()
        events = [
            Event(self.steps, module, op, backward, "NaN" if nan else "Inf")
            for (module, op, backward, _), (nan, broken) in zip(seen, flags, strict=True)
            if nan or broken
        ]
        if events:
            others = [f"\n  then {event}" for event in events[1:4]] + (["\n  ..."] if len(events) > 4 else [])
            raise NonFiniteError(f"qsim: {events[0]}{''.join(others)}", events)

    @property
    def _where(self) -> str:
        return self._path[-1] if self._path else _OUTSIDE

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        _label((args, kwargs), self._where)  # what led here is the caller's
        self._path.append(self._names[module])

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        _label(out, self._path.pop())

    def note(self, op: str, before: tuple[Tensor, Tensor] | None, made: list[Tensor]) -> None:
        """Note that `op` made these tensors; `before`: whether there was NaN, and NaN or Inf, among what it was given."""
        after = _broken(made)
        if after is None:
            return
        node = torch._C._current_autograd_node()  # the one whose backward runs
        module = self._where if node is None else _metadata(node).get(_LABEL, _OUTSIDE)
        nan, broken = after if before is None else (after[0] & ~before[0], after[1] & ~before[1])
        self._seen.append((module, op if node is None else node.name(), node is not None, torch.stack([nan, broken])))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation below autograd to a watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        meant = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves)  # a mask is filled with -Inf
        if meant or func.overloadpacket.__name__ in _UNINITIALIZED:
            return func(*args, **kwargs)
        given = _floats(leaves)
        before = _broken(given)
        out = func(*args, **kwargs)
        self._watch.note(func.overloadpacket.__name__, before, _floats(tree_leaves(out)) + (given if func._schema.is_mutable else []))
        return out


def _floats(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def _broken(tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Whether there is NaN, and NaN or Inf, in any of them; left on the device."""
    if not tensors:
        return None
    home = tensors[0].device
    nan = torch.stack([t.isnan().any().to(home) for t in tensors]).any()
    return nan, torch.stack([(~t.isfinite()).any().to(home) for t in tensors]).any()


def _label(values: Any, path: str) -> None:
    """Tell the autograd nodes that led to `values`, and belong to nobody yet, who made them."""
    with torch._C.DisableTorchFunction():  # the simulation follows the model's own calls
        left = [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    while left:
        node = left.pop()
        if node is not None and _LABEL not in _metadata(node):
            _metadata(node)[_LABEL] = path
            left += [following for following, _ in node.next_functions]


def _metadata(node: torch.autograd.graph.Node) -> dict[str, str]:
    """What autograd keeps with a node."""
    kept: Any = node.metadata  # a dict; torch annotates the method behind it
    return kept  # type: ignore[no-any-return]
