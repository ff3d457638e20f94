"""The Python tests on a GPU: `pytest -p on_cuda` (with tests/python on PYTHONPATH) puts there what tests make without a device.

Tensors and the parameters of modules are made on the CPU, with the CPU's random numbers, and moved; what qsim itself makes it makes where
it would. Comparisons and `numpy()` bring tensors back. A test that is about the CPU fails here for that reason alone: this is a search for
crashes and wrong numbers, to be read by a person, and no gate. QSIM_TEST_DEVICE names another device than cuda.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEVICE = os.environ.get("QSIM_TEST_DEVICE", "cuda")
FACTORIES = (
    "zeros ones empty full rand randn randint randperm tensor as_tensor arange linspace logspace eye from_numpy tril_indices triu_indices"
)
FILLED = "uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_"
COMPARED = "equal allclose isclose"


def of_a_test(depth: int = 2) -> bool:
    """Whether a test, or a module that it builds, calls: not qsim, and nothing of torch's but its layers."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return not name.startswith(("qsim", "torch.")) or name.startswith("torch.nn.modules")


def made_there(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def factory(*args: Any, **options: Any) -> Tensor:
        if torch.compiler.is_compiling() or options.get("device") is not None or options.get("out") is not None or not of_a_test():
            return make(*args, **options)
        made = make(*args, **options)
        if not made.is_cpu:
            return made
        needs = made.requires_grad
        return made.detach().to(DEVICE).requires_grad_(needs)

    return factory


def filled_as_on_the_cpu(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(fill)
    def filled(self: Tensor, *args: Any, **options: Any) -> Tensor:
        is_asked = of_a_test() or sys._getframe(1).f_globals["__name__"] == "torch.nn.init"
        if torch.compiler.is_compiling() or not self.is_cuda or not is_asked:
            return fill(self, *args, **options)
        return self.copy_(fill(torch.empty(self.shape, dtype=self.dtype), *args, **options))

    return filled


def here(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu() if value.is_cuda else value
    return type(value)(here(each) for each in value) if type(value) in (list, tuple) else value


def compared_here(compare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compare)
    def compared(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not of_a_test():
            return compare(*args, **options)
        return compare(*map(here, args), **options)

    return compared


def pytest_configure() -> None:
    for name in FACTORIES.split():
        setattr(torch, name, made_there(getattr(torch, name)))
    for name in FILLED.split():
        setattr(Tensor, name, filled_as_on_the_cpu(getattr(Tensor, name)))
    for name in COMPARED.split():
        setattr(torch, name, compared_here(getattr(torch, name)))
    torch.testing.assert_close = compared_here(torch.testing.assert_close)
    numpy, array = Tensor.numpy, Tensor.__array__
    Tensor.numpy = lambda self, *args, **options: numpy(here(self), *args, **options)  # type: ignore[method-assign]
    Tensor.__array__ = lambda self, *args, **options: array(here(self), *args, **options)  # type: ignore[method-assign]
    torch.backends.cudnn.allow_tf32 = False  # products as exact as the CPU's
