"""What the chosen encoding loses against the best of the candidate grid, judged on the raw data by quantizing it.

From a sketch the judgement is blind to where in a bin (1/32 of the magnitude) a value lies: with few values, luck decides
between near equals, so it is asked of 100,000; the search on the data must be right with any number.
"""

import math

import pytest
import torch

import qsim
from qsim.reference.search_range import candidate_ranges

BAR = 0.06  # dB, in the method's own cost


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # short operations: threads would only wait for each other
    yield
    torch.set_num_threads(threads)


def draw(name, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    normal, uniform = torch.randn(n, generator=g), torch.rand(n, generator=g)
    match name:
        case "normal":
            return normal
        case "laplace":
            return torch.where(normal > 0, 1, -1) * -torch.log1p(-uniform)
        case "student t":
            return normal / (torch.randn(3, n, generator=g).square().mean(0)).sqrt()
        case "relu":
            return normal.relu()
        case "gelu":
            return torch.nn.functional.gelu(1.5 * normal)
        case "one outlier":
            return torch.cat([normal[1:], torch.tensor([100.0])])
        case "lognormal":
            return normal.exp()
        case "integers":
            return torch.randint(-128, 128, (n,), generator=g).float()
        case "rounded normal":
            return (10 * normal).round()
        case "counts":
            return torch.poisson(torch.full((n,), 5.0), generator=g)
        case "bimodal":
            return torch.where(uniform < 0.5, 0.3 * normal - 2, 0.2 * normal + 3)
        case "uniform":
            return 2 * uniform - 1
        case "half zeros":
            return torch.where(uniform < 0.5, 0, normal)
        case "constant":
            return torch.full((n,), 1.7)
    raise AssertionError(name)


NAMES = ["normal", "laplace", "student t", "relu", "gelu", "one outlier", "lognormal", "integers", "rounded normal", "counts"]
NAMES += ["bimodal", "uniform", "half zeros", "constant"]


def raw_costs(x, scale, zero_point, grid):
    """Squared error of values that round to a number of the grid, and of the others, by the quantizer's formula in float32."""
    s, z = scale.item(), float(zero_point)
    nearest = (x / s).round_().add_(z)
    inside = (nearest >= grid[0]).logical_and_(nearest <= grid[1])
    error = nearest.clamp_(*grid).sub_(z).mul_(s).sub_(x).square_()
    total = error.sum(dtype=torch.float64).item()
    saturated = total - error.mul_(inside).sum(dtype=torch.float64).item()
    return total - saturated, saturated


def regrets(x, grid, symmetric, search):
    """Decibels lost by each method's choice against the best candidate."""
    lows, highs = candidate_ranges(x.min(), x.max(), *grid, symmetric=symmetric)
    encodings = torch.stack(qsim.ops.choose_qparams(lows, highs, *grid, symmetric=symmetric), 1).double().unique(dim=0)
    costs = [raw_costs(x, *encoding, grid) for encoding in encodings]
    for method, gamma in (("mse", 1.0), ("tf_enhanced", 3.0)):
        least = min(rounding + gamma * saturation for rounding, saturation in costs)
        rounding, saturation = raw_costs(x, *qsim.ops.choose_qparams(*search(method), *grid, symmetric=symmetric), grid)
        floor = 1e-12 * len(x) * x.abs().max().item() ** 2 / grid[1] ** 2  # what rounding the scale to float32 costs
        yield 10 * math.log10((rounding + gamma * saturation + floor) / (least + floor))


def search_of_what_was_observed(x, grid, symmetric):
    observer = qsim.Observer()
    observer(x)

    def search(method):
        state = observer.lowest, observer.highest, observer.sketch
        return qsim.ops.search_range(*state, *grid, symmetric=symmetric, method=method, low_bits=observer.low_bits)

    return search


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("grid", [(-8, 7), (-128, 127)])
@pytest.mark.parametrize("name", NAMES)
def test_search_on_the_sketch(name, grid, symmetric):
    x = draw(name, 100_000)
    assert max(regrets(x, grid, symmetric, search_of_what_was_observed(x, grid, symmetric))) <= BAR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_values_on_a_lattice_finer_than_the_bins(bits, symmetric, dtype):
    """Bounded data show it most: the step that covers everything is then a simple fraction of the lattice (16 bits lost 5 dB)."""
    grid = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for name in ("uniform", "normal", "gelu", "lognormal"):
        x = draw(name, 50_000).to(dtype).float()
        assert max(regrets(x, grid, symmetric, search_of_what_was_observed(x, grid, symmetric))) <= BAR


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("grid", [(-8, 7), (-128, 127), (0, 255)])
@pytest.mark.parametrize("name", NAMES)
def test_search_on_the_data(name, grid, symmetric):
    for n in (100, 3001):
        x = draw(name, n, seed=n)

        def search(method, x=x):
            return qsim.ops.search_range_data(x, *grid, symmetric=symmetric, method=method)

        assert max(regrets(x, grid, symmetric, search)) <= 1e-3


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("method", ["mse", "tf_enhanced"])
@pytest.mark.parametrize("n", [8, 16, 64, 128, 224])
def test_coordinates_are_taken_for_what_they_are(n, method, bits):
    """linspace(-1, 1, n): each value lies just beyond a multiple of a power of two, at the beginning of its bin, and is none."""
    x = torch.linspace(-1, 1, n).repeat(max(1, 512 // n))
    errors = {}
    for each in (method, "minmax"):
        quantizer = qsim.Quantizer(qsim.TensorSpec(bits=bits, symmetric=False, signed=True, method=each))
        quantizer.observe(x)
        quantizer.compute_encoding()
        errors[each] = (quantizer(x) - x).square().sum().item()
    assert errors[method] <= 1.3 * errors["minmax"]
