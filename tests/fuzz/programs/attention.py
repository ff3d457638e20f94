"""Multi-head attention as the hand-written simulation computes it: its projections, its products and its softmax one by one."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from .dataflow import Kind, Name
from .machine import Machine

PROJECTION = Kind("Gemm", "product", weights=((1, 0),), bias=2)
MATMUL = Kind("MatMul", "product", weights=((0, -2), (1, -1)))
ATTENTION = Kind("Attention", "product")
MUL, SOFTMAX, MEAN = Kind("Mul"), Kind("Softmax"), Kind("ReduceMean")


def attend(m: Machine, module: nn.MultiheadAttention, use: str, names: list[Name]) -> Name:
    """What ``module(query, key, value)[0]`` does."""
    query = names[0]
    key = names[1] if "{1}" in use else query
    value = key if "{1}, {1}" in use or "{1}" not in use else query
    with m.call(module):
        given = [query, key, value]
        if module.batch_first:
            moved: dict[int, Name] = {}
            given = [moved.setdefault(id(name.value.tensor), m.move(lambda t: t.transpose(1, 0), name)) for name in given]
        out = _attention(m, module, *given, weighed="need_weights=False" not in use)
        return m.move(lambda t: t.transpose(1, 0), out) if module.batch_first else out


def _attention(m: Machine, module: nn.MultiheadAttention, query: Name, key: Name, value: Name, *, weighed: bool) -> Name:
    length, batch, width = query.value.tensor.shape
    heads, size = module.num_heads, width // module.num_heads
    with m.at(_way(query, key, value)):  # torch has each of these written apart
        q, k, v = _project(m, module, query, key, value)

    def split(t: Tensor) -> Tensor:
        return t.contiguous().view(t.shape[0], batch * heads, size).transpose(0, 1)

    q, k, v = (m.move(split, name) for name in (q, k, v))
    if weighed:
        q = m.compute(MUL, lambda t: t * math.sqrt(1.0 / size), q)
        scores = m.compute(MATMUL, lambda q, k: q.bmm(k), q, m.move(lambda t: t.transpose(-2, -1), k))
        weights = m.compute(SOFTMAX, lambda t: F.softmax(t, -1), scores)
        mixed = m.compute(MATMUL, lambda w, v: w.bmm(v), weights, v)
    else:
        q, k, v = (m.move(lambda t: t.view(batch, heads, -1, size), name) for name in (q, k, v))
        mixed = m.compute(ATTENTION, lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v)
        mixed = m.move(lambda t: t.permute(2, 0, 1, 3).contiguous().view(batch * length, width), mixed)
    if weighed:
        mixed = m.move(lambda t: t.transpose(0, 1).contiguous().view(length * batch, width), mixed)
    out = _linear(m, mixed, module.out_proj.weight, module.out_proj.bias)
    if weighed:
        heads_apart = m.move(lambda t: t.view(batch, heads, length, -1), weights)
        m.compute(MEAN, lambda t: t.mean(1), heads_apart)
    return m.move(lambda t: t.view(length, batch, width), out)


def _way(query: Name, key: Name, value: Name) -> int:
    """0 where all three are one tensor (in evaluation a dropout hands on what it is given), 1 where keys and values are, 2 otherwise."""
    q, k, v = (name.value.tensor for name in (query, key, value))
    return 0 if q is k is v else 1 if k is v else 2


def _linear(m: Machine, x: Name, weight: Tensor, bias: Tensor | None) -> Name:
    w = m.constant(weight, weight=True)
    return m.compute(PROJECTION, F.linear, x, w) if bias is None else m.compute(PROJECTION, F.linear, x, w, m.constant(bias))


def _project(m: Machine, module: nn.MultiheadAttention, query: Name, key: Name, value: Name) -> tuple[Name, Name, Name]:
    weight, bias = module.in_proj_weight, module.in_proj_bias
    width = query.value.tensor.shape[-1]
    way = _way(query, key, value)
    if way == 0:  # one product for all three
        all_three = _linear(m, query, weight, bias)
        return tuple(m.move(lambda t, i=i: t[..., i * width : (i + 1) * width], all_three) for i in range(3))  # type: ignore[return-value]
    parts = (1, 2) if way == 1 else (1, 1, 1)
    whole, whole_bias = m.constant(weight, weight=True), None if bias is None else m.constant(bias)
    found, begin = [], 0
    for x, count in zip((query, key, value), parts, strict=False):
        rows = slice(begin * width, (begin + count) * width)
        w = m.move(lambda t, rows=rows: t[rows], whole)
        b = [] if whole_bias is None else [m.move(lambda t, rows=rows: t[rows], whole_bias)]
        found.append(m.compute(PROJECTION, F.linear, x, w, *b))
        begin += count
    if len(parts) == 3:
        return found[0], found[1], found[2]
    k, v = (m.move(lambda t, i=i: t[..., i * width : (i + 1) * width], found[1]) for i in range(2))
    return found[0], k, v
