"""Cholesky's factorization in the memory of the matrix: torch's own keeps the matrix and needs two more of its size."""

from __future__ import annotations

import torch
from torch import Tensor

_PANEL = 256  # columns at a time
_TRIES = 8


def factored(matrix: Tensor, extra: Tensor) -> Tensor | None:
    """The lower factor of the matrix with `extra` added to its diagonal, in its memory; None where none is found.

    Where rounding has made the matrix indefinite, ten times as much is added, up to eight times over: all that is overwritten until a
    factor is there can be taken from the other half. Golub and Van Loan, "Matrix Computations", section 4.2.5: by panels, from the left.

    Parameters
    ----------
    matrix : Tensor, shape [groups, K, K]
        Symmetric; overwritten.
    extra : Tensor, shape [groups]

    Examples
    --------
    >>> factored(torch.tensor([[[3.0, 2.0], [2.0, 4.0]]]), torch.tensor([1.0]))
    tensor([[[2., 0.],
             [1., 2.]]])
    """
    diagonal = matrix.diagonal(dim1=1, dim2=2).clone()
    for _ in range(_TRIES):
        diagonal += extra[:, None]
        matrix.diagonal(dim1=1, dim2=2).copy_(diagonal)
        if _lower_half(matrix):
            for begin, end in _panels(matrix):
                matrix[:, :end, begin:end].tril_(-begin)
            return matrix
        for begin, end in _panels(matrix):
            upper = matrix[:, begin:end, begin:end].triu(1)
            matrix[:, begin:end, begin:end] = upper + upper.mT
            matrix[:, end:, begin:end] = matrix[:, begin:end, end:].mT
        extra = extra * 10
    return None


def _panels(matrix: Tensor) -> list[tuple[int, int]]:
    size = matrix.shape[-1]
    return [(begin, min(begin + _PANEL, size)) for begin in range(0, size, _PANEL)]


def _lower_half(matrix: Tensor) -> bool:
    """Write the factor over diagonal and lower half, but for what is above the diagonal; False where there is none, in the middle of it."""
    for begin, end in _panels(matrix):
        panel = matrix[:, begin:, begin:end] - matrix[:, begin:, :begin] @ matrix[:, begin:end, :begin].mT
        width = end - begin
        corner, info = torch.linalg.cholesky_ex(panel[:, :width])
        if bool(info.any()):
            return False
        matrix[:, begin:end, begin:end] = corner + matrix[:, begin:end, begin:end].triu(1)
        if width < panel.shape[1]:
            matrix[:, end:, begin:end] = torch.linalg.solve_triangular(corner.mT, panel[:, width:], upper=True, left=False)
    return True
