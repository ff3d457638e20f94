"""The random numbers that come next: of torch on every device, of Python and of NumPy."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class RandomNumbers:
    """Which random numbers came next when this was made."""

    def __init__(self) -> None:
        self._python, numpy = random.getstate(), sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy else None
        self._torch = torch.get_rng_state()
        module, indices = _accelerator()
        self._accelerator: list[Tensor] = [module.get_rng_state(*index) for index in indices]

    def put_back(self) -> None:
        """They come next again."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        module, indices = _accelerator()
        for index, state in zip(indices, self._accelerator, strict=False):  # strict: it may have been initialized since
            module.set_rng_state(state, *index)

    def is_same(self, other: RandomNumbers) -> bool:
        """Whether nothing was drawn between the two, of any of them."""
        mine, others = ([state._torch, *state._accelerator] for state in (self, other))
        drawn = len(mine) != len(others) or not all(map(torch.equal, mine, others))
        return not drawn and self._python == other._python and pickle.dumps(self._numpy) == pickle.dumps(other._numpy)


@contextmanager
def random_numbers_unchanged() -> Iterator[None]:
    """What the body draws comes next again on leaving, also by an exception."""
    before = RandomNumbers()
    try:
        yield
    finally:
        before.put_back()


def seed_random_numbers(seed: int) -> None:
    """As `torch.manual_seed`, which would also seed accelerators that are not in use, where nothing puts it back; and Python and NumPy."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    module, indices = _accelerator()
    if indices:
        (module.manual_seed_all if hasattr(module, "manual_seed_all") else module.manual_seed)(seed)  # mps has one device


def _accelerator() -> tuple[Any, list[tuple[int, ...]]]:
    """The module of the accelerator and, if it is in use, what its functions take for each device."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None, []
    module = torch.get_device_module(device)
    if device.type == "mps":  # one device, which nobody names
        return module, [()]
    return module, [(i,) for i in range(module.device_count())] if module.is_initialized() else []
