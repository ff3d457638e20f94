"""Gradient clipping against torch's, on the gradients of a ResNet-18-like model: ms per call and ratios.

python benchmarks/bench_clip_grad.py [--threads 1]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from timing import interleaved

import qsim


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """62 tensors, 11 million elements, as in ResNet-18."""
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


def report(title: str, theirs: Callable[[], object], ours: Callable[[], object]) -> None:
    seconds = interleaved({"torch": theirs, "qsim": ours})
    ratio = seconds["qsim"] / seconds["torch"]
    print(f"{title:34s} torch {seconds['torch'] * 1e3:7.3f} ms   qsim {seconds['qsim'] * 1e3:7.3f} ms   {ratio:6.3f} x torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        for norm_type in [2.0, 1.0, math.inf]:
            for max_norm, name in [(1e9, "below the limit"), (1e-30, "clipped")]:
                # Both clip the same tensors again and again: a limit of 1e-30 leaves something to scale every time.
                models = parameters(dtype), parameters(dtype)
                report(
                    f"{str(dtype)[6:]}, p = {norm_type:g}, {name}",
                    lambda p=models[0], m=max_norm, n=norm_type: torch.nn.utils.clip_grad_norm_(p, m, n),
                    lambda p=models[1], m=max_norm, n=norm_type: qsim.clip_grad_norm_(p, m, n),
                )


if __name__ == "__main__":
    main()
