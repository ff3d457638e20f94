import copy
import math

import pytest
import torch
from quantizers import GRANULARITIES, SHAPE, calibrated

import qsim
from qsim import CalibrationError, Encoding, NoEncodingError, Quantizer, TensorSpec, round_to_format
from qsim.numbers.range_methods import SEARCHES
from qsim.quantizers.observer import Counts


def spread(ranges, x, axis, block_size):
    """What each element of x gets: scales or zero points repeated to x's shape."""
    if axis is None:
        return ranges.expand(x.shape)
    if block_size is None:
        return ranges.reshape([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)]).expand(x.shape)
    return ranges.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])


def simulate(x, encoding):
    """docs/numerics.md, section 1, in the precision of x."""
    scale = spread(encoding.scale, x, encoding.axis, encoding.block_size).to(x.dtype)
    zero_point = spread(encoding.zero_point, x, encoding.axis, encoding.block_size)
    q = ((x / scale).round() + zero_point).clamp(encoding.quant_min, encoding.quant_max)
    return (q - zero_point) * scale


@pytest.fixture
def compile_anew():
    """torch.compile without what earlier tests compiled: Dynamo allows eight variants of one function."""
    torch.compiler.reset()
    return lambda quantizer: torch.compile(quantizer, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_quantizes_as_the_contract_says(axis, block_size, symmetric, bits):
    spec = TensorSpec(bits=bits, symmetric=symmetric, axis=axis, block_size=block_size, method="minmax")
    x = torch.randn(SHAPE)
    quantizer = calibrated(spec, x)
    wider = 2 * torch.randn(SHAPE)
    assert torch.equal(quantizer(wider), simulate(wider, quantizer.encoding))
    assert (quantizer.encoding.quant_min, quantizer.encoding.quant_max) == (spec.quant_min, spec.quant_max)
    assert torch.equal(quantizer(wider.double()), simulate(wider.double(), quantizer.encoding))
    assert quantizer(wider.half()).dtype == torch.float16


def test_reciprocal_rounding_moves_ties():
    encoding = Encoding(torch.tensor(0.3), torch.tensor(0, dtype=torch.int32), -128, 127)
    ties = (torch.arange(-128, 127) + 0.5) * encoding.scale
    results = {}
    for rounding in ("divide", "reciprocal"):
        quantizer = Quantizer(TensorSpec(rounding=rounding))
        quantizer.set_encoding(encoding)
        results[rounding] = quantizer(ties)
        reference = qsim.reference.fake_quantize(ties, encoding.scale, encoding.zero_point, -128, 127, rounding=rounding)
        assert torch.equal(results[rounding], reference)
    assert not torch.equal(results["divide"], results["reciprocal"])


def test_switches():
    x = torch.randn(10)
    quantizer = calibrated(TensorSpec(method="minmax"), x)
    assert quantizer.counts == Counts(10)
    assert not torch.equal(quantizer(x), x)
    assert quantizer.counts == Counts(10)
    quantizer.observing = True
    assert torch.equal(quantizer(2 * x), simulate(2 * x, quantizer.encoding))
    assert quantizer.counts == Counts(20)
    assert (quantizer.min, quantizer.max) == (2 * x.min(), 2 * x.max())
    quantizer.observing = quantizer.enabled = False
    assert quantizer(x) is x


def test_gradient_passes_inside_the_range():
    quantizer = calibrated(TensorSpec(bits=4, method="minmax"), torch.tensor([-1.0, 1.0]))
    x = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0, math.nan], requires_grad=True)
    quantizer(x).nansum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0, 0]


def test_without_an_encoding_it_never_passes_silently():
    quantizer = Quantizer(TensorSpec(), name="layer1.0.conv1.output")
    assert quantizer.encoding is None
    with pytest.raises(NoEncodingError, match=r"'layer1.0.conv1.output' has no encoding.*compute_encoding\(\)"):
        quantizer(torch.ones(3))
    quantizer.observing = True
    with pytest.raises(NoEncodingError):
        quantizer(torch.ones(3))


def test_what_was_observed_serves_every_method():
    x = torch.distributions.StudentT(2.0).sample((5000,))
    quantizer = calibrated(TensorSpec(bits=4), x, name="a")
    by_method = {}
    for method in SEARCHES:
        by_method[method] = quantizer.compute_encoding(method)
        assert quantizer.spec.method == method
        assert quantizer.encoding == by_method[method] == quantizer.observer.encoding(quantizer.spec)
    assert by_method["minmax"].scale > by_method["mse"].scale
    narrow, wide = (quantizer.compute_encoding("percentile", percentile=p) for p in (90.0, 99.0))
    assert narrow.scale < wide.scale
    assert quantizer.spec.percentile == 99.0


def test_a_failed_calibration_keeps_the_encoding():
    quantizer = calibrated(TensorSpec(method="minmax"), torch.ones(3), name="fc.output")
    before = quantizer.encoding
    quantizer.reset()
    assert quantizer.encoding == before
    with pytest.raises(CalibrationError, match=r"'fc\.output' has no range: no batch reached it"):
        quantizer.compute_encoding("mse")
    assert quantizer.encoding == before
    assert quantizer.spec.method == "minmax"


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("method", ["minmax", "mse", "tf_enhanced"])
def test_weights_are_searched_on_the_data(axis, block_size, method):
    weight = torch.nn.Parameter(torch.distributions.StudentT(3.0).sample((8, 33)))
    weight.data[0, 0] = math.nan
    spec = TensorSpec(bits=4, symmetric=True, axis=axis, block_size=block_size, method=method)
    quantizer = Quantizer(spec, shape=weight.shape)
    encoding = quantizer.compute_encoding_from(weight)
    assert quantizer.counts == Counts(elements=8 * 33, nans=1)
    assert quantizer.compute_encoding_from(weight) == encoding
    assert quantizer.counts.elements == 8 * 33

    def error(encoding):
        return (simulate(weight.detach(), encoding) - weight.detach()).nan_to_num().square().sum()

    minmax = quantizer.compute_encoding_from(weight, "minmax")
    assert error(encoding) <= error(minmax)
    assert torch.equal(minmax.scale, quantizer.observer.encoding(spec, "minmax").scale)
    quantizer(weight).nansum().backward()
    assert weight.grad.isfinite().all()


def test_a_channel_without_a_finite_weight_is_an_error():
    weight = torch.ones(3, 2)
    weight[1] = math.inf
    with pytest.raises(CalibrationError, match=r"'conv.weight'.*1 of 3 channels.*\[1\].*2 [+]Inf"):
        Quantizer(TensorSpec(axis=0), name="conv.weight").compute_encoding_from(weight)
    weight[1, 0] = 0
    with pytest.raises(CalibrationError, match="nonfinite='raise'"):
        Quantizer(TensorSpec(axis=0, nonfinite="raise")).compute_encoding_from(weight)


@pytest.mark.parametrize("strict", [False, True])
def test_exports_as_one_operator(strict):
    x = torch.randn(4, 3)
    quantizer = calibrated(TensorSpec(method="minmax"), x)
    exported = torch.export.export(quantizer, (x,), strict=strict)
    calls = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert calls == ["qsim.fake_quantize.default"]
    assert torch.equal(exported.module()(x), quantizer(x))


def lsq_gradient(x, scale, zero_point, low, high):
    """d sum(y) / d scale of docs/numerics.md, section 1 in float64, without the gradient factor."""
    ratio = x.double() / scale.double()
    q = ratio.round() + zero_point
    inside = (q >= low) & (q <= high)
    return torch.where(inside, ratio.round() - ratio, q.clamp(low, high) - zero_point)


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("sign", [1, -1])
def test_learned_scales_get_the_lsq_gradient(axis, sign):
    """Also on the negative side, where the grid is that of |scale| and the gradient changes sign."""
    spec = TensorSpec(bits=4, axis=axis, method="minmax", learnable=True)
    quantizer = calibrated(spec, torch.randn(6, 5), shape=(6, 5))
    encoding = quantizer.encoding
    with torch.no_grad():
        quantizer.scale.mul_(sign)
    assert quantizer.encoding == encoding
    x = 2 * torch.randn(6, 5)
    quantizer(x).sum().backward()
    terms = lsq_gradient(x, encoding.scale, encoding.zero_point, spec.quant_min, spec.quant_max)
    elements = 30 if axis is None else 6
    expected = sign * (terms.sum() if axis is None else terms.sum(0)) / math.sqrt(elements * spec.quant_max)
    torch.testing.assert_close(quantizer.scale.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_learned_scale_survives_a_step_across_zero():
    x = torch.randn(100)
    quantizer = calibrated(TensorSpec(bits=4, method="minmax", learnable=True), x)
    for value in (-0.1, 0.0, -0.0):
        with torch.no_grad():
            quantizer.scale.fill_(value)
        assert quantizer(x).isfinite().all()
        assert quantizer.encoding.scale > 0


def test_learning_the_scale_lowers_the_error():
    x = torch.randn(2000)
    quantizer = calibrated(TensorSpec(bits=3, symmetric=True, method="minmax", learnable=True), x)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.05)
    errors = []
    for _ in range(100):
        optimizer.zero_grad()
        errors.append((quantizer(x) - x).square().sum())
        errors[-1].backward()
        optimizer.step()
    assert errors[-1] < 0.7 * errors[0]


def test_calibrating_again_keeps_the_optimizers_parameter():
    quantizer = Quantizer(TensorSpec(method="minmax", axis=0, learnable=True), shape=(4, 3))
    parameter = quantizer.scale
    quantizer.compute_encoding_from(torch.randn(4, 3))
    quantizer.load_state_dict(copy.deepcopy(quantizer.state_dict()))
    assert quantizer.scale is parameter


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_unscaled_float_formats_need_no_calibration(dtype):
    quantizer = Quantizer(TensorSpec(dtype=dtype, axis=0))
    x = torch.tensor([0.1, 1e5, 1e-7, -3e38, math.nan])
    assert torch.equal(quantizer(x).nan_to_num(), round_to_format(x, dtype).nan_to_num())
    assert quantizer.compute_encoding() == quantizer.compute_encoding_from(x) == quantizer.encoding
    assert (quantizer.encoding.dtype, quantizer.encoding.scale.item()) == (dtype, 1)
    quantizer.load_state_dict(Quantizer(TensorSpec(dtype=dtype)).state_dict())
    assert not torch.equal(quantizer(x), x)
    saturating = Quantizer(TensorSpec(dtype=dtype, saturate=True))
    assert torch.equal(saturating(x).isfinite(), x.isfinite())


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize(("dtype", "least"), [("float8_e4m3fn", 30), ("float8_e5m2", 24)])
def test_float8_scales_the_largest_magnitude_to_the_largest_number(dtype, least, axis, block_size):
    spec, weight = TensorSpec(dtype=dtype, axis=axis, block_size=block_size), torch.randn(SHAPE) * 0.005
    quantizer = Quantizer(spec, shape=SHAPE)
    keys = set(quantizer.state_dict())
    with pytest.raises(NoEncodingError):
        quantizer(weight)
    encoding = quantizer.compute_encoding_from(weight)
    observing = Quantizer(spec)
    observing.observe(weight)
    assert observing.compute_encoding() == encoding == Encoding.from_dict(encoding.to_dict())
    assert (encoding.dtype, encoding.symmetric, encoding.quant_max) == (dtype, True, spec.quant_max)
    largest = torch.maximum(-quantizer.min, quantizer.max)
    assert torch.equal(encoding.scale, (largest.double() / spec.quant_max).float())
    y = quantizer(weight)
    assert 10 * (weight.square().sum() / (weight - y).square().sum()).log10() > least
    torch.testing.assert_close(y.abs().max(), weight.abs().max())
    assert set(quantizer.state_dict()) == keys
    loaded = Quantizer(spec, shape=SHAPE)
    loaded.load_state_dict(quantizer.state_dict())
    assert torch.equal(loaded(weight), y)
    torch.testing.assert_close(quantizer(weight.double()).float(), y, rtol=0.13, atol=1e-6)


def test_float8_of_zeros_and_infinities():
    quantizer = Quantizer(TensorSpec(dtype="float8_e4m3fn", axis=0))
    x = torch.tensor([[0.0, 0.0], [math.inf, 900.0], [1e-44, -1e-45]])
    encoding = quantizer.compute_encoding_from(x)
    assert encoding.scale[0] == 1
    assert encoding.scale[2] == torch.finfo(torch.float32).tiny
    assert torch.equal(quantizer(x)[:2], torch.tensor([[0.0, 0.0], [900.0, 900.0]]))


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("learnable", [False, True])
def test_compiles_without_graph_breaks(axis, block_size, learnable, compile_anew):
    spec = TensorSpec(bits=4, axis=axis, block_size=block_size, method="minmax", learnable=learnable)
    quantizer = calibrated(spec, torch.randn(SHAPE), shape=SHAPE)
    compiled = compile_anew(quantizer)
    x = torch.randn(SHAPE, requires_grad=True)
    expected, got = quantizer(x), compiled(x)
    assert torch.equal(got, expected)
    inputs = [x, *quantizer.parameters()]
    for a, b in zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)
    quantizer.observing = True
    elements = quantizer.counts.elements
    assert torch.equal(compiled(x), expected)
    assert quantizer.counts.elements == elements + x.numel()
    quantizer.enabled = False
    assert torch.equal(compiled(x), x)


def test_the_compiled_graph_follows_a_new_encoding(compile_anew):
    quantizer = calibrated(TensorSpec(method="minmax"), torch.randn(10))
    compiled = compile_anew(quantizer)
    x = torch.randn(10)
    compiled(x)
    quantizer.set_encoding(Encoding(torch.tensor(0.5), torch.tensor(3, dtype=torch.int32), -128, 127))
    assert torch.equal(compiled(x), simulate(x, quantizer.encoding))
