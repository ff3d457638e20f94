"""Observers: exact finite range with counts, and range with sketch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import peers
import torch
from case import Calls, Case
from torch import Tensor
from torch.ao.quantization.observer import HistogramObserver

from qsim import ops

Call = Callable[[], None]


def range_of(x: Tensor, *ranges: int, axis: int | None = None, block_size: int | None = None) -> Call:
    state = torch.full(ranges, torch.inf), torch.full(ranges, -torch.inf), torch.zeros(4, dtype=torch.int64)
    return lambda: ops.observe_range_(x, *state, axis=axis, block_size=block_size)


def sketch_of(x: Tensor) -> Call:
    state = torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.zeros(4, dtype=torch.int64), torch.zeros(16384, dtype=torch.int64)
    low_bits = torch.zeros((), dtype=torch.int32)
    return lambda: ops.observe_(x, *state, low_bits)


def whole_range(dtype: torch.dtype, n: int) -> Calls:
    x = torch.randn(n).to(dtype)
    calls: Calls = {"qsim": range_of(x), "aminmax": lambda: torch.aminmax(x)}
    if dtype == torch.float32:
        calls["torch.compile"] = lambda: peers.compiled(peers.finite_range)(x)
    return calls


def broken_range(n: int) -> Calls:
    x = torch.randn(n)
    x[::1024] = torch.nan
    return {"qsim": range_of(x), "aminmax": lambda: torch.aminmax(x)}


def channel_range(axis: int, n: int) -> Calls:
    x = torch.randn(n // 1024, 1024)
    return {
        "qsim": range_of(x, x.shape[axis], axis=axis),
        "aminmax": lambda: torch.aminmax(x),
        "aminmax of the axis": lambda: torch.aminmax(x, dim=1 - axis),
    }


def image_range(layout: torch.memory_format, n: int) -> Calls:
    x = torch.randn(n // 65536, 64, 32, 32).contiguous(memory_format=layout)
    return {"qsim": range_of(x, 64, axis=1), "aminmax": lambda: torch.aminmax(x)}


def block_range(n: int) -> Calls:
    x = torch.randn(n // 1024, 1024)
    return {"qsim": range_of(x, len(x), 32, axis=1, block_size=32), "aminmax": lambda: torch.aminmax(x)}


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ReLU": torch.relu,
    "constant": lambda x: torch.full_like(x, 0.3),
    "uniform": torch.rand_like,
    "heavy tail": lambda x: x * x.abs().pow(6),
}


def sketch(distribution: str, dtype: torch.dtype, n: int) -> Calls:
    x = DISTRIBUTIONS[distribution](torch.randn(n)).to(dtype)
    theirs = HistogramObserver()
    return {"qsim": sketch_of(x), "HistogramObserver": lambda: theirs(x)}


def four_distributions(n: int) -> Calls:
    normal, *others = (sketch_of(DISTRIBUTIONS[name](torch.randn(n))) for name in ("normal", "ReLU", "constant", "uniform"))
    return {"qsim": normal, "ReLU": others[0], "constant": others[1], "uniform": others[2]}


def sketch_against_one_thread(n: int) -> Calls:
    x, cores = torch.randn(n), torch.get_num_threads()
    call = sketch_of(x)

    def on_one_thread() -> None:
        torch.set_num_threads(1)
        call()
        torch.set_num_threads(cores)

    return {"qsim": call, "one thread": on_one_thread}


RANGE, SKETCH = "observe range", "observe range + sketch"
HISTOGRAM = {2**20: {"HistogramObserver": 1 / 25}}

CASES = [
    Case(RANGE, "per tensor", (2**20, 2**25), partial(whole_range, torch.float32), 4, bars={2**20: {"aminmax": 0.75}}, parallel=True),
    Case(RANGE, "per tensor", (2**20,), partial(whole_range, torch.bfloat16), 2, "bfloat16"),
    Case(RANGE, "per tensor", (2**20,), partial(whole_range, torch.float16), 2, "float16"),
    Case(RANGE, "per tensor", (2**20,), partial(whole_range, torch.float64), 8, "float64"),
    Case(RANGE, "NaN in every block", (2**20,), broken_range, 4, bars={2**20: {"aminmax": 3}}),
    Case(RANGE, "channel axis 0", (2**20,), partial(channel_range, 0), 4, bars={2**20: {"aminmax": 0.9}}),
    Case(RANGE, "channel axis 1", (2**20,), partial(channel_range, 1), 4, bars={2**20: {"aminmax": 0.9}}),
    Case(RANGE, "images, axis 1", (2**20,), partial(image_range, torch.contiguous_format), 4, bars={2**20: {"aminmax": 0.9}}),
    Case(RANGE, "images, channels_last", (2**20,), partial(image_range, torch.channels_last), 4, bars={2**20: {"aminmax": 0.9}}),
    Case(RANGE, "blocks of 32", (2**20,), block_range, 4),
    *(Case(SKETCH, name, (2**20,), partial(sketch, name, torch.float32), 4, bars=HISTOGRAM) for name in DISTRIBUTIONS),
    Case(SKETCH, "normal", (2**20,), partial(sketch, "normal", torch.bfloat16), 2, "bfloat16"),
    Case(SKETCH, "small", (1024,), partial(sketch, "normal", torch.float32), 4),
    Case(SKETCH, "four distributions", (2**20,), four_distributions, 4, bars={2**20: {"spread": 1.15}}),
    Case(SKETCH, "all cores", (2**22,), sketch_against_one_thread, 4, serial=False, parallel=True, parallel_bars={"one thread": 1 / 1.7}),
]
