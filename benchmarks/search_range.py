"""Range searches: on the sketch per tensor, on the data per element of a weight."""

from __future__ import annotations

from functools import partial

import resnet_18
import torch
from case import Calls, Case
from torch import Tensor
from torch.ao.quantization.observer import HistogramObserver

from qsim import ops

GRID = -128, 127


def seen(x: Tensor) -> tuple[Tensor, ...]:
    state = torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.zeros(4, dtype=torch.int64), torch.zeros(16384, dtype=torch.int64)
    low_bits = torch.zeros((), dtype=torch.int32)
    ops.observe_(x, *state, low_bits)
    return state[0], state[1], state[3], low_bits


def encode(state: tuple[Tensor, ...], symmetric: bool, method: str) -> tuple[Tensor, Tensor]:
    *sketched, low_bits = state
    low, high = ops.search_range(*sketched, *GRID, symmetric=symmetric, method=method, low_bits=low_bits)
    return ops.choose_qparams(low, high, *GRID, symmetric=symmetric)


def search(symmetric: bool, method: str, tensors: int) -> Calls:
    x = torch.randn(2**20)
    state = seen(x)
    if tensors == 1:
        peer = HistogramObserver(qscheme=torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine)
        peer(x)
        return {"qsim": lambda: encode(state, symmetric, method), "HistogramObserver": peer.calculate_qparams}
    batch = tuple(part.expand(tensors, *part.shape).contiguous() for part in state)
    return {"qsim": lambda: encode(batch, symmetric, method)}


def weight_search(symmetric: bool, block_size: int | None, n: int) -> Calls:
    weight, grid = torch.randn(n // 1152, 1152), (-8, 7) if block_size else GRID
    axis = 1 if block_size else 0
    return {"qsim": lambda: ops.search_range_data(weight, *grid, axis=axis, block_size=block_size, symmetric=symmetric)}


def model_search(symmetric: bool, _: int) -> Calls:
    weights = [torch.randn(shape) for shape in resnet_18.shapes() if len(shape) > 1]

    def one_by_one() -> None:
        for weight in weights:
            ops.search_range_data(weight, *GRID, axis=0, symmetric=symmetric)

    return {
        "qsim": lambda: ops.search_range_weights(weights, *GRID, axis=0, symmetric=symmetric),
        "a call per weight": one_by_one,
    }


SKETCH, DATA = "search range, sketch", "search range, weights"
WEIGHTS = (256 * 1152,)

CASES = [
    Case(SKETCH, "asymmetric", (1, 64), partial(search, False, "tf_enhanced"), bars={1: {"us": 75}, 64: {"us": 90}}, unit="tensor"),
    Case(SKETCH, "symmetric", (1, 64), partial(search, True, "tf_enhanced"), bars={1: {"us": 30}, 64: {"us": 45}}, unit="tensor"),
    Case(SKETCH, "asymmetric, mse", (1,), partial(search, False, "mse"), unit="tensor"),
    Case(SKETCH, "asymmetric, percentile", (1,), partial(search, False, "percentile"), unit="tensor"),
    Case(SKETCH, "asymmetric, entropy", (1,), partial(search, False, "entropy"), unit="tensor"),
    Case(DATA, "symmetric, channels of 1152", WEIGHTS, partial(weight_search, True, None)),
    Case(DATA, "asymmetric, channels of 1152", WEIGHTS, partial(weight_search, False, None)),
    Case(DATA, "ResNet-18 in one call, symmetric", (resnet_18.ELEMENTS,), partial(model_search, True), parallel=True),
    Case(DATA, "symmetric 4 bit, blocks of 32", WEIGHTS, partial(weight_search, True, 32)),
]
