"""quantize, dequantize and 4-bit packing against copy_ of the float32 tensor and torch core: ratios of minima in one process.

python benchmarks/bench_quantize.py [--elements N] [--threads N] [--seconds S]
"""

from __future__ import annotations

import argparse

import torch
from bench_fake_quantize import Calls, activation, report
from torch import Tensor

import qsim
from qsim.ops import dequantize, pack_int4, quantize, unpack_int4

GRID = (-128, 127)


def parameters(shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    return torch.full(shape, 0.031), torch.full(shape, 2, dtype=torch.int32)


def cases(n: int) -> list[tuple[str, Calls]]:
    x, y, tensor = torch.randn(n), torch.empty(n), parameters()
    q = quantize(x, *tensor, *GRID)
    core = torch.quantize_per_tensor(x, 0.031, 2, torch.qint8)
    image, last, matrix = activation(n), activation(n, channels_last=True), torch.randn(max(1, n // 1024), 1024)
    channel, block = parameters((64,)), parameters((matrix.shape[0], 32))
    nibbles = torch.randint(-8, 8, (n,), dtype=torch.int8)
    packed = pack_int4(nibbles)
    found: list[tuple[str, Calls]] = [
        (
            "quantize, int8",
            {
                "copy_": lambda: y.copy_(x),
                "torch core": lambda: torch.quantize_per_tensor(x, 0.031, 2, torch.qint8),
                "qsim": lambda: quantize(x, *tensor, *GRID),
            },
        ),
        ("quantize, int16", {"copy_": lambda: y.copy_(x), "qsim": lambda: quantize(x, *tensor, -32768, 32767)}),
        ("quantize, axis 1", {"copy_": lambda: y.copy_(x), "qsim": lambda: quantize(image, *channel, *GRID, axis=1)}),
        ("quantize, channels_last", {"copy_": lambda: y.copy_(x), "qsim": lambda: quantize(last, *channel, *GRID, axis=1)}),
        ("quantize, blocks of 32", {"copy_": lambda: y.copy_(x), "qsim": lambda: quantize(matrix, *block, *GRID, axis=1, block_size=32)}),
        (
            "dequantize, int8",
            {"copy_": lambda: y.copy_(x), "torch core": core.dequantize, "qsim": lambda: dequantize(q, *tensor)},
        ),
        ("pack_int4", {"copy_": lambda: y.copy_(x), "qsim": lambda: pack_int4(nibbles)}),
        ("unpack_int4", {"copy_": lambda: y.copy_(x), "qsim": lambda: unpack_int4(packed, (n,))}),
    ]
    for dtype in (torch.bfloat16, torch.float16):
        a, b = x.to(dtype), y.to(dtype)
        name = str(dtype).removeprefix("torch.")
        found.append((f"quantize, {name}", {"copy_": lambda a=a, b=b: b.copy_(a), "qsim": lambda a=a: quantize(a, *tensor, *GRID)}))
        found.append(
            (f"dequantize, {name}", {"copy_": lambda a=a, b=b: b.copy_(a), "qsim": lambda d=dtype: dequantize(q, *tensor, dtype=d)})
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{args.elements} elements, {args.threads} thread(s), CPU level {qsim.cpu_capability()}")
    for title, calls in cases(args.elements):
        report(title, args.elements, calls, args.seconds)


if __name__ == "__main__":
    main()
