"""One random call, and many; a call is told by seed and index."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from operator_fuzz.gradient import judge_gradient
from operator_fuzz.outcome import judge, tensors
from operator_fuzz.scene import Scene, operators
from operator_fuzz.spoil import spoiled

OPERATORS = operators()


def one_call(seed: int, index: int) -> tuple[str, str]:
    """The operator, and how its call ended."""
    rng = random.Random(f"{seed} {index}")
    torch.default_generator.manual_seed(rng.getrandbits(60))  # torch.manual_seed costs as much as the call
    operator = rng.choice(OPERATORS)
    arguments = Scene(rng, operator).arguments(operator)
    for name in rng.sample(list(arguments), min(rng.choice([0, 0, 1, 1, 1, 2, 2, 3, 5]), len(arguments))):
        others = [x for key, value in arguments.items() if key != name for x in tensors(value) if x.layout == torch.strided]
        arguments[name] = spoiled(rng, arguments[name], others)
    try:
        ended = judge(operator, arguments)
        if ended == "equal":
            judge_gradient(rng, operator, arguments)
        return str(operator), ended
    except AssertionError as error:
        told = "\n".join(f"  {name} = {_told(value)}" for name, value in arguments.items())
        message = f"{operator}: {error}\n{told}\npython -m operator_fuzz --seed {seed} --only {index}"
        raise AssertionError(message) from error


def many_calls(seed: int, *, calls: int | None = None, seconds: float | None = None, trace: Path | None = None) -> Counter[tuple[str, str]]:
    """Calls until either limit; how often each operator ended how. `trace`: holds the index of the call, should one end the process."""
    ended: Counter[tuple[str, str]] = Counter()
    stop = time.monotonic() + seconds if seconds is not None else float("inf")
    file = os.open(trace, os.O_WRONLY | os.O_CREAT) if trace is not None else None
    for index in itertools.count() if calls is None else range(calls):
        if file is not None:
            os.pwrite(file, f"{index:12d}\n".encode(), 0)
        ended[one_call(seed, index)] += 1
        if time.monotonic() > stop:
            break
    return ended


def _told(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_told, value)) + "]"
    if not isinstance(value, Tensor):
        return repr(value)
    where = f", strides {list(value.stride())}" if value.layout == torch.strided and not value.is_nested else f", {value.layout}"
    flags = [flag for flag in ("requires_grad", "is_meta") if getattr(value, flag)] + (["neg"] if value.is_neg() else [])
    return f"{value.dtype}{'' if value.is_nested else list(value.shape)}{where} {' '.join(flags)}".rstrip()
