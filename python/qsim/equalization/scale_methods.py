"""How the scales of edges are chosen: from weights, from what layers read, or by a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsim.equalization.candidates import Refused
from qsim.equalization.channels import input_range, output_range
from qsim.equalization.edges import Edge
from qsim.equalization.input_statistics import InputStatistics
from qsim.numbers.spec import TensorSpec
from qsim.operations.layers import LAYERS
from qsim.options import check_number
from qsim.quantizers.quantizer import Quantizer

# Beyond it a channel that is all but switched off would have its bias, and what it returns, blown up.
_LARGEST = 1e3

_INT8_WEIGHT = TensorSpec(symmetric=True, axis=0, method="minmax")
_INT8_ACTIVATION = TensorSpec(method="minmax")
_INT4_GROUPS = TensorSpec(bits=4, symmetric=True, axis=1, block_size=128, method="minmax")


@dataclass(frozen=True)
class CrossLayer:
    """Equal ranges of weights on both sides of each edge between layers.

    ``s = sqrt(r1 / r2)`` with r1 the range of a channel's weights in the producer, and r2 in its readers: both become sqrt(r1 r2).
    Repeated until nothing moves, for chains of layers. Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias
    Correction", section 4.1.

    Attributes
    ----------
    rounds : int
        At most.
    """

    rounds: int = 20
    name = "cross_layer"
    needs_data = False

    def takes(self, model: nn.Module, edge: Edge) -> bool:
        return isinstance(edge.source(model), LAYERS)

    def size(self, model: nn.Module, edge: Edge, inputs: InputStatistics) -> Tensor:
        """By channel, what is to be made equal."""
        layer = edge.source(model)
        assert isinstance(layer, LAYERS)
        return output_range(layer).to("cpu", torch.float64)

    def apply(self, model: nn.Module, edges: Sequence[Edge], inputs: InputStatistics) -> tuple[dict[Edge, Tensor], dict[Edge, str]]:
        """Scale the edges. Returns the factors of each, float64 [channels], and the reason for each that stays."""
        chosen = {edge: torch.ones(edge.channels, dtype=torch.float64) for edge in edges}
        for _ in range(self.rounds):
            moved = 0.0
            for edge, so_far in chosen.items():
                first, second = self.size(model, edge, inputs), edge.largest(model, lambda _, layer: input_range(layer))
                factors = _bounded((first / second).sqrt() * so_far) / so_far
                edge.scale(model, factors)
                chosen[edge] = so_far * factors
                moved = max(moved, float(factors.log2().abs().max()))
            if moved < 0.01:
                break
        return chosen, {}


class _FromInputs:
    """What methods have alike that scale by what layers read: they take every edge, and make what its readers get equal."""

    needs_data = True

    def takes(self, model: nn.Module, edge: Edge) -> bool:
        return True

    def size(self, model: nn.Module, edge: Edge, inputs: InputStatistics) -> Tensor:
        return edge.largest_read(model, inputs)


@dataclass(frozen=True)
class SmoothQuant(_FromInputs):
    """The outliers of what layers read moved into their weights.

    ``s = max|x|^alpha / max|w|^(1 - alpha)`` by channel: the producer is divided by it, the readers' weights are multiplied.
    Xiao et al. 2023, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", section 4.

    Attributes
    ----------
    alpha : float, 0 to 1, or None
        How much of the difficulty moves into the weights; None searches 11 values for the least error of what each edge's readers return.
    weight, activation : TensorSpec
        What the search quantizes with.
    """

    alpha: float | None = 0.5
    weight: TensorSpec = _INT8_WEIGHT
    activation: TensorSpec = _INT8_ACTIVATION
    name = "smooth_quant"

    def __post_init__(self) -> None:
        if self.alpha is not None:
            check_number("SmoothQuant", "alpha", self.alpha, least=0, otherwise="None for a search")
        if self.alpha is not None and self.alpha > 1:
            raise ValueError(f"SmoothQuant: got alpha={self.alpha}; expected 0 to 1, or None for a search")

    def apply(self, model: nn.Module, edges: Sequence[Edge], inputs: InputStatistics) -> tuple[dict[Edge, Tensor], dict[Edge, str]]:
        def factors(edge: Edge, alpha: float) -> Tensor:
            weights = edge.largest(model, lambda _, layer: input_range(layer))
            return _bounded(self.size(model, edge, inputs) ** alpha / weights ** (1 - alpha))

        return _migrate(model, edges, inputs, self._alphas(), factors, self.weight, self.activation)

    def _alphas(self) -> list[float]:
        return [i / 10 for i in range(11)] if self.alpha is None else [self.alpha]


@dataclass(frozen=True)
class Awq(_FromInputs):
    """The weights that large inputs meet made larger, so that a coarse grid rounds them less.

    ``s = mean|x|^alpha`` by channel, alpha out of 21 for the least error of what each edge's readers return with quantized weights.
    Lin et al. 2024, "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration", section 3.2.

    Attributes
    ----------
    weight : TensorSpec
        What the weights will be quantized with.
    """

    weight: TensorSpec = _INT4_GROUPS
    name = "awq"

    def apply(self, model: nn.Module, edges: Sequence[Edge], inputs: InputStatistics) -> tuple[dict[Edge, Tensor], dict[Edge, str]]:
        def factors(edge: Edge, alpha: float) -> Tensor:
            found = edge.largest(model, lambda path, _: inputs.mean[path]) ** alpha
            read = found[found > 0]
            return _bounded(found / (read.max() * read.min()).sqrt()) if len(read) else torch.ones_like(found)

        return _migrate(model, edges, inputs, [i / 20 for i in range(21)], factors, self.weight, None)


def _bounded(factors: Tensor) -> Tensor:
    """1 where a range is zero or not finite."""
    return torch.where(factors.isfinite() & (factors > 0), factors, 1.0).clamp(1 / _LARGEST, _LARGEST)


def _migrate(
    model: nn.Module,
    edges: Sequence[Edge],
    inputs: InputStatistics,
    alphas: Sequence[float],
    factors: Callable[[Edge, float], Tensor],
    weight: TensorSpec,
    activation: TensorSpec | None,
) -> tuple[dict[Edge, Tensor], dict[Edge, str]]:
    """Scale each edge by the factors of the exponent with the least error. Where there is one exponent, nothing is compared."""
    chosen, kept = {}, {}
    for edge in edges:
        try:
            best = _best(model, edge, inputs, [factors(edge, alpha) for alpha in alphas], weight, activation)
        except Refused as reason:
            kept[edge] = str(reason)
            continue
        edge.scale(model, best)
        chosen[edge] = best
    return chosen, kept


def _best(
    model: nn.Module, edge: Edge, inputs: InputStatistics, options: list[Tensor], weight: TensorSpec, activation: TensorSpec | None
) -> Tensor:
    for path, layer in edge.layers(model).items():
        if not bool(inputs.largest[path].isfinite().all()):
            raise Refused(f"'{path}' reads NaN or Inf on these data")
        if len(options) > 1 and not isinstance(layer, nn.Linear):
            raise Refused(f"'{path}' is a {type(layer).__name__}: scales are searched for linear layers; give SmoothQuant an alpha")
    if len(options) == 1:
        return options[0]
    errors = [_error(model, edge, inputs, factors, weight, activation) for factors in options]
    return options[min(range(len(options)), key=errors.__getitem__)]


def _error(
    model: nn.Module, edge: Edge, inputs: InputStatistics, factors: Tensor, weight: TensorSpec, activation: TensorSpec | None
) -> float:
    """The squared error of what the readers return with quantized weights, and quantized inputs if there is a spec for them."""
    total = 0.0
    for path, layer in edge.layers(model).items():
        x, s = inputs.rows[path], edge.spread(path, factors).to(layer.weight)
        w = layer.weight.detach() * s
        scaled = x / s
        wrong = F.linear(scaled if activation is None else quantized(scaled, activation), quantized(w, weight)) - F.linear(scaled, w)
        total += float(wrong.double().square().sum())
    return total if math.isfinite(total) else math.inf


def quantized(x: Tensor, spec: TensorSpec) -> Tensor:
    """`x` on a grid of its own."""
    quantizer = Quantizer(spec, x.shape).to(x.device)
    quantizer.compute_encoding_from(x)
    return quantizer.quantize(x)
