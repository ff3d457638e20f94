"""Second moments of what an operation reads, in float and in the simulation: all that solving for its weight needs of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.restoration.ranks import Group, add_up, total

_PRECISE = 1024
_PANEL = 512  # rows of `own` at a time


@dataclass
class Moments:
    """Sums over columns ``x`` of the float model and ``y`` of the simulation, at the same places.

    Matrices of more than 1024 columns are float32: half the memory and time, and damping leaves nothing that needs more. A weight with
    fewer rows than columns is multiplied with ``x`` at once: what is kept of it is then as small as the weight.

    Attributes
    ----------
    own : Tensor, shape [groups, K, K]
        Of ``y y^T``.
    cross : Tensor, shape [groups, K, K], or [groups, rows, K]
        Of ``x y^T``, or of ``W x y^T`` where there is `weight`.
    float_sum, own_sum : Tensor, shape [groups, K]
        Of ``x``, and of ``y``.
    weight : Tensor, shape [groups, rows, K], optional
        W, the float model's.
    count : int
        How many columns.
    """

    own: Tensor
    cross: Tensor
    float_sum: Tensor
    own_sum: Tensor
    weight: Tensor | None = None
    count: int = 0

    @classmethod
    def empty(cls, groups: int, size: int, device: torch.device, weight: Tensor | None = None) -> Moments:
        """Of nothing yet. `weight` is left out where the matrix that it would save is no larger."""
        weight = None if weight is None or weight.shape[1] >= size else weight
        dtype = torch.float64 if size <= _PRECISE else torch.float32
        own = torch.zeros(groups, size, size, dtype=dtype, device=device)
        cross = torch.zeros(groups, size if weight is None else weight.shape[1], size, dtype=dtype, device=device)
        float_sum, own_sum = (torch.zeros(groups, size, dtype=dtype, device=device) for _ in range(2))
        return cls(own, cross, float_sum, own_sum, weight)

    def reduced(self, x: Tensor) -> Tensor:
        """What is kept of columns in float: ``W x`` where there is `weight`, else themselves."""
        return x if self.weight is None else self.weight.to(x) @ x

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count columns of shape ``[groups, K, N]``, float32, finite."""
        _add_squares(self.own, y)
        _add_product(self.cross, self.reduced(x), y)
        self.float_sum += x.sum(2, dtype=torch.float64)
        self.own_sum += y.sum(2, dtype=torch.float64)
        self.count += x.shape[2]

    def merge(self, group: Group) -> None:
        """Add what the other ranks have seen."""
        (count,) = total([float(self.count)], group, self.own.device)
        self.count = int(count)
        add_up((self.own, self.cross, self.float_sum, self.own_sum), group)

    def averaged(self) -> tuple[Tensor, Tensor]:
        """Means of the columns of both. From now on all sums are means."""
        for sums in (self.own, self.cross, self.float_sum, self.own_sum):
            sums /= self.count
        self.count = 1
        return self.float_sum, self.own_sum

    def centre(self) -> None:
        """Take what the means explain out of `own` and `cross`, which are means: a bias takes that up."""
        for sums, left in ((self.own, self.own_sum[:, :, None]), (self.cross, self.reduced(self.float_sum[:, :, None]))):
            sums.baddbmm_(left, self.own_sum[:, None], alpha=-1)

    def results(self, weight: Tensor) -> Tensor:
        """Of ``W x y^T``, shape [groups, rows, K], for the weight W that they were made for."""
        return weight @ self.cross if self.weight is None else self.cross

    def used_up(self) -> Tensor:
        """`own`, for the caller to overwrite; both matrices are gone from here."""
        own, self.own = self.own, self.own.new_empty(0)
        self.cross = self.own
        return own


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right^T``."""
    if sums.dtype == right.dtype:
        sums.baddbmm_(left, right.mT)
    else:
        sums += left @ right.mT


def _add_squares(sums: Tensor, y: Tensor) -> None:
    """Add ``y @ y^T`` to what is symmetric: of a large one its upper half, which is copied to the lower one. Torch has no syrk."""
    size = y.shape[1]
    if size <= _PANEL:
        _add_product(sums, y, y)
        return
    for begin in range(0, size, _PANEL):
        end = min(begin + _PANEL, size)
        for group in range(len(sums)):  # `baddbmm_` would copy a part of a matrix
            part, left, right = sums[group, begin:end, begin:], y[group, begin:end], y[group, begin:].mT
            if part.dtype == y.dtype:
                part.addmm_(left, right)
            else:
                part += left @ right
        sums[:, end:, begin:end] = sums[:, begin:end, end:].mT
