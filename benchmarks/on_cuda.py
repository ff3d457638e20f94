"""The CUDA operators against a copy and torch core: device time by events, GB/s, ratios.

python benchmarks/on_cuda.py [--json FILE] [--elements N ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsim import ops

DEVICE = "cuda"
Call = Callable[[], object]
Row = dict[str, Any]


def seconds_of(call: Call, samples: int = 15) -> float:
    """Least device time of a call. Repeats it until one sample takes about 2 ms, so that launches do not wait for the host."""
    for _ in range(3):
        call()
    repeats = 1
    best = float("inf")
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        seconds = start.elapsed_time(end) / 1e3 / repeats
        best = min(best, seconds)
        repeats = max(repeats, min(1000, int(2e-3 / max(seconds, 1e-7))))
    return best


def range_state(*shape: int) -> list[Tensor]:
    ends = [torch.full(shape, end, device=DEVICE) for end in (torch.inf, -torch.inf)]
    return [*ends, torch.zeros(4, dtype=torch.int64, device=DEVICE)]


def grid(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.full(shape, 0.05, device=DEVICE), torch.full(shape, 3, dtype=torch.int32, device=DEVICE)


Cases = Iterator[tuple[str, str, float, Call, dict[str, Call]]]  # operator, case, copies moved, call, torch core's calls


def fake_quantize_cases(x: Tensor) -> Cases:
    """A case's traffic is given in elements read and written."""
    out, rows, image = torch.empty_like(x), x.view(-1, 1024), x.view(-1, 64, 32, 32)
    one, grad, limits = grid(), torch.randn_like(x), (-128, 127)
    mask = torch.ops.qsim.fake_quantize_with_mask(x, *one, *limits)[1]
    core = {"torch core": lambda: torch.fake_quantize_per_tensor_affine(x, *one, *limits)}
    channel = grid(64)
    core_channel = {"torch core": lambda: torch.fake_quantize_per_channel_affine(image, *channel, 1, *limits)}
    yield "fake_quantize", "per tensor", 2, lambda: ops.fake_quantize(x, *one, *limits, out=out), core
    yield "fake_quantize", "in place", 2, lambda: ops.fake_quantize_(out, *one, *limits), {}
    yield "fake_quantize", "channel 1", 2, lambda: ops.fake_quantize(image, *channel, *limits, axis=1), core_channel
    last = image.contiguous(memory_format=torch.channels_last)
    yield "fake_quantize", "channel 1, channels_last", 2, lambda: ops.fake_quantize(last, *channel, *limits, axis=1), {}
    blocks = grid(len(rows), 32)
    yield "fake_quantize", "blocks of 32", 2, lambda: ops.fake_quantize(rows, *blocks, *limits, axis=1, block_size=32), {}
    bits = 1 / (8 * x.element_size())
    yield "fake_quantize_with_mask", "per tensor", 2 + bits, lambda: torch.ops.qsim.fake_quantize_with_mask(x, *one, *limits), {}
    yield "mask_backward", "per tensor", 2 + bits, lambda: torch.ops.qsim.fake_quantize_mask_backward(grad, mask), {}
    yield "backward", "per tensor", 3, lambda: torch.ops.qsim.fake_quantize_backward(grad, x, *one, *limits), {}
    for name, parameters, where, of in (
        ("per tensor", one, {}, x),
        ("channel 1", channel, {"axis": 1}, image),
        ("channel 0", grid(len(rows)), {"axis": 0}, rows),
        ("axis -1", grid(1024), {"axis": 1}, rows),
    ):
        learn = torch.ops.qsim.fake_quantize_learnable_backward
        given = (grad.view_as(of), of, *parameters, *limits)
        yield "learnable_backward", name, 3, lambda learn=learn, given=given, where=where: learn(*given, **where), {}


def observe_cases(x: Tensor) -> Cases:
    image, rows = x.view(-1, 64, 32, 32), x.view(-1, 1024)
    core = {"aminmax": lambda: torch.aminmax(x)}
    state = range_state()
    yield "observe_range", "per tensor", 1, lambda: ops.observe_range_(x, *state), core
    of_channels = range_state(64)
    yield "observe_range", "channel 1", 1, lambda: ops.observe_range_(image, *of_channels, axis=1), core
    last = image.contiguous(memory_format=torch.channels_last)
    yield "observe_range", "channel 1, channels_last", 1, lambda: ops.observe_range_(last, *of_channels, axis=1), core
    of_blocks = range_state(len(rows), 32)
    yield "observe_range", "blocks of 32", 1, lambda: ops.observe_range_(rows, *of_blocks, axis=1, block_size=32), core
    sketch = torch.zeros(16384, dtype=torch.int64, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
    for name, data in (("normal", x), ("relu", x.relu()), ("constant", torch.full_like(x, 0.3))):
        yield "observe", name, 1, lambda data=data: ops.observe_(data, *state, *sketch), core


def running_cases(x: Tensor) -> Cases:
    on, running = torch.tensor(True, device=DEVICE), (*range_state(), *grid())
    once, twice = 2 + 1 / (8 * x.element_size()), 3 + 1 / (8 * x.element_size())  # training saves a bit for each element
    for name, observing, moved in (("observing", on, twice), ("range held", ~on, once)):
        given = (x, observing, on, *running, -128, 127)
        yield "observe_fake_quantize", name, moved, lambda given=given: torch.ops.qsim.observe_fake_quantize_with_mask(*given), {}


def integer_cases(x: Tensor) -> Cases:
    """A case's traffic is in elements of x, as everywhere."""
    one, limits, byte = grid(), (-128, 127), 1 / x.element_size()
    q = ops.quantize(x, *one, *limits)
    core = {"torch core": lambda: torch.quantize_per_tensor(x, 0.05, 3, torch.qint8)} if x.dtype == torch.float32 else {}
    yield "quantize", "int8", 1 + byte, lambda: ops.quantize(x, *one, *limits), core
    yield "dequantize", "int8", 1 + byte, lambda: ops.dequantize(q, *one, dtype=x.dtype), {}
    small = q.clamp(-8, 7)
    packed = ops.pack_int4(small)
    yield "pack_int4", "int8", 1.5 * byte, lambda: ops.pack_int4(small), {}
    yield "unpack_int4", "int8", 1.5 * byte, lambda: ops.unpack_int4(packed, x.shape), {}


def format_cases(x: Tensor) -> Cases:
    out, rows, one = torch.empty_like(x), x.view(-1, 1024), torch.tensor(0.05, device=DEVICE)
    counts, squares = torch.zeros(6, dtype=torch.int64, device=DEVICE), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for dtype in (torch.float16, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        core = {"torch core": lambda dtype=dtype: x.to(dtype).to(x.dtype)}
        yield "round_to_format", name, 2, lambda name=name: ops.round_to_format(x, name, out=out), core
        yield "count_format", name, 1, lambda name=name: ops.count_format_(x, name, counts, squares), {}
    fp8 = "float8_e4m3fn"
    yield "round_to_format", f"{fp8}, scaled", 2, lambda: ops.round_to_format(x, fp8, scale=one, out=out), {}
    blocks = grid(len(rows), 32)[0]
    of_rows = torch.empty_like(rows)
    in_blocks = {"scale": blocks, "axis": 1, "block_size": 32, "out": of_rows}
    yield "round_to_format", f"{fp8}, blocks of 32", 2, lambda: ops.round_to_format(rows, fp8, **in_blocks), {}


def search_cases(x: Tensor) -> Cases:
    """No traffic to speak of: look at the seconds."""
    if x.dtype != torch.float32 or x.numel() > 2**20:
        return
    rows, state, sketch = x.view(-1, 1024), range_state(), torch.zeros(16384, dtype=torch.int64, device=DEVICE)
    ops.observe_(x, *state, sketch, torch.zeros((), dtype=torch.int32, device=DEVICE))
    found, many = (*state[:2], sketch), [torch.stack([part] * 64) for part in (*state[:2], sketch)]
    yield "search_range", "one tensor", 0, lambda: ops.search_range(*found, -128, 127), {}
    yield "search_range", "64 tensors", 0, lambda: ops.search_range(*many, -128, 127), {}
    yield "search_range_data", "axis 0", 1, lambda: ops.search_range_data(rows, -128, 127, axis=0, symmetric=True), {}
    weights = list(rows.chunk(16))
    yield "search_range_weights", "16 weights", 1, lambda: ops.search_range_weights(weights, -128, 127, axis=0, symmetric=True), {}


def clip_cases(x: Tensor) -> Cases:
    grads = list(x.split(x.numel() // 50 // 64 * 64))  # aligned, as gradients are
    yield "clip_grad", "51 tensors", 3, lambda: ops.clip_grad_(grads, 1.0), {"torch core": lambda: clip_with_core(grads)}


def clip_with_core(grads: list[Tensor]) -> None:
    norm = torch.nn.utils.get_total_norm(grads)
    torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1))


FAMILIES = (fake_quantize_cases, observe_cases, running_cases, integer_cases, format_cases, search_cases, clip_cases)


def rows_of(n: int, dtype: torch.dtype) -> Iterator[Row]:
    """Each case beside a copy of the same tensor, measured just before it."""
    x = torch.randn(n, device=DEVICE).to(dtype)
    to = torch.empty_like(x)
    for cases in FAMILIES:
        for operator, case, moved, call, others in cases(x):
            copy = seconds_of(lambda: to.copy_(x))
            seconds = seconds_of(call)
            yield {
                "operator": operator,
                "case": case,
                "dtype": str(dtype).removeprefix("torch."),
                "elements": n,
                "device": torch.cuda.get_device_name(),
                "threads": 0,
                "seconds": seconds,
                "ns_per_element": seconds / n * 1e9,
                "gb_per_s": moved * x.element_size() * n / seconds / 1e9,
                "ratios": {"copy_": seconds / copy, **{name: seconds / seconds_of(other) for name, other in others.items()}},
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--elements", type=int, nargs="+", default=[2**20, 2**26], help="multiples of 65536")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured", file=sys.stderr)
        return 2
    rows = []
    for n in arguments.elements:
        for dtype in (torch.float32, torch.bfloat16):
            for row in rows_of(n, dtype):
                rows.append(row)
                ratios = "  ".join(f"{ratio:6.2f} x {name}" for name, ratio in row["ratios"].items())
                label = f"{row['operator']:24s} {row['case']:26s} {row['dtype']:9s} {n:>10d}"
                print(f"{label} {row['ns_per_element']:9.4f} ns {row['gb_per_s']:8.0f} GB/s  {ratios}", flush=True)
                if arguments.json:  # after every row: a run that is cut short keeps what it has
                    arguments.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
