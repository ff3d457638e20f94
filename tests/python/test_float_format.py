import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from qsim.float_format import FLOAT_FORMATS, round_to_format


def every_number(name):
    """All finite numbers of a format, ascending, as float64."""
    dtype = getattr(torch, name)
    patterns = torch.arange(2 ** FLOAT_FORMATS[name].bits)
    integer = torch.uint8 if dtype.itemsize == 1 else torch.int16
    numbers = patterns.to(integer).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def adversarial(name, dtype):
    """Every number of the format, every tie, the neighbours of both in `dtype`, and what overflows."""
    numbers = every_number(name)
    ties = (numbers[1:] + numbers[:-1]) / 2
    beyond = torch.tensor([1.0, 1.02, 1.04, 1.1, 2.0, 1e30]) * numbers[-1]
    specials = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-45, 5e-324])
    x = torch.cat([numbers, ties, beyond, -beyond, specials]).to(dtype)
    if dtype.itemsize < 4:
        return x
    return torch.cat([x, torch.nextafter(x, torch.full_like(x, math.inf)), torch.nextafter(x, torch.full_like(x, -math.inf))])


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(FLOAT_FORMATS, [torch.float32, torch.float16, torch.bfloat16])])
def test_equals_casting_to_the_format(name, dtype):
    """ml_dtypes' conversions from float32 are the oracle: bit for bit, the sign of zero included."""
    x = adversarial(name, dtype)
    with np.errstate(over="ignore"):
        cast = x.float().numpy().astype(name if name == "float16" else getattr(ml_dtypes, name))
    expected = torch.from_numpy(cast.astype(np.float32)).to(dtype)
    got = round_to_format(x, name, saturate=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    known = ~got.isnan()
    assert torch.equal(got.signbit()[known], expected.signbit()[known])


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_saturating_equals_clamping_first(name):
    x = adversarial(name, torch.float32)
    largest = FLOAT_FORMATS[name].largest
    expected = x.clamp(-largest, largest).to(getattr(torch, name)).float()
    torch.testing.assert_close(round_to_format(x, name, saturate=True), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_float64_is_rounded_once(name):
    """Brute force: the nearest number of the format, the even one at a tie. Rounding through float32 would move ties."""
    numbers = every_number(name)
    x = adversarial(name, torch.float64)
    x = x[x.abs() <= numbers[-1]]
    above = torch.searchsorted(numbers, x).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = numbers[above] - x, x - numbers[below]
    even = below - len(numbers) // 2  # index from zero: neighbours alternate between even and odd mantissas
    take_below = (to_below < to_above) | ((to_below == to_above) & (even % 2 == 0))
    assert torch.equal(round_to_format(x, name), torch.where(take_below, numbers[below], numbers[above]))


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_saturation(name):
    largest = FLOAT_FORMATS[name].largest
    x = torch.tensor([math.inf, -math.inf, largest, math.nan, 1.0])
    assert round_to_format(x, name, saturate=True).nan_to_num(7).tolist() == [largest, -largest, largest, 7, 1]
    by_default = round_to_format(x, name)
    assert by_default[0].isfinite() == name.startswith("float8")


@pytest.mark.parametrize(("name", "saturate"), [*itertools.product(FLOAT_FORMATS, [False, True])])
def test_gradient_passes_where_the_result_is_in_range(name, saturate):
    largest = FLOAT_FORMATS[name].largest
    x = torch.tensor([0.3, -0.0, largest, -math.inf, math.nan], requires_grad=True)
    weights = torch.arange(1.0, 6.0)
    (round_to_format(x, name, saturate=saturate).nan_to_num() * weights).nansum().backward()
    inside = torch.tensor([True, True, True, False, False])
    assert torch.equal(x.grad[inside], weights[inside])
    assert x.grad[~inside].tolist() == [0, 0]


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_any_shape_and_strides(name):
    x = torch.randn(6, 5, 4)
    for view in (x.transpose(0, 2), x[::2, 1:, :3], x.to(memory_format=torch.contiguous_format).permute(2, 0, 1), x[:0], x[0, 0, 0]):
        assert torch.equal(round_to_format(view, name), round_to_format(view.contiguous(), name))


def test_compiles_without_graph_breaks():
    x = torch.randn(100, requires_grad=True)
    compiled = torch.compile(lambda x: round_to_format(x, "float8_e4m3fn"), fullgraph=True)
    y = compiled(x)
    assert torch.equal(y, round_to_format(x, "float8_e4m3fn"))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(100))


def test_unknown_formats_are_named():
    with pytest.raises(ValueError, match=r"'float4'.*expected one of float16"):
        round_to_format(torch.ones(1), "float4")
