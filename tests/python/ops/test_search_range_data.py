"""The search on the data against its plain-torch twin: layouts, dtypes, values that are not finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qsim
from qsim.numbers.range_methods import SEARCHES
from qsim.reference.search_range_data import data_cost

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
GRIDS = [(-128, 127), (-127, 127), (0, 255), (-8, 7), (-2, 1)]


@given(
    st.integers(0, 2**32),
    st.integers(1, 2500),
    st.sampled_from(DTYPES),
    st.sampled_from(GRIDS),
    st.booleans(),
    st.sampled_from(["minmax", "percentile", "mse", "tf_enhanced"]),
    st.booleans(),
)
@settings(max_examples=80)
def test_matches_reference(seed, n, dtype, grid, symmetric, method, specials):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, generator=g, dtype=torch.float64) ** 3).to(dtype)
    if specials:
        x[torch.rand(n, generator=g) < 0.1] = math.nan
        x[torch.rand(n, generator=g) < 0.05] = math.inf
        x[torch.rand(n, generator=g) < 0.05] = -math.inf
    got = qsim.ops.search_range_data(x, *grid, symmetric=symmetric, method=method, percentile=99.0)
    expected = qsim.reference.search_range_data(x, *grid, symmetric=symmetric, method=method, percentile=99.0)
    assert got[0].dtype == expected[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if method in ("minmax", "percentile") or not x.isfinite().any():
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        return
    values, gamma = x[x.isfinite()], 3.0 if method == "tf_enhanced" else 1.0
    encodings = [qsim.ops.choose_qparams(*r, *grid, symmetric=symmetric) for r in (got, expected)]
    scales, zero_points = (torch.stack(part) for part in zip(*encodings, strict=True))
    # With gamma the cost jumps where a value rounds off the grid: float32 may be on the other side of a jump than float64.
    near = torch.tensor([1 - 1e-6, 1, 1 + 1e-6])
    costs = [data_cost(values, scales[i] * near, zero_points[i].expand(3), *grid, gamma=gamma) for i in range(2)]
    cost, least = float(costs[0].min()), float(costs[1].max())
    # float32 places a value within 2^-23 * 255 steps
    assert cost <= least * (1 + 1e-4) + 1e-8 * n * scales[1].double() ** 2


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse", "tf_enhanced"])
@pytest.mark.parametrize(("axis", "block_size"), [(None, None), (0, None), (1, None), (-1, None), (0, 2), (1, 3), (-1, 64)])
def test_layouts(method, axis, block_size):
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(3))
    got = qsim.ops.search_range_data(x, -8, 7, axis=axis, block_size=block_size, method=method)
    expected = qsim.reference.search_range_data(x, -8, 7, axis=axis, block_size=block_size, method=method)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    again = qsim.ops.search_range_data(strided, -8, 7, axis=axis, block_size=block_size, method=method)
    assert torch.equal(torch.stack(got), torch.stack(again))


@pytest.mark.parametrize("symmetric", [False, True])
def test_entropy_matches_reference(symmetric):
    x = torch.randn(2, 3000, generator=torch.Generator().manual_seed(5)) ** 3
    got = qsim.ops.search_range_data(x, -128, 127, axis=0, symmetric=symmetric, method="entropy")
    expected = qsim.reference.search_range_data(x, -128, 127, axis=0, symmetric=symmetric, method="entropy")
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", SEARCHES)
def test_channels_without_a_finite_value(method, dtype):
    x = torch.randn(3, 50).to(dtype)
    x[1] = math.nan
    x[1, ::2] = math.inf
    low, high = qsim.ops.search_range_data(x, -128, 127, axis=0, method=method)
    assert low[1] == math.inf
    assert high[1] == -math.inf
    assert low[[0, 2]].isfinite().all()
    assert high[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "axis", "block_size", "expected"),
    [((0,), None, None, ()), ((3, 0), 0, None, (3,)), ((0, 3), 0, 2, (0, 3)), ((3, 0), 0, 2, (2, 0))],
)
def test_empty(shape, axis, block_size, expected):
    low, high = qsim.ops.search_range_data(torch.empty(shape), -128, 127, axis=axis, block_size=block_size)
    assert low.shape == high.shape == expected
    assert (low == math.inf).all()
    assert (high == -math.inf).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_integers_that_fit_lose_nothing(symmetric):
    x = torch.randint(-60, 100, (4000,), generator=torch.Generator().manual_seed(0)).float() / 8
    chosen = qsim.ops.search_range_data(x, -128, 127, symmetric=symmetric)
    assert qsim.ops.choose_qparams(*chosen, -128, 127, symmetric=symmetric)[0] == 1 / 8


def test_one_huge_value_and_widths_beyond_float32():
    x = torch.cat([torch.randn(1000), torch.tensor([3e38, -3e38])])
    low, high = qsim.ops.search_range_data(x, -128, 127)
    assert low.isfinite()
    assert high.isfinite()
    assert high.double() - low.double() > 5e38


def test_does_not_depend_on_the_number_of_threads():
    x = torch.randn(64, 300)
    threads = torch.get_num_threads()
    try:
        found = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            found.append(torch.stack(qsim.ops.search_range_data(x, -8, 7, axis=0)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("options", [{}, {"axis": 1}, {"axis": 1, "block_size": 4}])
def test_opcheck(options):
    torch.library.opcheck(torch.ops.qsim.search_range_data.default, (torch.randn(3, 10), -8, 7), options)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), {}, "float16"),
        (torch.zeros(3), {"block_size": 2}, "needs the axis"),
        (torch.zeros(3), {"axis": 0, "block_size": 0}, "at least 1"),
        (torch.zeros(()), {"axis": 0}, "no dimensions"),
        (torch.zeros(3), {"method": "best"}, "expected minmax"),
    ],
)
def test_errors_say_what_was_expected(x, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        qsim.ops.search_range_data(x, -128, 127, **options)
