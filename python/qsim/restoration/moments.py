"""Second moments of what an operation reads, in float and in the simulation: all that solving for its weight needs of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.restoration.ranks import Group, add_up, total

_PRECISE = 1024


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

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count columns of shape ``[groups, K, N]``, float32, finite."""
        for sums, left in ((self.own, y), (self.cross, x if self.weight is None else self.weight.to(x) @ x)):
            if sums.dtype == y.dtype:
                sums.baddbmm_(left, y.transpose(1, 2))
            else:
                sums += left @ y.transpose(1, 2)
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
        mean = self.float_sum[:, :, None]
        for sums, left in (
            (self.own, self.own_sum[:, :, None]),
            (self.cross, mean if self.weight is None else self.weight.to(mean) @ mean),
        ):
            sums.baddbmm_(left, self.own_sum[:, None], alpha=-1)

    def results(self, weight: Tensor) -> Tensor:
        """Of ``W x y^T``, shape [groups, rows, K], for the weight W that they were made for."""
        return weight @ self.cross if self.weight is None else self.cross

    def used_up(self) -> Tensor:
        """`own`, for the caller to overwrite; both matrices are gone from here."""
        own, self.own = self.own, self.own.new_empty(0)
        self.cross = self.own
        return own
