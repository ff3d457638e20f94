"""fake_quantize against torch.clone, copy_, torch core and a torch.compile'd formula: ratios of minima in one process.

python benchmarks/bench_fake_quantize.py [--elements N] [--threads N] [--seconds S] [--no-compile]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import interleaved
from torch import Tensor

import qsim
from qsim.ops import fake_quantize, fake_quantize_

ops = torch.ops.qsim
GRID = (-8, 7)

Calls = dict[str, Callable[[], object]]


def parameters(shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, int, int]:
    return torch.full(shape, 0.31), torch.full(shape, 2, dtype=torch.int32), *GRID


def activation(n: int, channels_last: bool = False) -> Tensor:
    """[N, 64, 32, 32] of about n elements."""
    x = torch.randn(max(1, n // 65536), 64, 32, 32)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def forwards(n: int) -> list[tuple[str, Calls]]:
    """Each case names its baseline first."""
    x, y = torch.randn(n), torch.empty(n)
    image, last, matrix = activation(n), activation(n, channels_last=True), torch.randn(max(1, n // 1024), 1024)
    images, lasts, rows = (torch.empty_like(t) for t in (image, last, matrix))
    tensor, channel, block = parameters(), parameters((64,)), parameters((matrix.shape[0], 32))
    cases: list[tuple[str, Calls]] = [
        ("forward, reused output", {"copy_": lambda: y.copy_(x), "qsim": lambda: fake_quantize(x, *tensor, out=y)}),
        ("forward, fresh output", {"clone": x.clone, "qsim": lambda: fake_quantize(x, *tensor)}),
        ("in place", {"copy_": lambda: y.copy_(x), "qsim": lambda: fake_quantize_(y, *tensor)}),
        ("per channel, axis 1", {"copy_": lambda: images.copy_(image), "qsim": lambda: fake_quantize(image, *channel, axis=1, out=images)}),
        ("channels_last", {"copy_": lambda: lasts.copy_(last), "qsim": lambda: fake_quantize(last, *channel, axis=1, out=lasts)}),
        (
            "blocks of 32",
            {"copy_": lambda: rows.copy_(matrix), "qsim": lambda: fake_quantize(matrix, *block, axis=1, block_size=32, out=rows)},
        ),
        ("forward + mask", {"clone": x.clone, "qsim": lambda: ops.fake_quantize_with_mask(x, *tensor)}),
    ]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        wide = parameters() if dtype != torch.float64 else (torch.tensor(0.31, dtype=dtype), *tensor[1:])
        a, b = x.to(dtype), y.to(dtype)
        cases.append(
            (
                f"forward, {dtype}".replace("torch.", ""),
                {
                    "copy_": lambda a=a, b=b: b.copy_(a),
                    "mul": lambda a=a, b=b: torch.mul(a, 1.5, out=b),
                    "qsim": lambda a=a, b=b, p=wide: fake_quantize(a, *p, out=b),
                },
            )
        )
    return cases


def backwards(n: int) -> list[tuple[str, Calls]]:
    x, grad, y, tensor = torch.randn(n), torch.randn(n), torch.empty(n), parameters()
    mask = ops.fake_quantize_with_mask(x, *tensor)[1]
    image, last, channel = activation(n), activation(n, channels_last=True), parameters((64,))
    learn = ops.fake_quantize_learnable_backward
    return [
        ("backward from bits", {"clone": grad.clone, "qsim": lambda: ops.fake_quantize_mask_backward(grad, mask)}),
        ("backward from x", {"add": lambda: torch.add(grad, x), "qsim": lambda: ops.fake_quantize_backward(grad, x, *tensor)}),
        ("LSQ backward, per tensor", {"copy_": lambda: y.copy_(x), "clone": x.clone, "qsim": lambda: learn(grad, x, *tensor)}),
        ("LSQ backward, axis 1", {"clone": image.clone, "qsim": lambda: learn(image, image, *channel, axis=1)}),
        ("LSQ backward, channels_last", {"clone": last.clone, "qsim": lambda: learn(last, last, *channel, axis=1)}),
    ]


def formula(x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int) -> Tensor:
    return (torch.clamp(torch.round(x / scale) + zero_point, quant_min, quant_max) - zero_point) * scale


def peers(n: int, compiled: bool) -> list[tuple[str, Calls]]:
    x, tensor = torch.randn(n), parameters()
    core: Calls = {"torch core": lambda: torch.fake_quantize_per_tensor_affine(x, *tensor), "qsim": lambda: fake_quantize(x, *tensor)}
    cases = [("forward, fresh output", core)]
    if compiled:
        fused = torch.compile(formula)
        cases.append(("forward, fresh output", {"torch.compile": lambda: fused(x, *tensor), "qsim": core["qsim"]}))
    return cases


def small() -> list[tuple[str, Calls]]:
    x, tensor = torch.randn(1024), parameters()
    leaf = torch.randn(1024, requires_grad=True)
    return [
        (
            "1024 elements",
            {"torch core": lambda: torch.fake_quantize_per_tensor_affine(x, *tensor), "qsim": lambda: fake_quantize(x, *tensor)},
        ),
        (
            "1024 elements, requires grad",
            {"torch core": lambda: torch.fake_quantize_per_tensor_affine(leaf, *tensor), "qsim": lambda: fake_quantize(leaf, *tensor)},
        ),
    ]


def report(title: str, n: int, calls: Calls, seconds: float) -> None:
    best = interleaved(calls, seconds=seconds)
    own = best["qsim"]
    ratios = "  ".join(f"{own / best[name]:5.2f}x {name}" for name in calls if name != "qsim")
    print(f"{title:30} {own * 1e6:10.1f} us {own / n * 1e9:7.3f} ns/element   {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per line")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", default="", help="lines that contain this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    n = args.elements
    print(f"{n} elements, {args.threads} thread(s), CPU level {qsim.cpu_capability()}")
    for title, calls in [case for case in forwards(n) + backwards(n) + peers(n, not args.no_compile) if args.only in case[0]]:
        report(title, n, calls, args.seconds)
    for title, calls in [case for case in small() if args.only in case[0]]:
        report(title, 1024, calls, args.seconds)


if __name__ == "__main__":
    main()
