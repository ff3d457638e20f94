"""What bits cost: bytes of weights, bit operations and latency of products, tensors above the fewest bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from qsim.analysis.bit_choices import Bits, Choice
from qsim.analysis.bit_latency import Latencies
from qsim.analysis.bit_operations import Product
from qsim.analysis.knapsack import Constraint
from qsim.call_fit import tells_construction
from qsim.numbers.spec import TensorSpec, range_shape
from qsim.simulation.simulation import Simulation

FLOAT_BITS = 32


@tells_construction("")
@dataclass(frozen=True)
class Budget:
    """What a model may cost at most; all that is given holds at once.

    Parameters
    ----------
    size : float, optional
        Bytes of all parameters over those of float32. Quantized ones count their bits, packed, and 4 bytes for each scale, or what its
        format takes (`TensorSpec.scale_format`); asymmetric ones a zero point of their own width for each scale; one that is read on two
        different grids, both; all others 4 bytes an element.
    bit_operations : float, optional
        Sum of multiplications times the bits of both operands, over 32 x 32 for each. What has no quantizer counts 32 bits.
    tensors : float, optional
        Share of the searched quantizers with more bits than the fewest candidate.
    latency : float, optional
        Seconds of the products in ONNX Runtime on this machine, over those in float: see `qsim.analysis.bit_latency.Latencies`. A
        product may take longer with fewer bits, where no kernel reads them. Above 1 too.

    Examples
    --------
    >>> Budget(size=0.2, tensors=0.1)
    Budget(size=0.2, bit_operations=None, tensors=0.1, latency=None)
    """

    size: float | None = None
    bit_operations: float | None = None
    tensors: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if not given:
            raise ValueError("Budget: got nothing; expected size, bit_operations, tensors or latency, as a share of float32")
        for name, value in given.items():
            most = math.inf if name == "latency" else 1
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise ValueError(f"Budget: got {name}={value!r}; expected a share {'of 0 or more' if name == 'latency' else 'from 0 to 1'}")


@dataclass(frozen=True)
class Costs:
    """What one assignment of bits costs, as `Budget` counts it. `bit_operations` is None where nothing is multiplied, or not known;
    `latency` where the budget has none: then it was not measured."""

    size: float
    bit_operations: float | None
    tensors: float
    latency: float | None = None

    def spent(self, budget: Budget) -> tuple[float, ...]:
        """What is in the budget, in the order size, bit operations, tensors."""
        return tuple(getattr(self, name) for name, most in vars(budget).items() if most is not None)

    def within(self, budget: Budget) -> bool:
        """Whether nothing is above the budget."""
        limits = [most for most in vars(budget).values() if most is not None]
        return all(cost <= most + 1e-9 for cost, most in zip(self.spent(budget), limits, strict=True))  # sums are rounded

    def __str__(self) -> str:
        operations = "" if self.bit_operations is None else f", bit_operations={self.bit_operations:.4g}"
        latency = "" if self.latency is None else f", latency={self.latency:.4g}"
        return f"size={self.size:.4g}{operations}, tensors={self.tensors:.4g}{latency}"


def bytes_of(spec: TensorSpec, shape: Sequence[int], bits: Bits) -> int:
    """What a tensor takes: elements packed at their width, scales in their format, zero points of an asymmetric grid at its width.

    Examples
    --------
    >>> bytes_of(TensorSpec(symmetric=True, axis=0), (8, 9), 4)  # 72 elements of half a byte, 8 scales
    68
    """
    elements = math.prod(shape)
    if isinstance(bits, str):
        return elements * FLOAT_BITS // 8
    scales = math.prod(range_shape(shape, spec.axis, spec.block_size))
    return -(-elements * bits // 8) + _bytes_of_scales(spec, shape, scales) + (0 if spec.symmetric else -(-scales * bits // 8))


def _bytes_of_scales(spec: TensorSpec, shape: Sequence[int], scales: int) -> int:
    if spec.scale_format is None:
        return 4 * scales
    if spec.scale_format != "int":
        return scales + 4 * (spec.scale_format == "float8_e4m3fn")  # a byte each, beside one float for the tensor
    assert isinstance(spec.axis, int)
    floats = math.prod(range_shape(shape, spec.axis, spec.super_block or shape[spec.axis]))
    return -(-scales * (spec.scale_levels - 1).bit_length() // 8) + 4 * floats


class CostModel:
    """The costs of a simulation's choices, as limits of a knapsack.

    Parameters
    ----------
    sim : Simulation
    choices : sequence of Choice
    products : sequence of Product, optional
        None: not known.
    latencies : Latencies, optional
        Of these products, where they are wanted.
    """

    def __init__(
        self, sim: Simulation, choices: Sequence[Choice], products: Sequence[Product] | None, latencies: Latencies | None = None
    ) -> None:
        self.choices = choices
        planned = sim.decisions.quantizers
        shapes = {key: tuple(attrgetter(p.parameter)(sim.model).shape) for key, p in planned.items() if p.parameter}
        quantized = {p.parameter: math.prod(shapes[key]) for key, p in planned.items() if p.parameter}
        others = sum(p.numel() for name, p in sim.model.named_parameters() if name not in quantized)
        total = FLOAT_BITS // 8 * (others + sum(quantized.values())) or 1

        def size(choice: Choice, bits: Bits) -> float:
            # Each parameter once on each of its grids: a tied table on two, as for a row and for a product, is stored twice.
            grids = {key: None if isinstance(bits, str) else planned[key].spec for key in choice.keys}
            stored = {(planned[key].parameter, grids[key]): key for key in reversed(choice.keys) if key in shapes}
            return sum(bytes_of(planned[key].spec, shapes[key], bits) for key in stored.values()) / total

        self._size = [[size(choice, bits) for bits in choice.candidates] for choice in choices]
        self._fixed_size = FLOAT_BITS // 8 * others / total
        tensors = sum(len(choice.keys) for choice in choices) or 1
        self._tensors = [[len(c.keys) * (a > 0) / tensors for a in range(len(c.candidates))] for c in choices]
        self._products = None if products is None else _merged(choices, products, _bit_operations(products))
        self._latency = None if products is None or latencies is None else _merged(choices, products, _shares(latencies))

    def limits(self, budget: Budget) -> list[Constraint]:
        """The budget as limits of `knapsack`."""
        found = []
        if budget.size is not None:
            found.append(Constraint(self._size, budget.size - self._fixed_size))
        if budget.tensors is not None:
            found.append(Constraint(self._tensors, budget.tensors))
        if budget.bit_operations is not None:
            found.append(_limit(self._products, "bit_operations", budget.bit_operations))
        if budget.latency is not None:
            found.append(_limit(self._latency, "latency", budget.latency))
        return found

    def costs(self, picked: Sequence[int]) -> Costs:
        size = self._fixed_size + Constraint(self._size, 0.0).cost(picked)
        operations, latency = (None if merged is None else merged.cost(picked) for merged in (self._products, self._latency))
        return Costs(size, operations, Constraint(self._tensors, 0.0).cost(picked), latency)


@dataclass(frozen=True)
class _Products:
    """What products cost: those with one choice by it and its candidates, those with two by both, and all others."""

    alone: list[list[float]]
    together: dict[tuple[int, int], list[list[float]]]
    fixed: float

    def cost(self, picked: Sequence[int]) -> float:
        return self.fixed + Constraint(self.alone, math.inf, self.together).cost(picked)


def _limit(products: _Products | None, name: str, most: float) -> Constraint:
    if products is None:
        raise ValueError(f"Budget: {name} is not known for this model")
    return Constraint(products.alone, most - products.fixed, products.together)


def _bit_operations(products: Sequence[Product]) -> Callable[[Product, Bits, Bits], float]:
    """Of a product with these bits of its operands, over those of all in float."""
    total = sum(product.multiplications for product in products) * FLOAT_BITS**2 or 1
    return lambda product, left, right: product.multiplications * _width(left) * _width(right) / total


def _shares(latencies: Latencies) -> Callable[[Product, Bits, Bits], float]:
    return lambda product, left, right: latencies.of(product, left, right) / (latencies.total or 1.0)


def _width(bits: Bits) -> int:
    return FLOAT_BITS if isinstance(bits, str) else bits


def _merged(choices: Sequence[Choice], products: Sequence[Product], cost: Callable[[Product, Bits, Bits], float]) -> _Products:
    at = {key: i for i, choice in enumerate(choices) for key in choice.keys}
    alone = [[0.0] * len(choice.candidates) for choice in choices]
    together: dict[tuple[int, int], list[list[float]]] = {}
    fixed = 0.0
    for product in products:
        left, right = (None if key is None else at.get(key) for key in product.operands)
        if left is None and right is None:
            fixed += cost(product, "float", "float")
        elif left is None or right is None or left == right:
            i = right if left is None else left
            assert i is not None
            for a, bits in enumerate(choices[i].candidates):
                alone[i][a] += cost(product, "float" if left is None else bits, "float" if right is None else bits)
        else:
            i, j = sorted((left, right))
            table = together.setdefault((i, j), [[0.0] * len(choices[j].candidates) for _ in choices[i].candidates])
            for a, first in enumerate(choices[i].candidates):
                for b, second in enumerate(choices[j].candidates):
                    table[a][b] += cost(product, *((first, second) if left == i else (second, first)))
    return _Products(alone, together, fixed)
