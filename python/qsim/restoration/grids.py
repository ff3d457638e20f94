"""The grid of a weight in the layout of a product, and the scale that costs the product least."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from qsim import ops
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.reference.layout import per_element
from qsim.restoration.operands import WeightProduct

# Factors of the scale that there is, and offsets from the best of them, by what scales are stored as.
_FACTORS: dict[str | None, tuple[tuple[float, ...], tuple[float, ...]]] = {
    None: (tuple(0.35 + 0.1 * i for i in range(11)), (-0.075, -0.05, -0.025, 0.025, 0.05, 0.075)),
    "float8_e8m0fnu": ((0.5, 2.0), ()),
    "float8_e4m3fn": ((), ()),
    "int": ((), ()),
}


@dataclass(frozen=True)
class Grid:
    """What the quantizer of a weight rounds to, element by element, as ``[groups, rows, K]``.

    Attributes
    ----------
    spec : TensorSpec
    encoding : Encoding
    product : WeightProduct
        Which says how the weight becomes rows.
    step : Tensor
    low, high : Tensor
        Smallest and largest multiple of the step.
    """

    spec: TensorSpec
    encoding: Encoding
    product: WeightProduct
    step: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, spec: TensorSpec, encoding: Encoding, product: WeightProduct, dtype: torch.dtype = torch.float64) -> Grid:
        """For values of `dtype`."""
        zero = encoding.zero_point
        of_scales = (t.to(dtype) for t in (encoding.scale, encoding.quant_min - zero, encoding.quant_max - zero))
        return cls(spec, encoding, product, *(_rows(t, encoding, product) for t in of_scales))

    def reordered(self, order: Tensor) -> Grid:
        """With its columns in another order; `order`: int64, shape of `step`."""
        if self.step.stride(2) == 0:  # one scale for all columns of a row, in the memory of one
            return self
        step, low, high = (t.gather(2, order) for t in (self.step, self.low, self.high))
        return dataclasses.replace(self, step=step, low=low, high=high)

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Step, low and high as operators take them, of shape [groups, rows, K]; [groups, rows, 1] where one serves for all columns."""
        once = slice(1) if self.step.stride(2) == 0 else slice(None)
        return self.step[..., once].contiguous(), self.low[..., once].contiguous(), self.high[..., once].contiguous()

    @property
    def format(self) -> str | None:
        """The float format whose numbers are scaled, None: integers."""
        return self.spec.dtype if self.spec.is_float else None

    def rounded(self, values: Tensor, at: slice | int = slice(None)) -> Tensor:
        """The nearest numbers of the grid to the columns `at`."""
        step = self.step[..., at]
        if self.format:
            return ops.round_to_format(values / step, self.format) * step
        steps = values / step
        return steps.round_().clamp_(self.low[..., at], self.high[..., at]).mul_(step)

    def with_factors(self, factors: Tensor) -> Grid:
        """The grid with every scale times its factor, of the scale's shape."""
        smallest = max(self.spec.min_scale, torch.finfo(torch.float32).tiny)
        scale = (self.encoding.scale * factors.to(self.encoding.scale)).clamp_min(smallest)
        return Grid.of(self.spec, dataclasses.replace(self.encoding, scale=scale), self.product, self.step.dtype)

    def cheapest(self, target: Tensor, root: Tensor) -> Grid:
        """The grid whose nearest numbers to `target` cost the product least, with each scale 0.35 to 1.35 times what it is.

        The idea is that of sequential mean squared error in AIMET: a scale is judged by the error of the layer's results, not of its
        weight. Scales are judged each by itself: what the others do is left out. Eleven factors first, then six about the best; powers
        of two become others, half and twice as large, and scales of two levels stay as they are.

        Parameters
        ----------
        target : Tensor, shape [groups, rows, K]
        root : Tensor, shape [groups, K, M]
            ``root @ root^T`` are the second moments of the columns, or close to them.
        """
        scale = self.encoding.scale
        numbers = torch.arange(scale.numel(), device=scale.device).reshape(scale.shape)
        owner = _rows(numbers, self.encoding, self.product)
        runs = _runs(owner[0, 0])
        factors = torch.ones(scale.numel(), dtype=target.dtype, device=scale.device)
        best = torch.full_like(factors, torch.inf)

        def judge(candidates: Tensor) -> None:
            nonlocal best, factors
            error = self.with_factors(candidates.reshape(scale.shape)).rounded(target).sub_(target)
            cost = torch.zeros_like(best)
            for run in runs:
                part = (error[..., run] @ root[:, run]).square_().sum(-1)
                cost.index_add_(0, owner[..., run.start].reshape(-1), part.reshape(-1))
            better = cost < best
            best, factors = torch.where(better, cost, best), torch.where(better, candidates, factors)

        judge(factors)  # what there is first: it stays unless another is better
        coarse, fine = _FACTORS[self.spec.scale_format]
        for factor in coarse:
            judge(torch.full_like(factors, factor))
        found = factors
        for offset in fine:
            judge(found + offset)
        return self.with_factors(factors.reshape(scale.shape))


def _rows(parameter: Tensor, encoding: Encoding, product: WeightProduct) -> Tensor:
    """One of the encoding's parameters for each element of the weight."""
    like = parameter.new_empty(()).expand(product.shape)
    return product.to_rows(per_element(parameter, like, encoding.axis, encoding.block_size).expand(product.shape))


def _runs(owner: Tensor) -> list[slice]:
    """Stretches of columns with one scale; the same in every row."""
    ends = ((owner[1:] != owner[:-1]).nonzero().flatten() + 1).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], [*ends, owner.numel()], strict=True)]
