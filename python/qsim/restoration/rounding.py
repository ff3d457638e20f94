"""Rounding that is learned: each number of a weight goes up or down as is best for all of them together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim.equalization.orthogonal import hadamard
from qsim.restoration.grids import Grid
from qsim.restoration.solvers import Problem, gptq, refined

# Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization", sections 3.2 and 4: the stretch of the sigmoid (which
# the kernel, qsim/soft_round.h, has too), the weight of the regulariser, its exponents at the beginning and the end, and the part of the
# steps before it begins.
_LOW, _HIGH = -0.1, 1.1
_WEIGHT = 0.01
_SHARP, _SOFT = 20.0, 2.0
_WARM = 0.2
_RATE = 0.02
_COLUMNS = 64  # that stand for all of the input's in one step, where there are more


def learned(problem: Problem, grid: Grid, steps: int) -> Tensor:
    """Soft rounding between the two neighbours of each number of the target, pressed to one of them as the steps go on.

    What is minimised is the squared error of the product, from its second moments, so that no step looks at data. Rows are solved each by
    itself, and each takes what `gptq` finds for it where that is better; both are refined by coordinate descent.
    """
    unit = grid.step.mean()
    target = (problem.target / unit).float()
    step, low, high = grid.tables()
    step, low, high = (step / unit).float(), low.float(), high.float()
    below = (target / step).floor()
    rest = (target / step - below).clamp(0.01, 0.99)
    straight = problem.straight()
    roots = _Roots((straight / straight.square().sum(-1).mean().sqrt()).float())
    variable = -torch.log((_HIGH - _LOW) / (rest - _LOW) - 1)
    mean, square, errors = (torch.zeros_like(variable) for _ in range(3))
    soft_round = torch.ops.qsim_restoration.soft_round_
    soft_round(variable, mean, square, errors, target, step, low, high, 1, 0.0, 0.0, _SOFT)  # no step: the errors alone
    for i in range(steps):
        root = roots.next()
        torch.matmul(errors @ root.mT, 2 * root, out=errors)
        weight = _WEIGHT if i >= _WARM * steps else 0.0
        soft_round(variable, mean, square, errors, target, step, low, high, i + 1, _RATE, weight, _exponent(i / steps))
    hard = torch.clamp(below + (variable >= 0), grid.low, grid.high) * grid.step
    hard = refined(problem, grid, hard)
    other = refined(problem, grid, gptq(problem, grid))
    costs = [((rows - problem.target) @ straight).square().sum(-1, keepdim=True) for rows in (hard, other)]
    return torch.where(costs[0] < costs[1], hard, other)


def _exponent(progress: float) -> float:
    """Falls along half a cosine."""
    return _SOFT + (_SHARP - _SOFT) * 0.5 * (1 + math.cos(math.pi * (progress - _WARM) / (1 - _WARM)))


class _Roots:
    """Rows whose products with themselves are, in the mean, those of all columns of a matrix: as few in each step as do.

    Columns are turned into each other by Hadamard matrices of random signs, so that all weigh about the same, and taken in turns.

    Parameters
    ----------
    whole : Tensor, shape [groups, K, K]
    """

    def __init__(self, whole: Tensor) -> None:
        size, self._generator = whole.shape[-1], torch.Generator().manual_seed(0)
        self._whole, self._order = whole.mT, torch.empty(0, dtype=torch.int64)
        if size > _COLUMNS:
            count = -(-size // _COLUMNS) * _COLUMNS
            padded = torch.nn.functional.pad(whole, (0, count - size))
            mixed = torch.randperm(count, generator=self._generator).to(whole.device)
            signs = (torch.randint(0, 2, (count,), generator=self._generator) * 2 - 1).to(whole)
            turned = (padded[..., mixed] * signs).reshape(*whole.shape[:-1], -1, _COLUMNS) @ hadamard(_COLUMNS).to(whole)
            self._whole = (turned.flatten(-2) * (count / _COLUMNS) ** 0.5).mT.contiguous()

    def next(self) -> Tensor:
        """Of shape [groups, N, K], N at most 64."""
        count = self._whole.shape[1]
        if count <= _COLUMNS:
            return self._whole
        if not len(self._order):
            self._order = torch.randperm(count, generator=self._generator).to(self._whole.device)
        chosen, self._order = self._order[:_COLUMNS], self._order[_COLUMNS:]
        return self._whole[:, chosen]
