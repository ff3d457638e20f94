import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qsim
from qsim.quantizers.sketch import Distribution


def observed(x):
    observer = qsim.Observer()
    observer(x)
    return observer


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=2, max_size=60), st.integers(1, 40))
def test_every_element_is_counted_once(values, bins):
    x = torch.tensor(values)
    if x.min() == x.max():
        return
    edges, counts = observed(x).histogram(bins)
    assert counts.sum().item() == pytest.approx(len(values))
    assert (counts >= 0).all()
    assert edges[0] == x.min()
    assert edges[-1] == x.max()


@pytest.mark.parametrize("shift", [0.0, 4.0, -4.0])
def test_close_to_the_histogram_of_the_data(shift):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) + shift
    edges, counts = observed(x).histogram(50)
    exact, _ = torch.histogram(x.double(), edges)
    assert (counts - exact).abs().sum() < 0.03 * len(x)  # a bin of the sketch that an edge cuts is taken as evenly filled


def test_zeros_stay_together():
    edges, counts = observed(torch.tensor([-1.0, 0.0, 0.0, -0.0, 1.0])).histogram(4)
    assert counts[torch.searchsorted(edges, torch.tensor(0.0, dtype=torch.float64), right=True) - 1] >= 3


def test_nothing_to_show_is_an_error():
    for x in (torch.empty(0), torch.full((3,), torch.nan), torch.ones(5)):
        with pytest.raises(ValueError, match="histogram"):
            observed(x).histogram(10)


normal = st.floats(2.0**-120, 2.0**100, width=32)  # subnormal numbers share the bin of 0
values = st.lists(st.just(0.0) | normal | normal.map(lambda value: -value), min_size=1, max_size=60)


@given(values, normal.map(lambda value: -value), normal)
def test_outside_is_right_within_the_bins_that_are_cut(values, low, high):
    x = torch.tensor(values, dtype=torch.float64)
    observer = observed(x.float())
    found = Distribution.of(observer.sketch, observer.lowest, observer.highest).outside(low, high)
    exact = ((x < low) | (x > high)).sum().item()
    near = sum(end * (1 - 1 / 32) <= v <= end * (1 + 1 / 32) for v in x.abs().tolist() for end in (-low, high))
    assert abs(found - exact) <= near + 1e-9
    if low <= min(values) and max(values) <= high:
        assert found == 0


def test_outside_counts_no_zeros_and_both_sides():
    observer = observed(torch.tensor([-8.0, -1.0, 0.0, -0.0, 1.0, 3.0, 8.0, 8.0, torch.nan, torch.inf]))
    distribution = Distribution.of(observer.sketch, observer.lowest, observer.highest)
    assert distribution.outside(-4, 4) == 3
    assert distribution.outside(0, 4) == 4
    assert distribution.outside(-8, 8) == 0
    assert len(distribution.bins) == 6
