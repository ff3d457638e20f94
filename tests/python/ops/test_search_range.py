"""The search on a sketch against its plain-torch twin, the quantizer applied to points, and its own properties."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output

import qsim
from qsim.numbers.range_methods import SEARCHES
from qsim.reference.search_range import Distribution, candidate_ranges
from qsim.reference.search_range_data import data_cost

GRIDS = [(-128, 127), (-127, 127), (0, 255), (-8, 7), (0, 15), (-2, 1), (-32768, 32767)]
METHODS = [method for method in SEARCHES if method != "entropy"]  # which is slow in the twin: a test of its own
ODD_VALUES = [0.0, -0.0, 1e-45, -1e-40, 1.17e-38, 1.0, -1.0, 0.1, 127.0, -128.0, 65504.0, 3e38, -3e38, 3.4028235e38, -3.4028235e38]


def sketch_of(x):
    return torch.bincount((x.view(torch.int32) >> 18) & 16383, minlength=16384)


def seen(x):
    return x.min(), x.max(), sketch_of(x)


def low_bits_of(x):
    observer = qsim.Observer()
    observer(x)
    return observer.low_bits


def cost_of(state, chosen, grid, symmetric, gamma, low_bits):
    scale, zero_point = qsim.reference.choose_qparams(*chosen, *grid, symmetric=symmetric)
    covering, _ = qsim.reference.choose_qparams(state[0].double(), state[1].double(), *grid, symmetric=symmetric)
    return Distribution.from_sketch(*state, covering, low_bits).cost(scale, zero_point, *grid, gamma=gamma).item(), scale.item()


@st.composite
def samples(draw):
    kind = draw(st.sampled_from(["normal", "integers", "one sign", "far apart", "odd", "constant", "bfloat16", "float16"]))
    n = draw(st.integers(1, 3000))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(n, generator=g) * 10.0 ** draw(st.integers(-30, 30))
    if kind == "integers":
        return torch.randint(-draw(st.integers(0, 300)), draw(st.integers(1, 300)), (n,), generator=g).float()
    if kind == "one sign":
        return x.abs() * draw(st.sampled_from([-1, 1]))
    if kind == "far apart":
        x[0] *= 1e6
    if kind == "odd":
        return torch.tensor(draw(st.lists(st.sampled_from(ODD_VALUES), min_size=1, max_size=60)))
    if kind in ("bfloat16", "float16"):
        return x.clamp(-1e3, 1e3).to(getattr(torch, kind)).float()
    return x[:1].expand(n).contiguous() if kind == "constant" else x


@example(torch.tensor([0.0, 3.4028235e38, 3.4028235e38]), GRIDS[0], False, "mse", 50.0)  # a bin that ends at Inf
@example(torch.tensor([1e-45]), GRIDS[0], False, "percentile", 50.0)  # the smallest subnormals share the bin of zero
@given(samples(), st.sampled_from(GRIDS), st.booleans(), st.sampled_from(METHODS), st.sampled_from([50.0, 99.0, 99.99, 100.0]))
@settings(max_examples=150)
def test_matches_reference(x, grid, symmetric, method, percentile):
    state, low_bits = seen(x), low_bits_of(x)
    options = {"symmetric": symmetric, "method": method, "percentile": percentile, "low_bits": low_bits}
    got = qsim.ops.search_range(*state, *grid, **options)
    expected = qsim.reference.search_range(*state, *grid, **options)
    if method in ("minmax", "percentile"):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        return
    gamma = 3.0 if method == "tf_enhanced" else 1.0
    cost, _ = cost_of(state, got, grid, symmetric, gamma, low_bits)
    least, scale = cost_of(state, expected, grid, symmetric, gamma, low_bits)
    assert cost <= least * (1 + 1e-9) + 2**-29 * len(x) * scale**2 / 12  # what cancels in a bin between neighbouring floats


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 8])
def test_entropy_matches_reference(bits, symmetric):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(bits)) ** 3
    grid = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for data in (x, x.clamp(min=0)):
        got = qsim.ops.search_range(*seen(data), *grid, symmetric=symmetric, method="entropy")
        expected = qsim.reference.search_range(*seen(data), *grid, symmetric=symmetric, method="entropy")
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("gamma", [1.0, 3.0])
@pytest.mark.parametrize("grid", [(-128, 127), (0, 15), (-2, 1)])
def test_cost_is_that_of_quantizing_points_of_the_distribution(grid, gamma):
    # The twin's closed form against the quantizer on 2000 points spread over each bin.
    x = torch.randn(300, generator=torch.Generator().manual_seed(1))
    seen_by_sketch = Distribution.from_sketch(*seen(x), torch.tensor(0.0))
    lows, highs = candidate_ranges(x.min(), x.max(), *grid)
    scale, zero_point = qsim.reference.choose_qparams(lows[::20], highs[::20], *grid)
    closed = seen_by_sketch.cost(scale, zero_point, *grid, gamma=gamma)
    part = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    spread = torch.zeros_like(closed)
    for start, end, mass in zip(seen_by_sketch.starts, seen_by_sketch.ends, seen_by_sketch.mass, strict=True):
        spread += data_cost(start + (end - start) * part, scale, zero_point, *grid, gamma=gamma) * mass / 2000
    for point, mass in zip(seen_by_sketch.points, seen_by_sketch.point_mass, strict=True):
        spread += data_cost(point[None], scale, zero_point, *grid, gamma=gamma) * mass
    torch.testing.assert_close(closed, spread, rtol=1e-3, atol=0)


@given(samples(), st.sampled_from(GRIDS), st.booleans(), st.sampled_from(SEARCHES))
@settings(max_examples=60)
def test_range_leads_to_an_encoding(x, grid, symmetric, method):
    low, high = qsim.ops.search_range(*seen(x), *grid, symmetric=symmetric, method=method)
    assert low <= high
    assert low.isfinite()
    assert high.isfinite()
    assert qsim.ops.choose_qparams(low, high, *grid, symmetric=symmetric)[0] > 0


@given(samples(), st.sampled_from(METHODS))
@settings(max_examples=60)
def test_mirrored_data_mirror_the_range(x, method):
    # A grid whose middle is exact; ties between mirrored asymmetric candidates are broken by order, hence symmetric.
    low, high = qsim.ops.search_range(*seen(x), -127, 127, symmetric=True, method=method)
    mirrored = qsim.ops.search_range(*seen(-x), -127, 127, symmetric=True, method=method)
    torch.testing.assert_close(mirrored, (-high, -low), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["mse", "tf_enhanced"])
@pytest.mark.parametrize("on_data", [False, True])
@pytest.mark.parametrize(
    ("unit", "steps", "symmetric", "scale"), [(1 / 16, 16, False, 1 / 128), (0.25, 7, False, 1 / 128), (0.5, 90, True, 0.5)]
)
def test_integers_times_a_power_of_two_are_exact_on_the_finest_grid_that_holds_them(method, on_data, unit, steps, symmetric, scale):
    """Data sees no difference between these scales; what lies between its values does."""
    x = torch.randint(-steps if symmetric else 0, steps + 1, (20000,), generator=torch.Generator().manual_seed(0)) * float(unit)
    options = {"symmetric": symmetric, "method": method}
    found = qsim.ops.search_range_data(x, -128, 127, **options) if on_data else qsim.ops.search_range(*seen(x), -128, 127, **options)
    chosen, zero_point = qsim.ops.choose_qparams(*found, -128, 127, symmetric=symmetric)
    assert chosen.item() == scale
    assert torch.equal(qsim.ops.fake_quantize(x, chosen, zero_point, -128, 127), x)


def test_percentile_keeps_the_middle():
    x = torch.rand(100000, generator=torch.Generator().manual_seed(0))
    low, high = qsim.ops.search_range(*seen(x), 0, 255, method="percentile", percentile=90.0)
    assert low.item() == pytest.approx(0.05, abs=2e-3)
    assert high.item() == pytest.approx(0.95, abs=2e-3)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("grid", [(-8, 7), (-128, 127)])
@pytest.mark.parametrize("spread", [3, 20, 150, 1000, 20000])
def test_integers_of_any_width_are_judged_as_what_they_are(spread, grid, symmetric):
    # From the sketch against the search on the values: mass on the multiples or evenly spread makes no difference.
    x = (torch.randn(200_000, generator=torch.Generator().manual_seed(spread)) * spread).round()
    costs = []
    for chosen in (
        qsim.ops.search_range(*seen(x), *grid, symmetric=symmetric, method="mse"),
        qsim.ops.search_range_data(x, *grid, symmetric=symmetric, method="mse"),
    ):
        scale, zero_point = qsim.ops.choose_qparams(*chosen, *grid, symmetric=symmetric)
        costs.append(data_cost(x, scale[None], zero_point[None], *grid).item())
    assert costs[0] <= costs[1] * 10**0.006 + 1e-6 * len(x)  # 0.06 dB


@pytest.mark.parametrize("symmetric", [False, True])
def test_integers_that_fit_lose_nothing(symmetric):
    x = torch.randint(-60, 100, (4000,), generator=torch.Generator().manual_seed(0)).float()
    chosen = qsim.ops.search_range(*seen(x), -128, 127, symmetric=symmetric)
    assert qsim.ops.choose_qparams(*chosen, -128, 127, symmetric=symmetric)[0] == 1


def test_batch_is_each_alone():
    states = [seen(torch.randn(1000, generator=torch.Generator().manual_seed(i)) * 3**i) for i in range(5)]
    states.append(seen(torch.randn(1000).bfloat16().float()))
    bits = torch.tensor([0x3FFFF] * 5 + [0x30000, 0], dtype=torch.int32)
    states.append((torch.tensor(math.inf), torch.tensor(-math.inf), torch.zeros(16384, dtype=torch.int64)))
    low, high, sketch = (torch.stack(part) for part in zip(*states, strict=True))
    for method in SEARCHES:
        got = qsim.ops.search_range(low, high, sketch, -128, 127, method=method, low_bits=bits)
        alone = [qsim.ops.search_range(*s, -128, 127, method=method, low_bits=b) for s, b in zip(states, bits, strict=True)]
        assert torch.equal(got[0], torch.stack([a for a, _ in alone]))
        assert torch.equal(got[1], torch.stack([b for _, b in alone]))


def test_nothing_seen():
    empty = torch.full((2,), math.inf), torch.full((2,), -math.inf), torch.zeros(2, 16384, dtype=torch.int64)
    for method in SEARCHES:
        low, high = qsim.ops.search_range(*empty, -128, 127, method=method)
        assert torch.equal(low, empty[0])
        assert torch.equal(high, empty[1])
    assert qsim.ops.search_range(*(t[:0] for t in empty), -128, 127)[0].shape == (0,)


def test_widths_beyond_float32():
    x = torch.tensor([-3e38, 3e38]).repeat(50)
    for symmetric in (False, True):
        chosen = qsim.ops.search_range(*seen(x), -128, 127, symmetric=symmetric)
        scale, zero_point = qsim.ops.choose_qparams(*chosen, -128, 127, symmetric=symmetric)
        assert scale.double() * 255 == pytest.approx(6e38, rel=0.02)
        assert zero_point == 0


@pytest.mark.parametrize("method", ["tf_enhanced", "entropy"])
def test_opcheck(method):
    x = torch.randn(2, 100)
    sketch = torch.stack([sketch_of(row.contiguous()) for row in x])
    args = (x.amin(1), x.amax(1), sketch, -128, 127)
    for options in ({}, {"low_bits": torch.zeros(2, dtype=torch.int32)}):
        torch.library.opcheck(torch.ops.qsim.search_range.default, args, {"method": method, **options})


def test_strided_state():
    x = torch.randn(4, 500)
    sketch = torch.stack([sketch_of(row.contiguous()) for row in x])
    low, high = x.amin(1), x.amax(1)
    strided = torch.stack([low, high], 1)
    got = qsim.ops.search_range(strided[:, 0], strided[:, 1], sketch.t().contiguous().t(), 0, 15)
    assert torch.equal(torch.stack(got), torch.stack(qsim.ops.search_range(low, high, sketch, 0, 15)))


SAME_BITS = """
import torch, qsim
from qsim.numbers.range_methods import SEARCHES
g = torch.Generator().manual_seed(0)
data = [torch.randn(5000, generator=g) ** 3, torch.randint(-99, 99, (3000,), generator=g).float(), torch.rand(7, generator=g) * 3e38]
for x in data:
    sketch = torch.bincount((x.view(torch.int32) >> 18) & 16383, minlength=16384)
    for method in SEARCHES:
        for symmetric in (False, True):
            for grid in ((-128, 127), (-8, 7), (0, 65535)):
                options = {"symmetric": symmetric, "method": method}
                print([v.item().hex() for v in qsim.ops.search_range(x.min(), x.max(), sketch, *grid, **options)])
                low_bits = torch.tensor(0x3E000, dtype=torch.int32)
                print([v.item().hex() for v in qsim.ops.search_range(x.min(), x.max(), sketch, *grid, **options, low_bits=low_bits)])
                print([v.item().hex() for v in qsim.ops.search_range_data(x, *grid, **options)])
                for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                    blocks = qsim.ops.search_range_data(x[:100].to(dtype), *grid, axis=0, block_size=33, **options)
                    print([v.hex() for ends in blocks for v in ends.tolist()])
"""


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_gives_the_same_bits(level):
    assert_same_output(level, SAME_BITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lowest": torch.zeros(2)}, "expected both"),
        ({"sketch": torch.zeros(100, dtype=torch.int64)}, "16384 bins"),
        ({"sketch": torch.zeros(16384)}, "int64"),
        ({"method": "best"}, "tf_enhanced or entropy"),
        ({"percentile": 0.0}, "at most 100"),
        ({"gamma": math.nan}, "gamma"),
        ({"quant_max": -128}, "quant_min < quant_max"),
        ({"low_bits": torch.tensor(0)}, "low_bits is Long; expected int32"),
        ({"low_bits": torch.zeros(1, dtype=torch.int32)}, r"low_bits has shape \[1\].*expected lowest's shape \[\]"),
    ],
)
def test_errors_say_what_was_expected(change, message):
    arguments = {"lowest": torch.tensor(0.0), "highest": torch.tensor(1.0), "sketch": torch.zeros(16384, dtype=torch.int64)}
    arguments |= {"quant_min": -128, "quant_max": 127} | change
    with pytest.raises((ValueError, TypeError), match=message):
        qsim.ops.search_range(**arguments)


@pytest.mark.parametrize("twin", ["search_range", "search_range_data"])
def test_a_twin_has_nothing_for_methods_that_it_does_not_know(twin):
    """What it would choose for them would be taken for right."""
    values = torch.tensor([0.0, 0.3, 1.0])
    sketch = torch.bincount((values.view(torch.int32) >> 18) & 16383, minlength=16384)
    given = (values.min(), values.max(), sketch) if twin == "search_range" else (values,)
    with pytest.raises(ValueError, match="method='best'; expected minmax"):
        getattr(qsim.reference, twin)(*given, -128, 127, method="best")
