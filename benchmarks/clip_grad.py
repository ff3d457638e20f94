"""Gradient clipping on the gradients of a ResNet-18-like model."""

from __future__ import annotations

import math
from functools import partial

import torch
from case import Calls, Case

import qsim

RESNET_18 = 11_689_512  # elements in 62 tensors
BELOW, ABOVE = 1e9, 1e-30  # limits: the second leaves something to scale every time


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width in [64, 128, 256, 512]:
        for inputs in [before, width, width, width]:
            shapes += [(width, inputs, 3, 3), (width,), (width,)]
        if width != before:
            shapes += [(width, before, 1, 1), (width,), (width,)]
        before = width
    made = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [*shapes, (1000, 512), (1000,)]]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def clip(dtype: torch.dtype, norm_type: float, limit: float, _: int) -> Calls:
    ours, theirs = parameters(dtype), parameters(dtype)
    return {
        "qsim": lambda: qsim.clip_grad_norm_(ours, limit, norm_type),
        "torch core": lambda: torch.nn.utils.clip_grad_norm_(theirs, limit, norm_type),
    }


CASES = [
    Case(
        "clip_grad_norm_",
        f"p = {p:g}, {how}",
        (RESNET_18,),
        partial(clip, getattr(torch, dtype), p, limit),
        moved * size,
        dtype,
        parallel=p == 2,
    )
    for dtype, size in [("float32", 4), ("bfloat16", 2)]
    for p in ([2.0, 1.0, math.inf] if dtype == "float32" else [2.0])
    for how, limit, moved in [("below the limit", BELOW, 1), ("clipped", ABOVE, 3)]
]
