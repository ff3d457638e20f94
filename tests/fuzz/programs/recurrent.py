"""Recurrent layers as the hand-written simulation computes them: every step in time shares the places of the layer's operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dataflow import Kind, Name, NotUnderstood
from .machine import Machine

GEMM = Kind("Gemm", "product", weights=((1, 0),), bias=2)
ADD, MUL, SUB, SIGMOID, TANH, RELU, CONCAT = (Kind(t) for t in ("Add", "Mul", "Sub", "Sigmoid", "Tanh", "Relu", "Concat"))
State = tuple[Name, ...]


def _add(m: Machine, a: Name, b: Name) -> Name:
    return m.compute(ADD, torch.add, a, b)


def _mul(m: Machine, a: Name, b: Name) -> Name:
    return m.compute(MUL, torch.mul, a, b)


def _sigmoid(m: Machine, a: Name) -> Name:
    return m.compute(SIGMOID, torch.sigmoid, a)


def _tanh(m: Machine, a: Name) -> Name:
    return m.compute(TANH, torch.tanh, a)


def _chunks(m: Machine, x: Name, count: int) -> list[Name]:
    return [m.move(lambda t, i=i: t.chunk(count, -1)[i], x) for i in range(count)]


def _linear(m: Machine, x: Name, weight: Tensor, bias: Tensor | None) -> Name:
    w = m.constant(weight, weight=True)
    return m.compute(GEMM, F.linear, x, w) if bias is None else m.compute(GEMM, F.linear, x, w, m.constant(bias))


def _lstm(m: Machine, gates: Name, state: State, weight: Tensor, bias: Tensor | None) -> State:
    hidden, cell = state
    i, f, g, o = _chunks(m, _add(m, gates, _linear(m, hidden, weight, bias)), 4)
    kept = _mul(m, _sigmoid(m, f), cell)
    cell = _add(m, kept, _mul(m, _sigmoid(m, i), _tanh(m, g)))
    return _mul(m, _sigmoid(m, o), _tanh(m, cell)), cell


def _gru(m: Machine, gates: Name, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    reset, update, candidate = _chunks(m, gates, 3)
    reset_h, update_h, candidate_h = _chunks(m, _linear(m, hidden, weight, bias), 3)
    gated = _mul(m, _sigmoid(m, _add(m, reset, reset_h)), candidate_h)
    candidate = _tanh(m, _add(m, candidate, gated))
    share = _sigmoid(m, _add(m, update, update_h))
    return (_add(m, candidate, _mul(m, share, m.compute(SUB, torch.sub, hidden, candidate))),)


def _rnn(kind: Kind, function: Callable[[Tensor], Tensor]) -> Callable[..., State]:
    def cell(m: Machine, gates: Name, state: State, weight: Tensor, bias: Tensor | None) -> State:
        return (m.compute(kind, function, _add(m, gates, _linear(m, state[0], weight, bias))),)

    return cell


def _cell_of(module: nn.Module) -> tuple[Callable[..., State], int]:
    """The formula of a layer, and how many states it has."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return _lstm, 2
    if isinstance(module, nn.GRU | nn.GRUCell):
        return _gru, 1
    return (_rnn(RELU, torch.relu) if module.nonlinearity == "relu" else _rnn(TANH, torch.tanh)), 1


def recur(m: Machine, module: nn.RNNBase | nn.RNNCellBase, use: str, names: list[Name]) -> Name:
    """What the first result of the layer is; its state begins at zero."""
    if module.training and isinstance(module, nn.RNNBase) and module.dropout:
        raise NotUnderstood("dropout between recurrent layers")
    if isinstance(module, nn.RNNCellBase):
        return _single(m, module, use, names)
    x = names[0]
    if module.batch_first:
        x = m.move(lambda t: t.transpose(0, 1), x)
    steps, batch, _ = x.value.tensor.shape
    x = m.move(lambda t: t.flatten(0, 1), x)
    for layer in range(module.num_layers):
        found = [_direction(m, module, x, layer, reverse, steps, batch) for reverse in range(1 + module.bidirectional)]
        x = found[0] if len(found) == 1 else m.compute(CONCAT, lambda a, b: torch.cat([a, b], -1), *found)
    x = m.move(lambda t: t.reshape(steps, batch, t.shape[-1]), x)
    return m.move(lambda t: t.transpose(0, 1), x) if module.batch_first else x


def _direction(m: Machine, module: nn.RNNBase, x: Name, layer: int, reverse: int, steps: int, batch: int) -> Name:
    cell, states = _cell_of(module)
    name = f"l{layer}{'_reverse' if reverse else ''}"
    w_ih, w_hh, b_ih, b_hh = (getattr(module, f"{part}_{name}", None) for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    with m.call(module, name):
        gates = _linear(m, x, w_ih, b_ih)
        state: State = tuple(m.zeros(x.value.tensor.new_zeros(batch, module.hidden_size)) for _ in range(states))
        outputs = []
        for step in reversed(range(steps)) if reverse else range(steps):
            part = m.move(lambda t, at=step: t[at * batch : (at + 1) * batch], gates)
            with m.call(module, name, "cell"):
                state = cell(m, part, state, w_hh, b_hh)
            outputs.append(state[0])
        return m.compute(CONCAT, lambda *parts: torch.cat(parts), *(outputs[::-1] if reverse else outputs))


def _single(m: Machine, module: nn.RNNCellBase, use: str, names: list[Name]) -> Name:
    cell, states = _cell_of(module)
    x = names[0]
    in_steps = "flatten" in use
    if in_steps:
        x = m.move(lambda t: t.flatten(0, 1), x)
    rows = x.value.tensor.shape[0]
    state = (names[1],) if len(names) > 1 else tuple(m.zeros(x.value.tensor.new_zeros(rows, module.hidden_size)) for _ in range(states))
    with m.call(module, "cell"):
        gates = _linear(m, x, module.weight_ih, module.bias_ih)
        out = cell(m, gates, state, module.weight_hh, module.bias_hh)[0]
    return m.move(lambda t: t.view(names[0].value.tensor.shape), out) if in_steps else out
