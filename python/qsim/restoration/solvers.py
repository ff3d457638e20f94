"""Weights on a grid whose product with what the simulation reads is closest to the float model's.

With the columns ``x`` of the float model, ``y`` of the simulation and the weight W, the error of a weight Q on the grid is the mean of
``|W x - Q y|^2``. Written out it is ``|(Q - T) L|^2`` and a constant, with ``H = E[y y^T] = L L^T`` and ``T = W E[x y^T] H^-1``:
the real weight that does best on the simulation's inputs. Taking x as well as y is what Li et al. 2025, "GPTAQ", section 3, and
Zhang et al. 2025, "Qronos", do; with x = y, T is W, and the problem that of Frantar et al. 2023, "GPTQ".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.restoration.cholesky import factored
from qsim.restoration.grids import Grid
from qsim.restoration.moments import Moments

_BLOCK = 128  # columns after which errors are handed on to all others in one product
_DESCENT = 2048  # columns with which coordinate descent follows
_ROUNDS = 10
_SKETCH = 256  # columns that stand for the second moments where there are more
_STRIPE = 256  # rows or columns of a matrix that are moved at a time


@dataclass(frozen=True)
class Problem:
    """One weight to be solved for.

    Attributes
    ----------
    weight : Tensor, shape [groups, rows, K]
        In float.
    factor : Tensor, shape [groups, K, K]
        Lower Cholesky factor of H, damped, with its columns in `order`.
    order : Tensor, int64, shape [groups, K]
        Columns by the power of their input, ascending.
    target : Tensor, shape [groups, rows, K]
        T.
    moments : Moments, optional
        Of ``y y^T`` and ``x y^T``, for those who need more than H and T.
    """

    weight: Tensor
    factor: Tensor
    order: Tensor
    target: Tensor
    moments: Moments | None = None

    @classmethod
    def of(cls, weight: Tensor, moments: Moments, damping: float, *, keeps_moments: bool = False) -> Problem | None:
        """`damping` times the mean of the diagonal is added to it: it draws T towards the weight. None where no input is ever nonzero.

        These matrices are the largest there are in a restoration: the moments, which are means, are used up unless the problem keeps them.
        """
        power = moments.own.diagonal(dim1=1, dim2=2).clone()
        extra = damping * power.mean(-1)
        if not bool((extra > 0).any()):
            return None
        extra = torch.where(extra > 0, extra, 1.0)
        order = power.argsort(-1)
        towards = torch.addcmul(moments.results(weight), weight, extra[:, None, None])
        factor = _cholesky(moments.own.clone() if keeps_moments else moments.used_up(), order, extra)
        rows = towards.gather(2, _like(order, towards))
        rows = torch.linalg.solve_triangular(factor.mT, rows, upper=True, left=False)  # torch.cholesky_solve copies the factor
        rows = torch.linalg.solve_triangular(factor, rows, upper=False, left=False)
        target = towards.scatter_(2, _like(order, rows), rows)
        return cls(weight, factor, order, target, moments if keeps_moments else None)

    def straight(self) -> Tensor:
        """A matrix whose product with its transpose is H, damped."""
        return self._with_rows_in_place(self.factor)

    def root(self) -> Tensor:
        """The same; of more than 256 columns a random one that is so in the mean."""
        size = self.factor.shape[-1]
        if size <= _SKETCH:
            return self.straight()
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (size, _SKETCH), generator=generator).to(self.factor) * 2 - 1
        return self._with_rows_in_place(self.factor @ (signs / _SKETCH**0.5))

    def _with_rows_in_place(self, ordered: Tensor) -> Tensor:
        return torch.empty_like(ordered).scatter_(1, self.order[:, :, None].expand_as(ordered), ordered)


def nearest(problem: Problem, grid: Grid) -> Tensor:
    """Each number of the target rounded by itself."""
    return grid.rounded(problem.target)


def gptq(problem: Problem, grid: Grid) -> Tensor:
    """Column by column, those with the most input first; what rounding a column loses is handed on to those that follow.

    Frantar et al. 2023, "GPTQ", algorithm 1, in the form of Babai's nearest plane (Chen et al. 2025, "The Geometry of LLM Quantization",
    section 4): with the Cholesky factor of H itself, from its last column to its first, no inverse is needed.
    """
    order = _like(problem.order, problem.target)
    target, factor, tables = problem.target.gather(2, order), problem.factor, grid.reordered(order).tables()
    solved = torch.zeros_like(target)  # columns that are not yet solved hold what was handed on to them
    for end in range(target.shape[-1], 0, -_BLOCK):
        begin = max(0, end - _BLOCK)
        errors = torch.ops.qsim_restoration.feed_back_(solved, target, factor, *tables, begin, end, format=grid.format)
        if begin:
            solved[..., :begin] += errors @ factor[:, begin:end, :begin]
    back: Tensor = target.scatter_(2, order, solved)
    return back


def descended(problem: Problem, grid: Grid, rows: Tensor) -> Tensor:
    """From `rows` on, column by column the best number given all others, until none changes.

    Behdin et al. 2023, "QuantEase", algorithm 1: the error never rises. It makes up for what GPTQ, which looks at each column once, leaves:
    most on small kernels with coarse grids.
    """
    straight = problem.straight()
    moments = straight @ straight.mT
    solved = rows.clone(memory_format=torch.contiguous_format)
    pull = ((problem.target - rows) @ moments).contiguous()  # half of the gradient, downhill
    torch.ops.qsim_restoration.descend_(solved, pull, moments, *grid.tables(), _ROUNDS, format=grid.format)
    return solved


def refined(problem: Problem, grid: Grid, rows: Tensor) -> Tensor:
    """`descended`, where the columns are few enough for it to take no longer than what found the rows."""
    return descended(problem, grid, rows) if rows.shape[-1] <= _DESCENT else rows


def gptq_refined(problem: Problem, grid: Grid) -> Tensor:
    """`gptq`, and coordinate descent from there."""
    return refined(problem, grid, gptq(problem, grid))


def gpfq(problem: Problem, grid: Grid) -> Tensor:
    """Column by column in their order, each the best for the sum so far: Lybrand and Saab 2021, "A Greedy Algorithm for Quantizing Neural
    Networks", section 3, with the float model's columns on one side and the simulation's on the other."""
    moments = problem.moments
    assert moments is not None
    weight, own, cross = problem.weight, moments.own, moments.cross
    solved = torch.zeros_like(weight)
    power = own.diagonal(dim1=1, dim2=2)
    for i in range(weight.shape[-1]):
        wanted = torch.einsum("gok,gk->go", weight[..., : i + 1], cross[:, : i + 1, i])
        wanted -= torch.einsum("gok,gk->go", solved[..., :i], own[:, :i, i])
        there = power[:, None, i]
        values = torch.where(there > 0, wanted / there.clamp_min(torch.finfo(there.dtype).tiny), weight[..., i])
        solved[..., i] = grid.rounded(values, i)
    return solved


SOLVERS: dict[str, Callable[[Problem, Grid], Tensor]] = {"gptq": gptq_refined, "gpfq": gpfq, "nearest": nearest}


def _like(order: Tensor, rows: Tensor) -> Tensor:
    return order[:, None].expand_as(rows)


def _cholesky(matrix: Tensor, order: Tensor, extra: Tensor) -> Tensor:
    """Of the matrix, which is overwritten, in this order of rows and columns, with so much added to its diagonal: see `factored`."""
    for part in torch.split(matrix, _STRIPE, 2):
        part.copy_(part.gather(1, order[:, :, None].expand_as(part)))
    for part in torch.split(matrix, _STRIPE, 1):
        part.copy_(part.gather(2, _like(order, part)))
    factor = factored(matrix, extra)
    if factor is None:
        raise ValueError("qsim: the second moments of an operation's input are not those of finite numbers")
    return factor
