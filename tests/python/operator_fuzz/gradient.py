"""The gradient in x, where x lies in odd memory or is written in place: that of the same call on contiguous tensors, to the bit."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from operator_fuzz.outcome import Arguments, assert_equal, call, is_plain, plain, tensors
from operator_fuzz.spoil import permuted

DIFFERENTIABLE = (
    "fake_quantize",
    "fake_quantize_",
    "fake_quantize_dynamic",
    "round_to_format",
    "round_to_format_",
    "round_to_format_counted",
    "round_to_format_dynamic",
    "observe_fake_quantize",
)


def judge_gradient(rng: random.Random, operator: torch._ops.OpOverload, arguments: Arguments) -> None:
    """Of a call that went well."""
    x = arguments["x"] if str(operator).removeprefix("qsim.").removesuffix(".default") in DIFFERENTIABLE else None
    if not isinstance(x, Tensor) or not is_plain(x) or x.is_neg() or x.is_inference() or x.numel() == 0 or len(set(_places(x))) < x.numel():
        return
    others = {name: value for name, value in arguments.items() if name != "x"}
    grad = torch.randn(x.shape).to(x.dtype)
    odd = rng.choice([grad, permuted(rng, grad), torch.ones((), dtype=x.dtype).expand_as(x)])
    assert_equal(_gradient(operator, others, x, odd), _gradient(operator, others, plain(x), odd), "the gradient differs")


def _places(x: Tensor) -> list[int]:
    """Where in its memory each element lies."""
    length = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return torch.arange(length).as_strided(x.shape, x.stride()).flatten().tolist()


def _gradient(operator: torch._ops.OpOverload, others: Arguments, x: Tensor, grad: Tensor) -> Tensor:
    length = x.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    where = (x.shape, x.stride(), x.storage_offset())
    memory = torch.as_strided(x.detach(), (length,), (1,), 0).clone().requires_grad_()
    held = {name: plain(value) for name, value in others.items()}
    with torch.enable_grad():
        result = tensors(call(operator, {**held, "x": (memory * 1).as_strided(*where)}))[0]
    (found,) = torch.autograd.grad(result, memory, grad)
    return found.as_strided(*where)
