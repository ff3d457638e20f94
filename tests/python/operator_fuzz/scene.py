"""Arguments that fit together, drawn for the names in an operator's schema."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import qsim.ops  # noqa: F401  (registers the operators)
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.numbers.range_methods import SEARCHES

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16)
GRIDS = ((-8, 7), (0, 15), (-128, 127), (0, 255), (-127, 127), (-2, 1), (0, 1), (-32768, 32767), (3, 9))
SPECIALS = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-45, 3e38, -6e-8, 65504.0, 0.5, -1.5)


def operators(namespace: str = "qsim") -> list[torch._ops.OpOverload]:
    """Every operator of the library that takes tensors, of one of its namespaces."""
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::"))
    found = []
    for name in names:
        packet, _, overload = name.removeprefix(f"{namespace}::").partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        if any("Tensor" in str(argument.type) for argument in operator._schema.arguments):
            found.append(operator)
    return found


def shape(rng: random.Random) -> list[int]:
    if rng.random() < 0.01:
        return rng.choice([[3, 7000], [40000], [16, 33, 129], [70000, 2]])
    return [rng.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 17, 33]) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4]))]


def elements(rng: random.Random, sizes: list[int], dtype: torch.dtype, specials: float = 0.3) -> Tensor:
    wide = torch.randn(sizes, dtype=torch.float64) * 10 ** rng.uniform(-3, 3)
    if rng.random() < specials and wide.numel() > 0:
        where = torch.randint(wide.numel(), (1 + wide.numel() // 8,))
        values = torch.tensor(rng.choices(SPECIALS, k=len(where)), dtype=torch.float64)
        wide.view(-1)[where] = values
    return wide.to(dtype)


class Scene:
    """One tensor, a grid for it and whatever else belongs to them: the same name draws values that fit the same tensor."""

    def __init__(self, rng: random.Random, operator: torch._ops.OpOverload) -> None:
        self.rng, self.name = rng, operator._schema.name.removeprefix("qsim::")
        self.dtype, self.sizes = rng.choice(FLOATS), shape(rng)
        self.axis = rng.randrange(len(self.sizes)) if self.sizes and rng.random() < 0.6 else None
        self.block_size = rng.choice([1, 2, 3, 4, 8, 32]) if self.axis is not None and rng.random() < 0.5 else None
        self.quant_min, self.quant_max = rng.choice(GRIDS)
        self.has_scale = not self.name.startswith(("round_to", "count_")) or rng.random() < 0.6
        self.weights = [shape(rng) or [3] for _ in range(rng.choice([1, 1, 2, 3]))]
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.name == "dequantize":
            self.wide = rng.choice([torch.float32, torch.float64])
        self.storage = rng.choice(INTEGERS)

    def arguments(self, operator: torch._ops.OpOverload) -> dict[str, Any]:
        return {argument.name: self._draw(argument.name) for argument in operator._schema.arguments}

    def _draw(self, name: str) -> Any:
        if self.name == "search_range_weights" and name in _OF_WEIGHTS:
            return _OF_WEIGHTS[name](self)
        return _DRAWN[f"{self.name}.{name}" if f"{self.name}.{name}" in _DRAWN else name](self)

    def parameters(self) -> list[int]:
        """The shape of scales and ranges."""
        if self.axis is None:
            return []
        if self.block_size is None:
            return [self.sizes[self.axis]]
        return [-(-n // self.block_size) if i == self.axis else n for i, n in enumerate(self.sizes)]

    def x(self) -> Tensor:
        return elements(self.rng, self.sizes, self.dtype)

    def scale(self, sizes: list[int] | None = None) -> Tensor:
        sizes = self.parameters() if sizes is None else sizes
        values = torch.rand(sizes, dtype=self.wide) * 10 ** self.rng.uniform(-3, 2) + 1e-6
        if self.rng.random() < 0.1 and values.numel() > 0:
            values.view(-1)[0] = self.rng.choice([math.nan, math.inf, 0.0, -1.0, 1e-40, 3e38])
        return values

    def zero_point(self) -> Tensor:
        drawn = torch.randint(self.quant_min, self.quant_max + 1, self.parameters()).to(torch.int32)
        if self.rng.random() < 0.05 and drawn.numel() > 0:
            drawn.view(-1)[0] = self.rng.choice([2**31 - 1, -(2**31), 2**24 + 1, -1])
        learned = self.rng.random() < 0.2 and self.name not in ("quantize", "dequantize", "observe_fake_quantize")
        return drawn.to(self.wide) + self.rng.choice([0.0, 0.3]) if learned else drawn

    def state(self, start: float) -> Tensor:
        held = torch.full(self.parameters(), start)
        return held if self.rng.random() < 0.5 else torch.randn(self.parameters()).abs() * -math.copysign(1.0, start)

    def sketch(self) -> Tensor:
        held = torch.zeros(16384, dtype=torch.int64)
        if self.name == "search_range" or self.rng.random() < 0.3:
            bins = torch.randn(50).abs().log2().clamp(-20, 20).exp2().view(torch.int32).long() >> 18
            held[bins] += 3
            if self.rng.random() < 0.1:
                held[self.rng.randrange(16384)] = self.rng.choice([2**31, 2**40, 2**52, -1, -(2**40)])
        return held

    def end(self, usual: float) -> Tensor:
        """Of what a sketch holds, as far as its owner says."""
        if self.rng.random() < 0.8:
            return torch.tensor(usual)
        return torch.tensor(self.rng.choice([*SPECIALS, -usual, 2 * usual, usual / 1024, 1e30 * usual]))

    def mask_order(self) -> tuple[Tensor, list[int] | None]:
        """A gradient, and perhaps the strides in whose order its mask is."""
        grad = self.x()
        order = list(range(grad.dim()))
        self.rng.shuffle(order)
        if self.rng.random() < 0.4:
            return grad, None
        return grad, list(torch.empty([self.sizes[i] for i in order]).permute([order.index(i) for i in range(len(order))]).stride())

    def grads(self) -> list[Tensor]:
        return [elements(self.rng, shape(self.rng), self.rng.choice(FLOATS), 0.1) for _ in range(self.rng.choice([1, 1, 2, 3, 5]))]


def _bits(n: int) -> Tensor:
    bits = torch.randint(256, ((n + 7) // 8,), dtype=torch.uint8)
    if n % 8:
        bits[-1] &= (1 << n % 8) - 1
    return bits


def _negative(scene: Scene) -> int | None:
    if scene.axis is None:
        return None
    return scene.axis - len(scene.sizes) if scene.rng.random() < 0.3 else scene.axis


def _with_scale(value: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
    return lambda scene: value(scene) if scene.has_scale else None


_DRAWN: dict[str, Callable[[Scene], Any]] = {
    "x": Scene.x,
    "out": lambda s: torch.zeros(s.sizes, dtype=s.dtype),
    "grad": Scene.x,
    "scale": _with_scale(Scene.scale),
    "observe_fake_quantize.scale": lambda s: torch.rand(s.parameters()) + 0.01,
    "observe_fake_quantize_with_mask.scale": lambda s: torch.rand(s.parameters()) + 0.01,
    "zero_point": Scene.zero_point,
    "observe_fake_quantize_with_mask.zero_point": lambda s: torch.randint(s.quant_min, s.quant_max + 1, s.parameters()).to(torch.int32),
    "quant_min": lambda s: s.quant_min,
    "quant_max": lambda s: s.quant_max,
    "axis": _with_scale(_negative),
    "block_size": _with_scale(lambda s: s.block_size),
    "rounding": lambda s: s.rng.choice(["divide", "reciprocal"]),
    "grad_factor": lambda s: s.rng.choice([1.0, 0.25, -3.0]),
    "mask": lambda s: _bits(math.prod(s.sizes)),
    "strides": lambda s: s.mask_order()[1],
    "q": lambda s: torch.randint(0, 127, s.sizes).to(s.storage),
    "pack_int4.q": lambda s: torch.randint(0, 16, s.sizes).to(s.rng.choice([torch.int8, torch.uint8])),
    "dequantize.dtype": lambda s: s.rng.choice([None, torch.float64] if s.wide == torch.float64 else [None, torch.float16, torch.bfloat16]),
    "quantize.dtype": lambda s: s.rng.choice([None, None, torch.int16]),
    "unpack_int4.dtype": lambda s: s.rng.choice([None, torch.int8, torch.uint8]),
    "packed": lambda s: torch.randint(256, ((math.prod(s.sizes) + 1) // 2,), dtype=torch.uint8),
    "shape": lambda s: list(s.sizes),
    "bias": lambda s: elements(s.rng, [math.prod(s.sizes)], s.dtype),
    "input_scale": lambda s: s.scale([]).float(),
    "weight_scale": lambda s: s.scale([math.prod(s.sizes) if s.rng.random() < 0.5 else 1]).float(),
    "min": lambda s: -elements(s.rng, s.sizes, s.wide, 0.1).abs(),
    "max": lambda s: elements(s.rng, s.sizes, s.wide, 0.1).abs(),
    "symmetric": lambda s: s.rng.random() < 0.5,
    "min_scale": lambda s: s.rng.choice([0.0, 0.0, 1e-3, 1.19e-7]),
    "lowest": lambda s: s.state(math.inf),
    "highest": lambda s: s.state(-math.inf),
    "observe_.lowest": lambda s: torch.tensor(math.inf),
    "observe_.highest": lambda s: torch.tensor(-math.inf),
    "search_range.lowest": lambda s: s.end(-3.0),
    "search_range.highest": lambda s: s.end(3.0),
    "counts": lambda s: torch.randint(9, (4,)),
    "round_to_format_counted.counts": lambda s: torch.randint(9, (6,)),
    "count_format_.counts": lambda s: torch.randint(9, (6,)),
    "squares": lambda s: s.rng.choice([None, torch.rand(2, dtype=torch.float64)]),
    "sketch": Scene.sketch,
    "low_bits": lambda s: torch.tensor(s.rng.choice([0, 1, 0x3FFFF, 0x2000, 77]), dtype=torch.int32),
    "observing": lambda s: torch.tensor(s.rng.random() < 0.8),
    "quantizing": lambda s: torch.tensor(int(s.rng.random() < 0.8), dtype=torch.uint8),
    "averaging": lambda s: s.rng.choice([0.01, 0.5, 1.0, 0.0]),
    "format": lambda s: s.rng.choice([*FLOAT_FORMATS]),
    "saturate": lambda s: s.rng.choice([None, True, False]),
    "element": lambda s: s.rng.choice([*(name for name, form in FLOAT_FORMATS.items() if form.scaled), "int8", "int4"]),
    "choose_block_scale.lowest": lambda s: -torch.rand(s.sizes) * 10 ** s.rng.uniform(-30, 30),
    "choose_block_scale.highest": lambda s: torch.rand(s.sizes) * 10 ** s.rng.uniform(-30, 30),
    "round_to_format_dynamic.format": lambda s: s.rng.choice(
        [name for name, form in FLOAT_FORMATS.items() if form.scaled and not form.has_fraction]
    ),
    "scale_format": lambda s: s.rng.choice(["float8_e8m0fnu", "float8_e4m3fn"]),
    "fake_quantize_dynamic.scale_format": lambda s: None,  # integers that have one need a grid of their own: test_dynamic.py
    "round_to_format_dynamic.scale_format": lambda s: s.rng.choice([None, "float8_e8m0fnu", "float8_e4m3fn"]),
    "scale_rounding": lambda s: s.rng.choice(["floor", "ceil", "even", "rceil"]),
    "method": lambda s: s.rng.choice(SEARCHES),
    "percentile": lambda s: s.rng.choice([99.99, 50.0, 100.0, 1e-3]),
    "gamma": lambda s: s.rng.choice([3.0, 0.0, 1e3]),
    "grads": Scene.grads,
    "max_norm": lambda s: s.rng.choice([1.0, 0.0, 1e-3, 1e6, math.inf]),
    "norm_type": lambda s: s.rng.choice([2.0, 1.0, math.inf, 3.0, 0.5]),
    "nonfinite": lambda s: s.rng.choice(["skip", "zero", "raise"]),
    "powers": lambda s: torch.rand(3, dtype=torch.float64) * 9,
    "scale_grad_.counts": lambda s: torch.tensor([0, 0, s.rng.choice([0, 0, 2])]),
}
_OF_WEIGHTS: dict[str, Callable[[Scene], Any]] = {
    "weights": lambda s: [elements(s.rng, sizes, s.rng.choice(FLOATS), 0.1) for sizes in s.weights],
    "quant_min": lambda s: [s.quant_min for _ in s.weights],
    "quant_max": lambda s: [s.quant_max for _ in s.weights],
    "symmetric": lambda s: [s.rng.random() < 0.5 for _ in s.weights],
    "axis": lambda s: [s.rng.choice([None, 0, -1]) for _ in s.weights],
    "block_size": lambda s: [None for _ in s.weights],
}
