"""Blocks along several axes: tiles of a weight that share a scale, through every operator and class of the family."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Perceptron, seeded
from test_fake_quantize import DTYPES, LAYOUTS, elements, same_bits

import qsim
from qsim import ops, reference
from qsim.numbers.range_methods import SEARCHES

GRID = (-8, 7)


def tile_parameters(x, axis, block_size, seed=0):
    """Scales and zero points, and both written out for every element."""
    shape, which = list(x.shape), [torch.arange(n) for n in x.shape]
    for a, size in zip(axis, block_size, strict=True):
        shape[a] = -(-shape[a] // size)
        which[a] = which[a] // size
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = torch.rand(shape, generator=generator, dtype=wide) + 0.05
    zero_point = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int32)
    index = torch.meshgrid(*which, indexing="ij")
    return scale, zero_point, scale[index], zero_point[index]


@st.composite
def calls(draw):
    shape = draw(st.lists(st.integers(0, 20), min_size=2, max_size=4).filter(lambda s: torch.Size(s).numel() < 20000))
    x = elements(shape, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 99)))
    axes = draw(st.lists(st.integers(0, x.dim() - 1), min_size=1, max_size=x.dim(), unique=True))
    axis = tuple(a - x.dim() if draw(st.booleans()) else a for a in axes)
    block_size = tuple(draw(st.integers(1, 25)) for _ in axis)
    return x, axis, block_size, draw(st.integers(0, 99))


def one_by_one(x, scale, zero_point):
    """Fake-quantize with parameters of its own for every element: channels of a flat tensor."""
    args = (scale.flatten().contiguous(), zero_point.flatten().contiguous(), *GRID)
    return ops.fake_quantize(x.flatten(), *args, axis=0).reshape(x.shape)


@given(calls())
def test_every_element_uses_the_scale_of_its_tile(call):
    x, axis, block_size, seed = call
    scale, zero_point, each_scale, each_zero = tile_parameters(x, axis, block_size, seed)
    where = {"axis": axis, "block_size": block_size}
    expected = one_by_one(x, each_scale, each_zero)
    y = ops.fake_quantize(x, scale, zero_point, *GRID, **where)
    same_bits(y, expected)
    same_bits(reference.fake_quantize(x, scale, zero_point, *GRID, **where), expected)
    same_bits(ops.fake_quantize(x, scale, zero_point, *GRID, **where, out=torch.empty_like(y)), expected)
    same_bits(ops.fake_quantize_(x.clone(), scale, zero_point, *GRID, **where), expected)
    q = ops.quantize(x, scale, zero_point, *GRID, **where)
    assert torch.equal(q, reference.quantize(x, scale, zero_point, *GRID, **where))
    back = ops.dequantize(q, scale, zero_point, **where, dtype=x.dtype)
    same_bits(back.masked_fill(x.isnan(), torch.nan), expected)
    same_bits(back, reference.dequantize(q, scale, zero_point, **where, dtype=x.dtype))


@given(calls())
def test_gradients(call):
    x, axis, block_size, seed = call
    scale, zero_point, *_ = tile_parameters(x, axis, block_size, seed)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)
    scale.requires_grad_()
    leaf = x.clone().requires_grad_()
    ops.fake_quantize(leaf, scale, zero_point, *GRID, axis=axis, block_size=block_size, grad_factor=0.5).backward(grad)
    dx, dscale, _ = reference.fake_quantize_backward(
        grad, x, scale.detach(), zero_point, *GRID, axis=axis, block_size=block_size, grad_factor=0.5
    )
    same_bits(leaf.grad, dx)
    torch.testing.assert_close(scale.grad.double(), dscale, rtol=1e-4, atol=1e-3)


@given(calls())
def test_ranges_of_tiles(call):
    x, axis, block_size, _ = call
    where = {"axis": axis, "block_size": block_size}
    shape = tile_parameters(x, axis, block_size)[0].shape
    states = []
    for observe in (ops.observe_range_, reference.observe_range_):
        lowest, highest, counts = torch.full(shape, torch.inf), torch.full(shape, -torch.inf), torch.zeros(4, dtype=torch.int64)
        observe(x, lowest, highest, counts, **where)
        observe(x * 0.5, lowest, highest, counts, **where)
        states.append((lowest, highest, counts))
    for ours, theirs in zip(*states, strict=True):
        same_bits(ours, theirs)


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize(
    ("shape", "axis", "block_size"), [((40, 50), (0, 1), (16, 16)), ((6, 7, 3, 3), (1, 0), (4, 5)), ((8, 9), (-1,), (4,))]
)
def test_search_of_a_tile_is_the_search_of_its_values(method, shape, axis, block_size):
    x = elements(shape, torch.float32)
    low, high = ops.search_range_data(x, *GRID, axis=axis, block_size=block_size, method=method)
    lengths = {a % x.dim(): size for a, size in zip(axis, block_size, strict=True)}
    assert low.shape == torch.Size([-(-n // lengths.get(i, 1)) for i, n in enumerate(shape)])
    for index in torch.ones(low.shape).nonzero().tolist():
        tile = x[tuple(slice(i * lengths.get(d, 1), (i + 1) * lengths.get(d, 1)) for d, i in enumerate(index))]
        alone = ops.search_range_data(tile, *GRID, method=method)
        assert (low[tuple(index)], high[tuple(index)]) == alone
    if method == "minmax":
        expected = reference.search_range_data(x, *GRID, axis=axis, block_size=block_size, method="minmax")
        assert torch.equal(low, expected[0])
        assert torch.equal(high, expected[1])


@pytest.mark.parametrize(
    ("axis", "block_size", "message"),
    [
        ((0, 1), 4, "expected one block size for each axis"),
        ((0, 1), (4,), "expected one block size for each axis"),
        ((), (), "expected one block size for each axis"),
        ((0, 2), (4, 4), "for a tensor with 2 dimensions"),
        ((0, -2), (4, 4), "expected different axes"),
        ((0, 1), (4, 0), "sizes of at least 1"),
        ((0, 1), (4, 4), r"scale or zero_point has shape \(2, 3\); expected \(2, 2\)"),
    ],
)
def test_errors_say_what_was_expected(axis, block_size, message):
    scale, zero_point = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises((ValueError, IndexError), match=message):
        ops.fake_quantize(torch.zeros(8, 8), scale, zero_point, *GRID, axis=axis, block_size=block_size)


def test_compiles_in_one_graph():
    x = torch.randn(20, 30, requires_grad=True)
    scale, zero_point, *_ = tile_parameters(x, (0, 1), (8, 16))
    scale.requires_grad_()

    def run(x, scale):
        return ops.fake_quantize(x, scale, zero_point, *GRID, axis=(0, 1), block_size=(8, 16))

    expected = torch.autograd.grad(run(x, scale).sin().sum(), (x, scale))
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(x, scale)  # under Inductor: test_operator_tags.py
    assert torch.equal(y, run(x, scale))
    torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), (x, scale)), expected)


SPEC = qsim.TensorSpec(bits=4, symmetric=True, axis=(0, 1), block_size=(4, 5))


def test_spec_encoding_and_config_go_through_json():
    assert qsim.TensorSpec.from_dict(json.loads(json.dumps(SPEC.to_dict()))) == SPEC
    config = qsim.int8().override("fc*", axis=[0, 1], block_size=[4, 5])
    assert qsim.Config.from_json(config.to_json()) == config
    assert config.spec_for("fc1", "linear", "weight").block_size == (4, 5)
    quantizer = qsim.Quantizer(SPEC)
    encoding = quantizer.compute_encoding_from(torch.randn(9, 12))
    assert encoding.scale.shape == (3, 3)
    again = qsim.Encoding.from_dict(json.loads(json.dumps(encoding.to_dict())))
    assert again == encoding
    quantizer.set_encoding(again)
    for axis, block_size in (((0, 1), 4), (0, (4,)), ((0,), None), ((0, 1), (4,)), ((), ()), ((0, 1), (4, 0))):
        with pytest.raises(ValueError, match="TensorSpec"):
            qsim.TensorSpec(axis=axis, block_size=block_size)


@pytest.mark.parametrize("learnable", [False, True])
def test_quantizer_and_observer(learnable):
    x = torch.randn(9, 12, requires_grad=True)
    spec = qsim.TensorSpec(bits=4, symmetric=True, axis=(0, 1), block_size=(4, 5), learnable=learnable)
    quantizer = qsim.Quantizer(spec, shape=x.shape)
    encoding = quantizer.compute_encoding_from(x)
    y = quantizer(x)
    same_bits(y, reference.fake_quantize(x, encoding.scale, encoding.zero_point, *GRID, axis=(0, 1), block_size=(4, 5)))
    y.sum().backward()
    assert x.grad.abs().sum() > 0
    assert not learnable or quantizer.scale.grad.shape == (3, 3)
    loaded = qsim.Quantizer(spec)
    loaded.load_state_dict(quantizer.state_dict())
    same_bits(loaded(x), y)
    observer = qsim.Observer((0, 1), (4, 5))
    assert observer(x) is x
    assert observer.min.shape == (3, 3)
    assert observer.min[0, 0] == x[:4, :5].min()
    assert observer.max[2, 2] == x[8:, 10:].max()
    assert observer.encoding(qsim.TensorSpec(axis=(0, 1), block_size=(4, 5)), method="minmax").scale.shape == (3, 3)


def test_whole_network():
    x = torch.randn(16, 6)
    config = qsim.Config(weight=qsim.TensorSpec(bits=8, symmetric=True, axis=(0, 1), block_size=(4, 4)))
    sim = qsim.QuantSim(seeded(Perceptron), x, config)
    sim.calibrate([x], progress=False)
    with sim.in_float():
        expected = sim(x)
    assert (sim(x) - expected).abs().max() < 0.1 * expected.abs().max()
    assert "4 x 4 along axis (0, 1)" in str(sim.summary())


@pytest.mark.parametrize(
    ("options", "said"), [({"axis": 1.5}, "axis=1.5"), ({"axis": "01"}, "axis='01'"), ({"axis": 0, "block_size": 2.0}, "block_size=2.0")]
)
def test_what_is_no_integer_is_told(options, said):
    x = torch.zeros(4, 4)
    with pytest.raises(TypeError, match=rf"got {said}; expected an integer, a sequence of integers, or None"):
        ops.fake_quantize(x, torch.ones(4), torch.zeros(4, dtype=torch.int32), -8, 7, **options)
