"""Running range, encoding and fake-quantize in one call, as quantization-aware training has it."""

from __future__ import annotations

from functools import partial

import torch
from case import Calls, Case
from torch import Tensor

from qsim.ops import observe_fake_quantize

GRID = (-128, 127)
AVERAGING = 0.01


def empty_ranges(*shape: int) -> tuple[Tensor, ...]:
    counts = torch.zeros(4, dtype=torch.int64)
    scale, zero_point = torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.int32)
    return torch.full(shape, torch.inf), torch.full(shape, -torch.inf), counts, scale, zero_point


def fused(layout: torch.memory_format, axis: int | None, n: int) -> Calls:
    x = torch.randn(max(1, n // 65536), 64, 32, 32).contiguous(memory_format=layout)
    shape = () if axis is None else (x.shape[axis],)
    on, state = torch.tensor(True), empty_ranges(*shape)
    calls: Calls = {"qsim": lambda: observe_fake_quantize(x, on, on, *state, *GRID, averaging=AVERAGING, axis=axis), "clone": x.clone}
    if axis is None or axis == 0:  # the axes that torch core has
        switches, (lowest, highest, _, scale, zero_point) = torch.ones(2, 1, dtype=torch.int64), empty_ranges(*(shape or (1,)))
        core = lowest, highest, scale.fill_(1), zero_point, AVERAGING, *GRID, 0, axis is not None
        calls["torch core"] = lambda: torch.fused_moving_avg_obs_fake_quant(x, *switches, *core)
    return calls


OPERATOR = "observe_fake_quantize"
FIRST, LAST = torch.contiguous_format, torch.channels_last
IN_CACHE, TO_MEMORY = (2**20,), (2**20, 2**22)

CASES = [
    Case(OPERATOR, "per tensor", TO_MEMORY, partial(fused, FIRST, None), 12, parallel=True),
    Case(OPERATOR, "channel axis 0", IN_CACHE, partial(fused, FIRST, 0), 12),
    Case(OPERATOR, "channel axis 1", IN_CACHE, partial(fused, FIRST, 1), 12),
    Case(OPERATOR, "channels_last", IN_CACHE, partial(fused, LAST, 1), 12),
]
