"""The grid of a weight in the layout of a product, and the scale that costs the product least."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from qsim import ops
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.reference.blocks import per_element
from qsim.restoration.operands import Product

_FACTORS = [0.35 + 0.025 * i for i in range(40)]  # of the scale that there was: 0.35 to 1.325


@dataclass(frozen=True)
class Grid:
    """What the quantizer of a weight rounds to, element by element, in float64 and as ``[groups, rows, K]``.

    Attributes
    ----------
    spec : TensorSpec
    encoding : Encoding
    product : Product
        Which says how the weight becomes rows.
    step : Tensor
    low, high : Tensor
        Smallest and largest multiple of the step.
    """

    spec: TensorSpec
    encoding: Encoding
    product: Product
    step: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, spec: TensorSpec, encoding: Encoding, product: Product) -> Grid:
        step, zero = (_rows(t.double(), encoding, product) for t in (encoding.scale, encoding.zero_point))
        return cls(spec, encoding, product, step, encoding.quant_min - zero, encoding.quant_max - zero)

    def reordered(self, order: Tensor) -> Grid:
        """With its columns in another order; `order`: int64, shape of `step`."""
        step, low, high = (t.gather(2, order) for t in (self.step, self.low, self.high))
        return dataclasses.replace(self, step=step, low=low, high=high)

    def rounded(self, values: Tensor, at: slice | int = slice(None), factor: float = 1.0) -> Tensor:
        """The nearest numbers of the grid to the columns `at`, with the step times `factor`."""
        step = self.step[..., at] * factor
        if self.spec.is_float:
            return ops.round_to_format(values / step, self.spec.dtype) * step
        return torch.minimum(torch.maximum((values / step).round(), self.low[..., at]), self.high[..., at]) * step

    def with_factors(self, factors: Tensor) -> Grid:
        """The grid with every scale times its factor, of the scale's shape."""
        smallest = max(self.spec.min_scale, torch.finfo(torch.float32).tiny)
        scale = (self.encoding.scale * factors.to(self.encoding.scale)).clamp_min(smallest)
        return Grid.of(self.spec, dataclasses.replace(self.encoding, scale=scale), self.product)

    def cheapest(self, target: Tensor, root: Tensor) -> Grid:
        """The grid whose nearest numbers to `target` cost the product least, among 40 factors of each scale.

        The idea is that of sequential mean squared error in AIMET: a scale is judged by the error of the layer's results, not of its
        weight. Scales are judged each by itself: what the others do is left out.

        Parameters
        ----------
        target : Tensor, float64, shape [groups, rows, K]
        root : Tensor, float64, shape [groups, K, M]
            ``root @ root^T`` are the second moments of the columns, or close to them.
        """
        scale = self.encoding.scale
        numbers = torch.arange(scale.numel(), device=scale.device).reshape(scale.shape)
        owner = _rows(numbers, self.encoding, self.product)
        runs = _runs(owner[0, 0])
        best = torch.full((scale.numel(),), torch.inf, dtype=torch.float64, device=scale.device)
        factors = torch.ones_like(best)
        for factor in (1.0, *_FACTORS):  # what there is first: it stays unless another is better
            error = self.rounded(target, factor=factor) - target
            cost = torch.zeros_like(best)
            for run in runs:
                part = (error[..., run] @ root[:, run]).square().sum(-1)
                cost.index_add_(0, owner[..., run.start].reshape(-1), part.reshape(-1))
            better = cost < best
            best, factors = torch.where(better, cost, best), torch.where(better, factor, factors)
        return self.with_factors(factors.reshape(scale.shape))


def _rows(parameter: Tensor, encoding: Encoding, product: Product) -> Tensor:
    """One of the encoding's parameters for each element of the weight."""
    like = parameter.new_empty(()).expand(product.shape)
    return product.to_rows(per_element(parameter, like, encoding.axis, encoding.block_size).expand(product.shape))


def _runs(owner: Tensor) -> list[slice]:
    """Stretches of columns with one scale; the same in every row."""
    ends = ((owner[1:] != owner[:-1]).nonzero().flatten() + 1).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], [*ends, owner.numel()], strict=True)]
