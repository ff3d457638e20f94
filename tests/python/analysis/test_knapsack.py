"""The knapsack beside brute force."""

import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsim.analysis.knapsack import Constraint, knapsack

amounts = st.floats(0, 1, allow_subnormal=False).map(lambda value: round(value, 3))


@st.composite
def problems(draw):
    """Losses, and limits on what choices cost alone and together, some of which nothing meets."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    losses = [[draw(amounts) * 10.0 ** -draw(st.integers(0, 9)) for _ in range(n)] for n in counts]
    limits = []
    for _ in range(draw(st.integers(0, 2))):
        alone = [draw(st.lists(amounts, min_size=n, max_size=n)) for n in counts]
        pairs = [(i, j) for i in range(len(counts)) for j in range(i + 1, len(counts))]
        chosen = draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)) if pairs else []
        together = {(i, j): [draw(st.lists(amounts, min_size=counts[j], max_size=counts[j])) for _ in range(counts[i])] for i, j in chosen}
        limits.append(Constraint(alone, draw(st.floats(0, 1)) * len(counts), together))
    return losses, limits


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_assignment_within_the_limits_loses_less(problem):
    losses, limits = problem
    every = list(itertools.product(*(range(len(row)) for row in losses)))
    kept = [picked for picked in every if all(limit.is_kept(picked) for limit in limits)]
    found = knapsack(losses, limits)
    if not kept:
        assert found is None
        return

    def lost(picked):
        return sum(row[a] for row, a in zip(losses, picked, strict=True))

    assert tuple(found) in kept
    least = sum(map(min, losses))
    assert lost(found) - least == pytest.approx(min(map(lost, kept)) - least, rel=1e-5, abs=1e-15)


def test_costs_of_bytes_are_kept_to_the_byte():
    sizes = [[10**9 + i, 2 * 10**9 + 7 * i] for i in range(5)]
    most = sum(row[0] for row in sizes) + 2 * 10**9  # two of the dearer ones take a few bytes more
    found = knapsack([[1.0, 0.0]] * 5, [Constraint(sizes, most)])
    assert sum(row[a] for row, a in zip(sizes, found, strict=True)) <= most
    assert sum(found) == 2 - (sizes[0][1] - sizes[0][0] + sizes[1][1] - sizes[1][0] > 2 * 10**9)


def test_without_scipy_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"pip install \"qsim\[search\]\""):
        knapsack([[1.0, 0.0]], [])
