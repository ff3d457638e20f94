"""One candidate of each choice, with the least loss within limits: a multiple-choice knapsack, solved exactly by mixed-integer programming.

The formulation is that of HAWQ-V3 (Yao et al. 2021, section 3), extended by products: what a multiplication costs depends on the bits of
both of its operands. For a product of the choices i and j, variables y[a, b] say that candidate a of i meets b of j. They are tied to the
binary z by sum_b y[a, b] = z_i[a] and sum_a y[a, b] = z_j[b], which leaves them no choice once z is integer (the linearization of Adams and
Sherali, "A Tight Linearization and an Algorithm for Zero-One Quadratic Programming Problems", Management Science 32, 1986).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Constraint:
    """``sum_i alone[i][a_i] + sum_(i, j) together[i, j][a_i][a_j] <= most`` for the candidates a that are chosen.

    Attributes
    ----------
    alone : sequence of sequence of float
        By choice and candidate.
    most : float
    together : mapping of (int, int) to sequence of sequence of float
        By two choices, the first the lower, and a candidate of each.
    """

    alone: Sequence[Sequence[float]]
    most: float
    together: Mapping[tuple[int, int], Sequence[Sequence[float]]] = field(default_factory=dict)

    def cost(self, picked: Sequence[int]) -> float:
        """The left side."""
        alone = sum(costs[a] for costs, a in zip(self.alone, picked, strict=True))
        return alone + sum(costs[picked[i]][picked[j]] for (i, j), costs in self.together.items())

    def is_kept(self, picked: Sequence[int]) -> bool:
        """Whether it is no more than `most`, but for the rounding of sums."""
        return self.cost(picked) <= self.most + 1e-12 * max(abs(self.most), 1.0)


def knapsack(losses: Sequence[Sequence[float]], limits: Sequence[Constraint]) -> list[int] | None:
    """The candidate of each choice; None where no candidates fit. What is found is within the limits by `Constraint.is_kept`.

    Parameters
    ----------
    losses : sequence of sequence of float
        By choice and candidate; finite.
    limits : sequence of Constraint

    Raises
    ------
    ImportError
        Without SciPy: ``pip install "qsim[search]"``.

    Examples
    --------
    >>> knapsack([[3.0, 1.0], [2.0, 1.0]], [Constraint([[4.0, 8.0], [4.0, 8.0]], most=12.0)])
    [1, 0]
    """
    beyond = [[loss - min(row) for loss in row] for row in losses]  # of the least that each can lose
    scale = max(map(max, beyond))
    found = _within(beyond, limits, scale)
    while found is not None and 0.0 < (total := sum(row[a] for row, a in zip(beyond, found, strict=True))) < 0.1 * scale:
        # what loses more than this by itself is out, and the solver's tolerance, which is absolute, becomes one of what is left
        scale, better = total, _within(beyond, limits, total)
        if better is None or better == found:
            break
        found = better
    return found


def _within(losses: Sequence[Sequence[float]], limits: Sequence[Constraint], scale: float) -> list[int] | None:
    """What the solver finds, less its tolerance: 1e-6 of the largest cost may let through what does not fit."""
    tightened = limits
    for _ in range(20):
        found = _solved(losses, tightened, scale)
        if found is None or all(limit.is_kept(found) for limit in limits):
            return found
        over = [max(limit.cost(found) - limit.most, 0.0) for limit in limits]
        tightened = [replace(limit, most=limit.most - 2 * excess) for limit, excess in zip(tightened, over, strict=True)]
    raise RuntimeError("QuantSim.search_bits: SciPy's milp stays above the budget by its tolerance; change the budget by 1 %")


def _solved(losses: Sequence[Sequence[float]], limits: Sequence[Constraint], scale: float) -> list[int] | None:
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise ImportError('QuantSim.search_bits solves with SciPy, which is not installed: pip install "qsim[search]"') from error
    first, count = [], 0
    for costs in losses:
        first.append(count)
        count += len(costs)
    binary = count
    pairs = sorted({pair for limit in limits for pair in limit.together})
    met: dict[tuple[int, int], int] = {}
    for i, j in pairs:
        met[i, j] = count
        count += len(losses[i]) * len(losses[j])

    rows: list[tuple[dict[int, float], float, float]] = []  # coefficients by variable, least, most
    for begin, costs in zip(first, losses, strict=True):
        rows.append((dict.fromkeys(range(begin, begin + len(costs)), 1.0), 1.0, 1.0))
    for (i, j), begin in met.items():
        a_count, b_count = len(losses[i]), len(losses[j])
        for a in range(a_count):
            rows.append(({first[i] + a: -1.0, **{begin + a * b_count + b: 1.0 for b in range(b_count)}}, 0.0, 0.0))
        for b in range(b_count):
            rows.append(({first[j] + b: -1.0, **{begin + a * b_count + b: 1.0 for a in range(a_count)}}, 0.0, 0.0))
    for limit in limits:
        coefficients = {begin + a: cost for begin, costs in zip(first, limit.alone, strict=True) for a, cost in enumerate(costs)}
        for (i, j), table in limit.together.items():
            for a, row in enumerate(table):
                coefficients |= {met[i, j] + a * len(row) + b: cost for b, cost in enumerate(row)}
        largest = max(map(abs, [*coefficients.values(), limit.most]), default=0.0) or 1.0  # the solver's tolerances are absolute
        rows.append(({at: cost / largest for at, cost in coefficients.items()}, -np.inf, limit.most / largest))

    objective, highest = np.zeros(count), np.ones(count)
    flat = np.array([loss for costs in losses for loss in costs])
    objective[:binary] = np.minimum(flat, scale) / (scale or 1.0)
    highest[:binary] = flat <= scale
    entries = [(r, at, value) for r, (coefficients, _, _) in enumerate(rows) for at, value in coefficients.items()]
    at_rows, at_columns, values = (list(column) for column in zip(*entries, strict=True))
    matrix = coo_array((values, (at_rows, at_columns)), shape=(len(rows), count))
    constraint = LinearConstraint(matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows])
    integrality = np.concatenate([np.ones(binary), np.zeros(count - binary)])
    solved: Any = milp(objective, integrality=integrality, bounds=Bounds(0, highest), constraints=constraint, options={"mip_rel_gap": 0.0})
    if solved.status == 2:
        return None
    if solved.x is None:
        raise RuntimeError(f"QuantSim.search_bits: SciPy's milp found no solution: {solved.message}")
    return [int(np.argmax(solved.x[begin : begin + len(costs)])) for begin, costs in zip(first, losses, strict=True)]
