"""Orthogonal matrices in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(n: int) -> Tensor:
    """Sylvester's Hadamard matrix over ``sqrt(n)``, n a power of two: orthogonal and symmetric.

    Examples
    --------
    >>> hadamard(2) * 2**0.5
    tensor([[ 1.,  1.],
            [ 1., -1.]], dtype=torch.float64)
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"hadamard: got n={n}; expected a power of two")
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < n:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found.div(n**0.5)


def random_orthogonal(n: int, generator: torch.Generator) -> Tensor:
    """Drawn evenly from all orthogonal matrices (Mezzadri 2007, "How to generate random matrices from the classical compact groups")."""
    q, r = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    return torch.mul(q, r.diagonal().sign())


def rotation_matrix(n: int, keeps_mean: bool, generator: torch.Generator) -> Tensor:
    """For a residual stream of n channels: a Hadamard matrix with random signs where n is a power of two, else one drawn at random.

    `keeps_mean`: it takes the vector of ones to itself, and is drawn at random.
    """
    if keeps_mean:
        across = torch.full((n,), n**-0.5, dtype=torch.float64)
        across[0] -= 1
        mirror = torch.eye(n, dtype=torch.float64) - torch.outer(across, across) * (2 / across.square().sum())  # ones to the first axis
        inner = torch.eye(n, dtype=torch.float64)
        inner[1:, 1:] = random_orthogonal(n - 1, generator)
        return mirror @ inner @ mirror
    if n & (n - 1):
        return random_orthogonal(n, generator)
    return hadamard(n).mul(2.0 * torch.randint(2, (n,), generator=generator) - 1)
