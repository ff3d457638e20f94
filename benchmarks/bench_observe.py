"""Observers against what torch offers: ns per element and ratios, each group of calls alternating in one process.

python benchmarks/bench_observe.py [--threads 1] [--size 1048576]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import interleaved
from torch import Tensor
from torch.ao.quantization.observer import HistogramObserver

from qsim import ops


def range_state(*shape: int) -> list[Tensor]:
    return [torch.full(shape, torch.inf), torch.full(shape, -torch.inf), torch.zeros(4, dtype=torch.int64)]


def range_of(x: Tensor, *shape: int, axis: int | None = None, block_size: int | None = None) -> Callable[[], None]:
    state = range_state(*shape)
    return lambda: ops.observe_range_(x, *state, axis=axis, block_size=block_size)


def sketch_of(x: Tensor) -> Callable[[], None]:
    state = [*range_state(), torch.zeros(16384, dtype=torch.int64)]
    return lambda: ops.observe_(x, *state)


def report(title: str, baseline: str, candidates: dict[str, Callable[[], object]], size: int) -> None:
    """Each candidate alternates with the baseline alone: a third tensor would push both out of the cache."""
    print(f"\n{title}")
    for name, call in candidates.items():
        seconds = interleaved({baseline: candidates[baseline], name: call}, seconds=0.3)
        print(f"  {name:34s} {seconds[name] / size * 1e9:8.3f} ns/element   {seconds[name] / seconds[baseline]:7.3f} x {baseline}")


def bench_range(x: Tensor) -> None:
    broken = x.clone()
    broken[::1024] = torch.nan
    image, small, rows = x.view(-1, 64, 32, 32), x.view(-1, 256, 4, 4), x.view(-1, 1024)
    candidates: dict[str, Callable[[], object]] = {
        "aminmax": lambda: torch.aminmax(x),
        "per tensor": range_of(x),
        "per tensor, NaN in every block": range_of(broken),
        "channel 1 of [n, 64, 32, 32]": range_of(image, 64, axis=1),
        "the same, channels_last": range_of(image.contiguous(memory_format=torch.channels_last), 64, axis=1),
        "channel 1 of [n, 256, 4, 4]": range_of(small, 256, axis=1),
        "axis 0 of [n, 1024]": range_of(rows, len(rows), axis=0),
        "axis 1 of [n, 1024]": range_of(rows, 1024, axis=1),
        "blocks of 32 along axis 1": range_of(rows, len(rows), 32, axis=1, block_size=32),
        "blocks of 32 along axis 0": range_of(rows, len(rows) // 32, 1024, axis=0, block_size=32),
    }
    report(f"range, {x.numel()} float32", "aminmax", candidates, x.numel())
    for dtype in [torch.bfloat16, torch.float16, torch.float64]:
        y = x.to(dtype)
        report(f"range, {x.numel()} {dtype}", "aminmax", {"aminmax": lambda y=y: torch.aminmax(y), "per tensor": range_of(y)}, x.numel())


def bench_sketch(x: Tensor) -> None:
    theirs = HistogramObserver()
    candidates: dict[str, Callable[[], object]] = {
        "HistogramObserver": lambda: theirs(x),
        "normal": sketch_of(x),
        "relu": sketch_of(x.relu()),
        "uniform": sketch_of(torch.rand_like(x)),
        "constant": sketch_of(torch.full_like(x, 0.3)),
        "zeros": sketch_of(torch.zeros_like(x)),
        "heavy tail": sketch_of(x * x.abs().pow(6)),
        "bfloat16": sketch_of(x.bfloat16()),
        "float16": sketch_of(x.half()),
    }
    report(f"range + sketch, {x.numel()} elements", "HistogramObserver", candidates, x.numel())
    small = x[:1024]
    candidates = {"HistogramObserver": lambda: theirs(small), "range + sketch": sketch_of(small), "range": range_of(small)}
    report("1024 elements", "HistogramObserver", candidates, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=2**20, help="elements, a multiple of 65536")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    x = torch.randn(arguments.size)
    bench_range(x)
    bench_sketch(x)


if __name__ == "__main__":
    main()
