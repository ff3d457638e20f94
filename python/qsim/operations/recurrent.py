"""Recurrent layers written out in operations, for torch's own arrive whole at a function mode.

Every layer, and in it every step in time, runs in a frame: a route of its own, which all steps share as all calls of a module do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode

State = tuple[Tensor, ...]  # what a cell hands to the next step in time; its first entry is the output
CELL = "cell"  # the frame of a step in time
RECURRENT_LAYERS = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")  # of torch.nn
Cell = Callable[[Tensor, State, Tensor, Tensor | None], State]  # input's part of the gates, state, weight and bias of the state's part


def _frame(name: str) -> AbstractContextManager[Any]:
    entered: AbstractContextManager[Any] = _get_current_function_mode().frame(name)  # type: ignore[no-untyped-call]
    return entered


# The formulas of torch.nn.LSTM, GRU and RNN.


def _lstm_cell(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    hidden, cell = state
    input_gate, forget_gate, candidate, output_gate = (gates + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
    return output_gate.sigmoid() * cell.tanh(), cell


def _gru_cell(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    reset, update, candidate = gates.chunk(3, -1)
    reset_h, update_h, candidate_h = F.linear(hidden, weight, bias).chunk(3, -1)
    candidate = (candidate + (reset + reset_h).sigmoid() * candidate_h).tanh()
    return (candidate + (update + update_h).sigmoid() * (hidden - candidate),)


def _tanh_cell(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return ((gates + F.linear(state[0], weight, bias)).tanh(),)


def _relu_cell(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return ((gates + F.linear(state[0], weight, bias)).relu(),)


def _through_time(cell: Cell, gates: Sequence[Tensor], whole: State, weights: Sequence[Tensor], reverse: bool) -> tuple[Tensor, State]:
    """Run a cell over the steps of a sequence. In a packed sequence later steps hold fewer sequences.

    Parameters
    ----------
    gates : sequence of Tensor ``[batch at this step, gates]``
    whole : State
        The first state of every sequence.
    weights : sequence of Tensor
        Weight of the state, then the bias, if there is one, and the projection of the output, if there is one.

    Returns
    -------
    outputs : Tensor ``[sum of the batches, hidden]``, in the order of time
    last : State
    """
    has_projection = weights[-1].dim() == 2 and len(weights) > 1
    weight, bias = weights[0], weights[1] if len(weights) > 1 + has_projection else None
    steps = gates[::-1] if reverse else gates
    state, ended, outputs = tuple(s[: steps[0].shape[0]] for s in whole), [], []
    for step in steps:
        size, before = step.shape[0], state[0].shape[0]
        if size < before:
            ended.append(tuple(s[size:] for s in state))
            state = tuple(s[:size] for s in state)
        elif size > before:
            state = tuple(torch.cat([s, first[before:size]]) for s, first in zip(state, whole, strict=True))
        with _frame(CELL):
            state = cell(step, state, weight, bias)
            if has_projection:
                state = (F.linear(state[0], weights[-1]), *state[1:])
        outputs.append(state[0])
    if ended:
        state = tuple(torch.cat(parts) for parts in zip(state, *ended[::-1], strict=True))
    return torch.cat(outputs[::-1] if reverse else outputs), state


def _layers(cell: Cell, states: int) -> Callable[..., tuple[Tensor, ...]]:
    """A function with the two signatures of `torch.lstm` and its like: for a padded tensor and for a packed sequence."""

    def run(data: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        packed = not isinstance(rest[2], bool)
        sizes = rest[0].tolist() if packed else None
        given, flat, has_biases, layers, dropout, training, bidirectional, *batch_first = rest[1:] if packed else rest
        first = (given,) if states == 1 else tuple(given)
        if batch_first and batch_first[0]:
            data = data.transpose(0, 1)
        if sizes is None:
            sizes = [data.shape[1]] * data.shape[0]
        x = data if packed else data.flatten(0, 1)
        directions = 1 + bidirectional
        per_layer = len(flat) // (layers * directions)
        last = []
        for layer in range(layers):
            if layer and dropout:
                x = F.dropout(x, dropout, training)
            outputs = []
            for reverse in range(directions):
                index = layer * directions + reverse
                own = flat[index * per_layer : (index + 1) * per_layer]
                with _frame(f"l{layer}{'_reverse' if reverse else ''}"):
                    gates = F.linear(x, own[0], own[2] if has_biases else None)
                    weights = [own[1], *own[3 if has_biases else 2 :]]
                    output, state = _through_time(cell, torch.split(gates, sizes), tuple(s[index] for s in first), weights, bool(reverse))
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if not packed:
            x = x.reshape(-1, sizes[0], x.shape[-1])
            x = x.transpose(0, 1) if batch_first[0] else x
        return (x, *(torch.stack(found) for found in zip(*last, strict=True)))

    return run


def _single(cell: Cell, states: int) -> Callable[..., Any]:
    """A function with the signature of `torch.lstm_cell` and its like."""

    def run(x: Tensor, given: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Any:
        with _frame(CELL):
            state = cell(F.linear(x, w_ih, b_ih), (given,) if states == 1 else tuple(given), w_hh, b_hh)
        return state[0] if states == 1 else state

    return run


RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm": _layers(_lstm_cell, 2),
    "gru": _layers(_gru_cell, 1),
    "rnn_tanh": _layers(_tanh_cell, 1),
    "rnn_relu": _layers(_relu_cell, 1),
    "lstm_cell": _single(_lstm_cell, 2),
    "gru_cell": _single(_gru_cell, 1),
    "rnn_tanh_cell": _single(_tanh_cell, 1),
    "rnn_relu_cell": _single(_relu_cell, 1),
}


def owned(out: Any) -> Any:
    """What a function written out returns, as torch's own returns it: a tensor and no view, where that makes a difference.

    Under a reentrant checkpoint, which runs without gradients, a view must not be changed in place.
    """
    if torch.is_grad_enabled() or not isinstance(out, tuple):
        return out
    return tuple(t.clone() if isinstance(t, Tensor) and t._is_view() else t for t in out)
