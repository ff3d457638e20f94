"""Many tensors in one search: each as alone, whatever the others are."""

import math

import pytest
import torch

import qsim
from qsim import ops, reference
from qsim.numbers.range_methods import SEARCHES


def mixed_weights(dtype=torch.float32):
    """Weights of several kinds, and how each is searched."""
    g = torch.Generator().manual_seed(0)
    shapes = [(8, 3, 3, 3), (5, 40), (16, 7), (6, 33), (1,), (), (0, 4), (700,)]
    weights = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    return weights, {
        "quant_min": [-128, -8, 0, -127, -8, -128, -8, -32768],
        "quant_max": [127, 7, 15, 127, 7, 127, 7, 32767],
        "axis": [0, 1, 1, -1, None, None, 0, None],
        "block_size": [None, None, 4, 32, None, None, None, None],
        "symmetric": [True, False, False, True, True, False, True, True],
    }


def assert_each_as_alone(weights, options, **common):
    lows, highs = ops.search_range_weights(weights, **options, **common)
    for i, weight in enumerate(weights):
        alone = {name: values[i] for name, values in options.items()}
        low, high = ops.search_range_data(weight, alone.pop("quant_min"), alone.pop("quant_max"), **alone, **common)
        assert lows[i].dtype == low.dtype
        assert torch.equal(lows[i], low)
        assert torch.equal(highs[i], high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", SEARCHES)
def test_each_as_alone(method, dtype):
    assert_each_as_alone(*mixed_weights(dtype), method=method)


def test_mixed_dtypes_strides_and_values_that_are_not_finite():
    weights, options = mixed_weights()
    weights[0] = weights[0].to(memory_format=torch.channels_last).half()
    weights[1] = weights[1].double().t().contiguous().t()
    weights[2][3] = math.nan
    weights[3][0, :5] = math.inf
    assert_each_as_alone(weights, options)


@pytest.mark.parametrize("method", ["minmax", "mse", "percentile"])
def test_matches_reference(method):
    weights, options = mixed_weights()
    got = ops.search_range_weights(weights, **options, method=method)
    expected = reference.search_range_weights(weights, **options, method=method)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_one_option_for_all():
    weights = [torch.randn(4, 10), torch.randn(2, 3, 3)]
    got = ops.search_range_weights(weights, -8, 7, axis=0, symmetric=True)
    assert [low.shape for low in got[0]] == [(4,), (2,)]
    assert torch.equal(got[1][1], ops.search_range_data(weights[1], -8, 7, axis=0, symmetric=True)[1])


def test_no_weights():
    assert ops.search_range_weights([], -8, 7) == ([], [])


def test_does_not_depend_on_the_number_of_threads():
    weights = [torch.randn(n, 300) for n in (1, 64, 3, 40)] + [torch.randn(70_000)]
    threads = torch.get_num_threads()
    try:
        found = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            found.append(ops.search_range_weights(weights, -8, 7, axis=0))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_block_longer_than_any_row():
    x = torch.randn(3, 20)
    low, _ = ops.search_range_data(x, -8, 7, axis=1, block_size=2**62)
    assert torch.equal(low[:, 0], ops.search_range_data(x, -8, 7, axis=0)[0])


def test_opcheck():
    weights, options = mixed_weights()
    args = (weights, options.pop("quant_min"), options.pop("quant_max"))
    torch.library.opcheck(torch.ops.qsim.search_range_weights.default, args, options)


def test_compiles():
    weights, options = mixed_weights()

    def search(weights):
        return ops.search_range_weights(weights, **options)

    compiled = torch.compile(search, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(weights), search(weights), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_min": [-8]}, "1 quant_min"),
        ({"axis": [0, 3]}, "out of range"),
        ({"block_size": [2, None]}, "needs the axis"),
        ({"quant_max": [7, -9]}, "quant_min < quant_max"),
        ({"method": "best"}, "expected minmax"),
    ],
)
def test_errors_say_what_was_expected(change, message):
    with pytest.raises((ValueError, IndexError), match=message):
        ops.search_range_weights(**{"weights": [torch.zeros(3), torch.zeros(2)], "quant_min": -8, "quant_max": 7} | change)


def test_a_simulation_searches_each_weight_as_its_quantizer_does():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(8, 4, 3), torch.nn.Flatten()).eval()
    sim = qsim.QuantSim(model, torch.randn(1, 3, 8, 8))
    sim.calibrate([torch.randn(4, 3, 8, 8)], progress=False)
    for key, module in (("0.weight", model[0]), ("2.weight", model[2])):
        quantizer = sim.quantizers()[key]
        alone = qsim.Quantizer(quantizer.spec).compute_encoding_from(module.weight)
        assert quantizer.encoding == alone
