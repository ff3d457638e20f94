"""Gradient clipping on the gradients of a ResNet-18-like model."""

from __future__ import annotations

import math
from functools import partial

import resnet_18
import torch
from case import Calls, Case

import qsim

BELOW, ABOVE = 1e9, 1e-30  # limits: the second leaves something to scale every time


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in resnet_18.shapes()]
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
        (resnet_18.ELEMENTS,),
        partial(clip, getattr(torch, dtype), p, limit),
        moved * size,
        dtype,
        parallel=p == 2,
    )
    for dtype, size in [("float32", 4), ("bfloat16", 2)]
    for p in ([2.0, 1.0, math.inf] if dtype == "float32" else [2.0])
    for how, limit, moved in [("below the limit", BELOW, 1), ("clipped", ABOVE, 3)]
]
