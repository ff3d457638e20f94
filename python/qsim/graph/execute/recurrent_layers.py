"""A recurrent layer as one operation of a traced graph, for sequences of any length; written out, a trace has every step by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_SCHEMA = "(Tensor x, Tensor[] states, Tensor[] weights, str kind, bool biases, int layers, bool both, bool batch_first) -> Tensor[]"
torch.library.define("qsim_graph::recurrent", _SCHEMA)
RECURRENT = torch.ops.qsim_graph.recurrent.default  # `kind`: "lstm", "gru", "rnn_tanh", "rnn_relu"; `both`: directions


def _shapes(
    x: Tensor, states: list[Tensor], weights: list[Tensor], kind: str, biases: bool, layers: int, both: bool, batch_first: bool
) -> list[Tensor]:
    return [x.new_empty(*x.shape[:2], states[0].shape[2] * (1 + both)), *(torch.empty_like(state) for state in states)]


def _run(
    x: Tensor, states: list[Tensor], weights: list[Tensor], kind: str, biases: bool, layers: int, both: bool, batch_first: bool
) -> list[Tensor]:
    """In evaluation, as torch runs it."""
    given = states if kind == "lstm" else states[0]
    return list(getattr(torch, kind)(x, given, weights, biases, layers, 0.0, False, both, batch_first))


torch.library.register_fake("qsim_graph::recurrent", _shapes)
torch.library.impl("qsim_graph::recurrent", "CompositeExplicitAutograd", _run)


def as_one(kind: str, args: Sequence[Any], marks: Mapping[str, Callable[[Tensor], Tensor]], name_of: Callable[[Any], str | None]) -> Any:
    """What `torch.lstm` and its like return; None for packed sequences, for layers that project what they return, and for cells.

    Parameters
    ----------
    kind : str
        Name of the function.
    args : sequence
        Of its call.
    marks : mapping
        What puts a mark at a parameter, by its name.
    name_of : callable
        The name of a parameter.
    """
    if kind.endswith("cell") or not isinstance(args[3], bool):
        return None
    x, given, weights, biases, layers, _, _, both, batch_first = args
    if len(weights) != layers * (1 + both) * (4 if biases else 2):
        return None
    states = list(given) if kind == "lstm" else [given]
    found = [(weight, marks.get(str(name_of(weight)))) for weight in weights]
    marked = [weight if mark is None else mark(weight) for weight, mark in found]
    return tuple(RECURRENT(x, states, marked, kind, biases, layers, both, batch_first))
