"""Operations of the programs: how each is written in Python, and what the hand-written simulation computes in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .dataflow import Kind, Name
from .layers import GEMM
from .machine import Machine
from .operation import FLAT, Operation, Simulate, binary, moved, unary
from .rarer_operations import RARER

NUMBERS = [round(-1 + 2 * i / 7, 6) for i in range(8)]


def _in_place(kind: Kind, function: Callable[..., Tensor]) -> Simulate:
    return lambda m, x, *rest: m.change(kind, function, x, *rest)


_FUNCTIONS: dict[str, tuple[Kind, Callable[[Tensor], Tensor], str]] = {  # what is written in one of several ways
    "relu": (Kind("Relu"), torch.relu, "F.relu({0}) | torch.relu({0}) | {0}.relu()"),
    "relu6": (Kind("Clip"), F.relu6, "F.relu6({0})"),
    "hardtanh": (Kind("Clip"), F.hardtanh, "F.hardtanh({0})"),
    "clamp": (Kind("Clip"), lambda x: x.clamp(-1.0, 1.0), "{0}.clamp(-1.0, 1.0) | torch.clamp({0}, min=-1.0, max=1.0)"),
    "leaky_relu": (Kind("LeakyRelu"), lambda x: F.leaky_relu(x, 0.1), "F.leaky_relu({0}, 0.1)"),
    "elu": (Kind("Elu"), F.elu, "F.elu({0})"),
    "gelu": (Kind("Gelu"), F.gelu, "F.gelu({0})"),
    "silu": (Kind("Swish"), F.silu, "F.silu({0})"),
    "mish": (Kind("Mish"), F.mish, "F.mish({0})"),
    "softplus": (Kind("Softplus"), F.softplus, "F.softplus({0})"),
    "sigmoid": (Kind("Sigmoid"), torch.sigmoid, "torch.sigmoid({0}) | {0}.sigmoid()"),
    "F.sigmoid": (Kind("Sigmoid", hidden=True), F.sigmoid, "F.sigmoid({0})"),
    "tanh": (Kind("Tanh"), torch.tanh, "torch.tanh({0}) | {0}.tanh()"),
    "F.tanh": (Kind("Tanh", hidden=True), F.tanh, "F.tanh({0})"),
    "hardswish": (Kind("HardSwish", hidden=True), F.hardswish, "F.hardswish({0})"),
    "hardsigmoid": (Kind("HardSigmoid", hidden=True), F.hardsigmoid, "F.hardsigmoid({0})"),
    "abs": (Kind("Abs"), torch.abs, "{0}.abs() | torch.abs({0})"),
    "builtin abs": (Kind("Abs", hidden=True), abs, "abs({0})"),
    "neg": (Kind("Neg"), torch.neg, "-{0} | {0}.neg() | torch.neg({0})"),
    "half": (Kind("Mul"), lambda x: x * 0.5, "{0} * 0.5 | 0.5 * {0} | {0}.mul(0.5)"),
    "shift": (Kind("Add"), lambda x: x + 0.5, "{0} + 0.5 | 0.5 + {0} | torch.add({0}, 0.5)"),
    "two minus": (Kind("Sub"), lambda x: 2.0 - x, "2.0 - {0} | torch.rsub({0}, 2.0)"),
    "divide": (Kind("Div"), lambda x: x / 3.0, "{0} / 3.0 | torch.div({0}, 3.0)"),
    "square": (Kind("Pow"), lambda x: x**2, "{0} ** 2 | torch.square({0}) | {0}.pow(2)"),
    "sin": (Kind("Sin"), torch.sin, "torch.sin({0}) | {0}.sin()"),
    "erf": (Kind("Erf"), torch.erf, "torch.erf({0})"),
    "threshold": (Kind("threshold"), lambda x: F.threshold(x, 0.0, 0.0), "F.threshold({0}, 0.0, 0.0)"),
    "softsign": (Kind("Softsign"), F.softsign, "F.softsign({0})"),
    "softmax": (Kind("Softmax"), lambda x: x.softmax(-1), "F.softmax({0}, dim=-1) | {0}.softmax(-1) | torch.softmax({0}, -1)"),
    "log_softmax": (Kind("LogSoftmax"), lambda x: F.log_softmax(x, -1), "F.log_softmax({0}, -1)"),
}


def _functions() -> list[Operation]:
    found = []
    for name, (kind, function, sources) in _FUNCTIONS.items():
        ways = sources.split(" | ")
        found += [Operation(f"{name} {way}" if len(ways) > 1 else name, way, unary(kind, function), weight=1) for way in ways]
    return found


def _contiguous(m: Machine, x: Name) -> Name:
    return x if x.read().tensor.is_contiguous() else m.move(lambda t: t.contiguous(), x, fresh=True)


def _layer_norm(m: Machine, x: Name) -> Name:
    return m.compute(Kind("LayerNormalization", "norm"), lambda t: F.layer_norm(t, (8,)), x)


def _swapped(m: Machine, x: Name, *, axis: int) -> Name:
    parts = [m.move(lambda t, i=i: t.chunk(2, axis)[i], x) for i in (1, 0)]
    return m.compute(Kind("Concat"), lambda a, b: torch.cat([a, b], axis), *parts)


def _slice(start: int, stop: int, axis: int = -1) -> Callable[[Tensor], Tensor]:
    return lambda t: t.narrow(axis, start, stop - start)


def _halves(m: Machine, x: Name, y: Name) -> Name:
    parts = [m.move(_slice(0, 4), x), m.move(_slice(4, 8), y)]
    return m.compute(Kind("Concat"), lambda a, b: torch.cat([a, b], -1), *parts)


def _stack(m: Machine, x: Name, y: Name) -> Name:
    both = m.compute(Kind("Concat"), lambda a, b: torch.stack([a, b]), x, y)
    return m.compute(Kind("ReduceMean"), lambda t: t.mean(0), both)


def _gated_by_slice(m: Machine, x: Name, y: Name) -> Name:
    gate = m.compute(Kind("Sigmoid"), torch.sigmoid, m.move(_slice(0, 1, 1), x))
    return m.compute(Kind("Mul"), torch.mul, gate, y)


def _less_mean(m: Machine, x: Name) -> Name:
    return m.compute(Kind("Sub"), torch.sub, x, m.compute(Kind("ReduceMean"), lambda t: t.mean(-1, keepdim=True), x))


def _plus_max(m: Machine, x: Name, y: Name) -> Name:
    return m.compute(Kind("Add"), torch.add, m.move(lambda t: t.amax(-1, keepdim=True), x, fresh=True), y)


def _where(m: Machine, x: Name, y: Name) -> Name:
    m.ask(lambda t: True, x)  # the mask
    return m.move(lambda x, y: torch.where(x > 0, x, y), x, y, fresh=True)


def _masked_fill(m: Machine, x: Name) -> Name:
    m.ask(lambda t: True, x)
    return m.move(lambda t: t.masked_fill(t > 1, 1.0), x, fresh=True, numbers=True)


def _sorted(m: Machine, x: Name) -> Name:
    m.ask(lambda t: True, x)  # the indices
    return m.move(lambda t: t.sort(dim=-1).values, x, fresh=True)


def _set_column(m: Machine, x: Name) -> None:
    def written(t: Tensor) -> Tensor:
        t = t.clone()
        t[..., 2] = 0.25
        return t

    m.insert(written, x, numbers=True)


def _set_half(m: Machine, x: Name, y: Name) -> None:
    def written(t: Tensor, half: Tensor) -> Tensor:
        return torch.cat([half, t[..., 4:]], -1)

    m.insert(written, x, m.move(_slice(4, 8), y))


MATMUL = Kind("MatMul", "product", weights=((0, -2), (1, -1)))
ATTENTION = Kind("Attention", "product")


def _attention(m: Machine, x: Name, y: Name) -> Name:
    return m.compute(ATTENTION, lambda q, k, v: F.scaled_dot_product_attention(q, k, v), x, y, y)


def _scores(m: Machine, x: Name, y: Name) -> Name:
    scores = m.compute(MATMUL, torch.matmul, x, m.move(lambda t: t.transpose(-1, -2), y))
    weights = m.compute(Kind("Softmax"), lambda t: t.softmax(-1), m.compute(Kind("Mul"), lambda t: t * 0.35, scores))
    return m.compute(MATMUL, torch.matmul, weights, y)


def _literal(m: Machine, x: Name) -> Name:
    return m.compute(
        Kind("Add"), torch.add, x, m.unknown("literal", torch.tensor(NUMBERS, dtype=x.value.tensor.dtype, device=x.value.tensor.device))
    )


def _from_numpy(m: Machine, x: Name) -> Name:
    numbers = torch.as_tensor(np.linspace(0.5, 1.5, 8), dtype=x.value.tensor.dtype, device=x.value.tensor.device)
    return m.compute(Kind("Mul"), torch.mul, x, m.unknown("numpy", numbers))


def _linear(m: Machine, x: Name, *parameters: Name) -> Name:
    return m.compute(GEMM, F.linear, x, *parameters)


def _right(m: Machine, x: Name, w: Name) -> Name:
    return m.compute(MATMUL, torch.matmul, x, w)


def _scaled_weight(m: Machine, x: Name, w: Name, g: Name) -> Name:
    return m.compute(GEMM, F.linear, x, m.compute(Kind("Mul"), torch.mul, w, g))


def _turned_weight(m: Machine, x: Name, w: Name) -> Name:
    return m.compute(GEMM, F.linear, x, m.move(lambda t: t.t(), w))


def _plus_product(m: Machine, x: Name, state: Name, w: Name) -> Name:
    return m.compute(_ADD, torch.add, x, m.compute(GEMM, F.linear, state, w))


def _dropout(m: Machine, x: Name) -> Name:
    return m.move(lambda t: F.dropout(t, 0.1, m.training), x, fresh=m.training)


def _resized(t: Tensor) -> Tensor:
    return F.interpolate(t, size=(5, 5))


_ADD, _MUL, _SUB = Kind("Add"), Kind("Mul"), Kind("Sub")

TABLE: dict[str, Operation] = {
    op.name: op
    for op in (
        *_functions(),
        Operation("layer_norm", "F.layer_norm({0}, (8,))", _layer_norm, forms=FLAT),
        Operation("add", "{0} + {1}", binary(_ADD, torch.add), 2, weight=12),
        Operation("torch.add", "torch.add({0}, {1})", binary(_ADD, torch.add), 2, weight=2),
        Operation("add scaled", "torch.add({0}, {1}, alpha=0.5)", binary(_ADD, lambda x, y: torch.add(x, y, alpha=0.5)), 2),
        Operation("sub", "{0} - {1}", binary(_SUB, torch.sub), 2, weight=4),
        Operation("mul", "{0} * {1}", binary(_MUL, torch.mul), 2, weight=6),
        Operation("maximum", "torch.maximum({0}, {1})", binary(Kind("Max"), torch.maximum), 2),
        Operation("lerp", "torch.lerp({0}, {1}, 0.3)", binary(Kind("lerp"), lambda x, y: torch.lerp(x, y, 0.3)), 2),
        Operation("quotient", "{0} / ({1}.abs() + 1.0)", None, 2),
        Operation("rms", "{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + 0.1)", None),
        # Views and what moves values.
        Operation("view", "{0}.view({0}.shape)", moved(lambda t: t), aliases=True),
        Operation("reshape", "{0}.flatten(0, 1).unflatten(0, {0}.shape[:2])", moved(lambda t: t), forms=("seq", "img"), aliases=True),
        Operation("transpose", "{0}.transpose(1, -1).contiguous().transpose(1, -1)", moved(lambda t: t.mT.contiguous().mT), forms=("seq",)),
        Operation("contiguous", "{0}.contiguous()", _contiguous, aliases=True),
        Operation("all of it", "{0}[:]", moved(lambda t: t[:]), aliases=True),
        Operation("clone", "{0}.clone()", moved(lambda t: t.clone(), fresh=True)),
        Operation("detach", "{0}.detach()", moved(lambda t: t.detach()), aliases=True, weight=1),
        Operation("roll", "torch.roll({0}, 1, -1)", moved(lambda t: t.roll(1, -1), fresh=True)),
        Operation("flip", "{0}.flip(-1)", moved(lambda t: t.flip(-1), fresh=True)),
        Operation("sort", "{0}.sort(dim=-1).values", _sorted, weight=1),
        Operation("swap", "torch.cat({0}.chunk(2, -1)[::-1], -1)", lambda m, x: _swapped(m, x, axis=-1), forms=FLAT),
        Operation("swap channels", "torch.cat({0}.chunk(2, 1)[::-1], 1)", lambda m, x: _swapped(m, x, axis=1), forms=("img",)),
        Operation("halves", "torch.cat([{0}[..., :4], {1}[..., 4:]], -1)", _halves, 2, FLAT, weight=3),
        Operation("stack", "torch.stack([{0}, {1}]).mean(0)", _stack, 2),
        Operation("gated by a slice", "{0}[:, :1].sigmoid() * {1}", _gated_by_slice, 2, weight=4),
        Operation("less its mean", "{0} - {0}.mean(-1, keepdim=True)", _less_mean),
        Operation("plus maximum", "{0}.amax(-1, keepdim=True) + {1}", _plus_max, 2),
        Operation("where", "torch.where({0} > 0, {0}, {1})", _where, 2, rough=True),
        Operation("masked_fill", "{0}.masked_fill({0} > 1, 1.0)", _masked_fill),
        Operation(
            "upsample",
            "F.upsample({0}, size=(5, 5))",
            unary(Kind("Resize", hidden=True), _resized),
            forms=("img",),
        ),
        Operation("resized", "F.interpolate({0}, size=(5, 5))", unary(Kind("Resize"), _resized), forms=("img",)),
        Operation("dropout", "F.dropout({0}, 0.1, self.training)", _dropout, aliases=True, weight=1),
        Operation("vmap", "torch.vmap(torch.tanh)({0})", None, weight=1),
        Operation("complex", "torch.view_as_complex(torch.stack([{0}, {0}], -1)).abs()", None, weight=1),
        # In place.
        Operation("relu in place", "F.relu({0}, inplace=True)", _in_place(Kind("Relu"), torch.relu), in_place=True, weight=4),
        Operation("relu_", "{0}.relu_()", _in_place(Kind("Relu"), torch.relu), in_place=True),
        Operation("torch.relu_", "torch.relu_({0})", _in_place(Kind("Relu", hidden=True), torch.relu), in_place=True),
        Operation("mul_", "{0}.mul_(0.7)", _in_place(_MUL, lambda t: t * 0.7), in_place=True),
        Operation("add_", "{0}.add_(0.3)", _in_place(_ADD, lambda t: t + 0.3), in_place=True),
        Operation("tanh_", "{0}.tanh_()", _in_place(Kind("Tanh"), torch.tanh), in_place=True),
        Operation("clamp_", "{0}.clamp_(-1.0, 1.0)", _in_place(Kind("Clip"), lambda t: t.clamp(-1.0, 1.0)), in_place=True),
        Operation(
            "mul_ without a gradient",
            "torch.no_grad()(torch.Tensor.mul_)({0}, 0.7)",
            _in_place(_MUL, lambda t: t + (t * 0.7 - t).detach()),
            in_place=True,
            weight=1,
        ),
        Operation("silu in place", "F.silu({0}, inplace=True)", _in_place(Kind("Swish"), F.silu), in_place=True, weight=1),
        Operation("add_ another", "{0}.add_({1})", _in_place(_ADD, torch.add), 2, in_place=True, weight=3),
        Operation("mul_ another", "{0}.mul_({1})", _in_place(_MUL, torch.mul), 2, in_place=True, weight=1),
        Operation("increment", "{0} += {1}", _in_place(_ADD, torch.add), 2, in_place=True, statement=True, weight=6),
        Operation("increment by one", "{0} += 1.0", _in_place(_ADD, lambda t: t + 1.0), in_place=True, statement=True),
        Operation("scale half in place", "{0}[..., :4].mul_(0.5)", None, in_place=True, statement=True),
        Operation("set column", "{0}[..., 2] = 0.25", _set_column, in_place=True, statement=True),
        Operation("set half", "{0}[..., :4] = {1}[..., 4:]", _set_half, 2, FLAT, in_place=True, statement=True),
        Operation("masked_fill_", "{0}.masked_fill_({0} > 1, 1.0)", None, in_place=True),
        # Products.
        Operation("attention", "F.scaled_dot_product_attention({0}, {1}, {1})", _attention, 2, ("seq",), weight=3),
        Operation("scores", "(({0} @ {1}.transpose(-1, -2)) * 0.35).softmax(-1) @ {1}", _scores, 2, ("seq",), weight=3),
        Operation("linear", "F.linear({0}, {a0})", _linear, 1, FLAT, ("matrix",), weight=3),
        Operation("at matrix", "{0} @ {a0}", _right, 1, FLAT, ("matrix",), weight=2),
        Operation("scaled weight", "F.linear({0}, {a0} * {a1})", _scaled_weight, 1, FLAT, ("matrix", "vector")),
        Operation("weight of a layer", "F.linear({0}, {a0}, {a1})", _linear, 1, FLAT, ("layer weight", "layer bias")),
        Operation("turned weight of a layer", "F.linear({0}, {a0}.t())", _turned_weight, 1, FLAT, ("layer weight",)),
        Operation("times vector", "{0} * {a0}", binary(_MUL, torch.mul), 1, FLAT, ("vector",)),
        Operation("plus vector", "{0} + {a0}", binary(_ADD, torch.add), 1, FLAT, ("vector",)),
        Operation("plus state", "{0} + {a0}", binary(_ADD, torch.add), 1, FLAT, ("buffer",), weight=0),
        Operation("plus product of state", "{0} + F.linear({a0}, {a1})", _plus_product, 1, FLAT, ("buffer", "matrix"), weight=0),
        Operation("doubled", "{0} * 2.0", unary(_MUL, lambda t: t * 2.0), weight=0),
        Operation("twice", "{0} + {0}", lambda m, x: m.compute(_ADD, torch.add, x, x), weight=0),
        # Tensors that are made of numbers.
        Operation("plus literal", "{0} + torch.tensor({numbers}, dtype={0}.dtype, device={0}.device)", _literal, forms=FLAT, weight=1),
        Operation(
            "through a list",
            "torch.tensor({0}.detach().tolist(), dtype={0}.dtype, device={0}.device)",
            lambda m, x: m.through_python(x, 1.0),
            weight=1,
        ),
        Operation(
            "through numpy",
            "torch.from_numpy({0}.detach().cpu().numpy() * 2).to({0}.device)",
            lambda m, x: m.through_python(x, 2.0),
            weight=1,
        ),
        Operation(
            "times numpy",
            "{0} * torch.as_tensor(np.linspace(0.5, 1.5, 8), dtype={0}.dtype, device={0}.device)",
            _from_numpy,
            forms=FLAT,
            weight=1,
        ),
        *RARER,
    )
}


def _mean_is_positive(m: Machine, x: Name) -> bool:
    return m.ask(lambda t: t.mean() > 0, x)  # a number for Python alone, and what only it reads, stay in float


def _is_large(m: Machine, x: Name) -> bool:
    return m.ask(lambda t: t.abs().amax() > 60.0, x)


# What branches ask of data: expression -> the same of the hand-written simulation.
QUESTIONS: dict[str, Callable[[Machine, Name], bool]] = {"{0}.mean() > 0": _mean_is_positive, "{0}.abs().amax() > 60.0": _is_large}


def source_of(op: Operation, operands: tuple[str, ...], attributes: tuple[str, ...]) -> str:
    """The operation as it is written in a program."""
    fields: dict[str, Any] = {f"a{i}": name for i, name in enumerate(attributes)}
    return op.source.format(*operands, numbers=NUMBERS, **fields)
