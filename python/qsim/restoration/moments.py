"""Second moments of what an operation reads, in float and in the simulation: all that solving for its weight needs of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """Sums over columns ``x`` of the float model and ``y`` of the simulation, at the same places; float64.

    Attributes
    ----------
    own : Tensor, shape [groups, K, K]
        Of ``y y^T``.
    cross : Tensor, shape [groups, K, K]
        Of ``x y^T``.
    float_sum, own_sum : Tensor, shape [groups, K]
        Of ``x``, and of ``y``.
    count : int
        How many columns.
    """

    own: Tensor
    cross: Tensor
    float_sum: Tensor
    own_sum: Tensor
    count: int = 0

    @classmethod
    def empty(cls, groups: int, size: int, device: torch.device) -> Moments:
        own, cross = (torch.zeros(groups, size, size, dtype=torch.float64, device=device) for _ in range(2))
        float_sum, own_sum = (torch.zeros(groups, size, dtype=torch.float64, device=device) for _ in range(2))
        return cls(own, cross, float_sum, own_sum)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count columns of shape ``[groups, K, N]``, float32, finite."""
        self.own += y @ y.transpose(1, 2)
        self.cross += x @ y.transpose(1, 2)
        self.float_sum += x.double().sum(2)
        self.own_sum += y.double().sum(2)
        self.count += x.shape[2]

    def means(self, centred: bool) -> tuple[Tensor, Tensor]:
        """``own`` and ``cross`` as means; about the means of the columns if `centred`: what is left once a bias takes up the rest."""
        own, cross = self.own / self.count, self.cross / self.count
        if centred:
            x, y = self.float_sum / self.count, self.own_sum / self.count
            own = own - y[:, :, None] * y[:, None]
            cross = cross - x[:, :, None] * y[:, None]
        return own, cross
