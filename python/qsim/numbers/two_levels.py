"""Scales of two levels: an integer for each block, times one float for the blocks of a super-block (docs/numerics.md, section 10).

AIMET's LPBQ has integers from 1 to 16 beside one float an output channel; GGUF's Q4_K has integers of 6 bits beside one float16 for 256
elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.numbers.blocks import join_blocks

_TINY = torch.finfo(torch.float32).tiny
_NEIGHBOURS = (0, -1, 1, -2, 2)  # of the quotient, in units of the last place: products were rounded


@dataclass(frozen=True)
class TwoLevels:
    """How scales are stored: as integers from 1 to `levels`, and one float for each super-block.

    Parameters
    ----------
    levels : int
    axis : int
        Along which blocks lie.
    count : int, optional
        Blocks of a super-block; the last may have fewer. None: all along the axis.
    """

    levels: int
    axis: int
    count: int | None = None

    def nearest(self, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The nearest scales that are stored so: of the largest of a super-block the integer is `levels`.

        Parameters
        ----------
        scale : Tensor, float32
            One for each block.
        dtype : torch.dtype
            What the floats are stored in.

        Examples
        --------
        >>> TwoLevels(16, 1).nearest(torch.tensor([[16.0, 4.4, 0.1, 3.0]])).tolist()
        [[16.0, 4.0, 1.0, 3.0]]
        """
        largest = self._largest(scale).double()
        step = (largest / self.levels).float()
        # no product is larger than the largest scale: the ends of its grid are finite too
        step = torch.where(step.double() * self.levels > largest, torch.nextafter(step, torch.zeros_like(step)), step).clamp_min(_TINY)
        if dtype is not torch.float32:
            least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # what is subnormal is read as it is
            step = step.to(dtype).clamp_min(least).float()
        return self._products(self._integers(scale, step), step)

    def split(self, scale: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The integers (int32, shape of `scale`) and the floats (float32, one a super-block) whose products scales are, bit for bit.

        Several pairs may give the same products: the one with the largest integers is taken.

        Parameters
        ----------
        scale : Tensor, float32
        dtype : torch.dtype
            What the floats have to be numbers of.

        Raises
        ------
        ValueError
            They are no such products.

        Examples
        --------
        >>> integers, step = TwoLevels(16, 1).split(torch.tensor([[8.0, 2.0, 0.5, 1.5]]))
        >>> integers.tolist(), step.tolist()
        ([[16, 4, 1, 3]], [[0.5]])
        """
        largest = self._largest(scale)
        found = torch.full_like(largest, torch.nan)
        for top in range(self.levels, 0, -1):
            for offset in _NEIGHBOURS:
                step = ((largest.double() / top).float().view(torch.int32) + offset).view(torch.float32)
                exact = (self._products(self._integers(scale, step), step) == scale).to(scale.dtype)
                whole = join_blocks(exact, self.axis, self._count(scale), largest=False) == 1
                is_step = (step > 0) & (step.to(dtype) == step)
                found = torch.where(found.isnan() & whole & is_step, step, found)
            if not bool(found.isnan().any()):
                return self._integers(scale, found), found
        raise ValueError(
            f"{int(found.isnan().sum())} of {found.numel()} super-blocks have scales that are not one float times integers from 1 to "
            f"{self.levels}"
        )

    def _largest(self, scale: Tensor) -> Tensor:
        return join_blocks(scale, self.axis, self._count(scale), largest=True)

    def _integers(self, scale: Tensor, step: Tensor) -> Tensor:
        quotient = scale.double() / self._spread(step, scale).double()
        return quotient.nan_to_num(1.0).round().clamp(1, self.levels).int()

    def _products(self, integers: Tensor, step: Tensor) -> Tensor:
        """In float32, rounded once."""
        return integers * self._spread(step, integers)

    def _spread(self, step: Tensor, like: Tensor) -> Tensor:
        return step.repeat_interleave(self._count(like), self.axis).narrow(self.axis, 0, like.shape[self.axis])

    def _count(self, scale: Tensor) -> int:
        blocks = max(scale.shape[self.axis], 1)
        return blocks if self.count is None else min(self.count, blocks)
