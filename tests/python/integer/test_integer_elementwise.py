"""QLinearAdd, QLinearMul, pooling, QLinearSigmoid and QLinearSoftmax against ONNX Runtime, ties included; fused multiply-add exactly."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto
from onnx_graphs import DTYPES, RANGES, TYPES, GraphBuilder, Grid, encoding, integers, random_grid

from qsim.integer.kernels import activations, elementwise, pooling
from qsim.integer.kernels.fma import fma
from qsim.integer.kernels.quantized import QuantizedTensor

DTYPE = pytest.mark.parametrize("dtype", ["int8", "uint8"])


def quantized(q, grid):
    return QuantizedTensor(torch.tensor(q), encoding(grid))


def every(dtype):
    low, high = RANGES[dtype]
    return np.arange(low, high + 1).astype(DTYPES[dtype])


def by_runtime(op, operands, y, kernel, **attributes):
    """The integers of an operation between quantizers. Operands: integers with their grids."""
    graph = GraphBuilder()
    names = [graph.input(f"x{i}", ["n", *q.shape[1:]], TYPES[grid.dtype]) for i, (q, grid) in enumerate(operands)]
    node = graph.node(op, *(graph.dequantize(name, grid) for name, (_, grid) in zip(names, operands, strict=True)), **attributes)
    feed = {name: q for name, (q, _) in zip(names, operands, strict=True)}
    return graph.run({graph.quantize(node, y): TYPES[y.dtype]}, feed, kernel)


def grids(rng, dtype, ties):
    """Grids of two operands and a result; with ties many sums lie halfway between integers, and rounding on the way decides."""
    y = 10 ** rng.uniform(-3, 0)
    a = y * (rng.choice([0.5, 0.25, 1.5, 0.75, 0.125]) if ties else rng.uniform(0.1, 1))
    b = y * (rng.integers(1, 400) / 8 / rng.integers(1, 200) if ties else rng.uniform(0.1, 1))
    return [random_grid(rng, dtype, scale) for scale in (a, b, y)]


@DTYPE
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shapes", [((256, 1), (1, 256)), ((1, 256), (256, 1))], ids=["first repeated", "second repeated"])
def test_add_of_operands_that_broadcast(dtype, ties, shapes):
    rng = np.random.default_rng(3)
    for _ in range(4):
        a, b, y = grids(rng, dtype, ties)
        left, right = (every(dtype).reshape(shape) for shape in shapes)
        expected = by_runtime("Add", [(left, a), (right, b)], y, "QLinearAdd")
        np.testing.assert_array_equal(elementwise.add(quantized(left, a), quantized(right, b), encoding(y)).integers.numpy(), expected)


@DTYPE
@pytest.mark.parametrize("op", ["Add", "Mul"])
@pytest.mark.parametrize("ties", [False, True])
def test_elementwise(dtype, op, ties):
    rng = np.random.default_rng(4)
    for _ in range(4):
        a, b, y = grids(rng, dtype, ties)
        left, right = (np.tile(q.ravel(), (2, 1)) for q in np.meshgrid(every(dtype), every(dtype)))  # more than 2**16: by a table
        if op == "Mul":
            y = Grid(y.scale * b.scale * np.float32(2.0 ** rng.integers(2, 7)), y.zero_point, dtype)
        expected = by_runtime(op, [(left, a), (right, b)], y, f"QLinear{op}")
        found = getattr(elementwise, op.lower())(quantized(left, a), quantized(right, b), encoding(y))
        np.testing.assert_array_equal(found.integers.numpy(), expected)


@DTYPE
@pytest.mark.parametrize(
    ("first", "second"), [((3, 5, 1, 1), (3, 5, 4, 6)), ((3, 5, 4, 6), (5, 1, 1)), ((3, 5, 4, 1), (3, 5, 1, 1)), ((1, 1), (7, 1))]
)
def test_add_of_channels(dtype, first, second):
    rng = np.random.default_rng(5)
    for _ in range(15):
        a, b, y = grids(rng, dtype, True)
        left, right = integers(rng, dtype, first), integers(rng, dtype, second)
        expected = by_runtime("Add", [(left, a), (right, b)], y, "QLinearAdd")
        np.testing.assert_array_equal(elementwise.add(quantized(left, a), quantized(right, b), encoding(y)).integers.numpy(), expected)


@DTYPE
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_average_pool(dtype, dims):
    rng = np.random.default_rng([6, dims])
    compared = 0
    while compared < 10_000:
        x = random_grid(rng, dtype, 2.0 ** rng.integers(-8, 0))
        y = random_grid(rng, dtype, float(x.scale) * rng.choice([1.0, 0.5, 0.3]))
        kernel, stride, size = rng.integers(1, 5, dims), rng.integers(1, 4, dims), rng.integers(6, (0, 200, 30, 14)[dims], dims)
        padding = np.array([rng.integers(0, k // 2 + 1) for k in kernel])
        ceil, count = bool(rng.random() < 0.4), bool(rng.random() < 0.4)
        q = integers(rng, dtype, (3, 4, *size))
        named = {"kernel_shape": kernel, "strides": stride, "pads": [*padding, *padding], "ceil_mode": [ceil], "count_include_pad": [count]}
        attributes = {name: [int(n) for n in value] for name, value in named.items()}
        attributes |= {name: attributes[name][0] for name in ("ceil_mode", "count_include_pad")}
        expected = by_runtime("AveragePool", [(q, x)], y, "QLinearAveragePool", **attributes)
        windows = {name: [int(n) for n in value] for name, value in (("kernel", kernel), ("stride", stride), ("padding", padding))}
        found = pooling.average_pool(quantized(q, x), encoding(y), **windows, ceil_mode=ceil, count_padding=count)
        np.testing.assert_array_equal(found.integers.numpy(), expected)
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
        assert found.integers.shape == pool(torch.zeros(q.shape), *windows.values(), ceil, count).shape
        compared += expected.size


@DTYPE
def test_window_over_everything_is_a_global_one(dtype):
    rng = np.random.default_rng(7)
    x, y, q = random_grid(rng, dtype, 0.1), random_grid(rng, dtype, 0.03), integers(rng, dtype, (50, 200, 5, 7))
    expected = by_runtime("AveragePool", [(q, x)], y, "QLinearAveragePool", kernel_shape=[5, 7])
    found = pooling.average_pool(quantized(q, x), encoding(y), kernel=[5, 7], stride=[1, 1], padding=[0, 0])
    np.testing.assert_array_equal(found.integers.numpy(), expected)


@DTYPE
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_global_average_pool(dtype, dims):
    rng = np.random.default_rng([8, dims])
    for _ in range(6):
        x = random_grid(rng, dtype, 10 ** rng.uniform(-3, 0))
        y = random_grid(rng, dtype, float(x.scale) * rng.choice([1, 0.5, 0.25, 0.1]))
        q = integers(rng, dtype, (40, 25, *rng.integers(1, 9, dims)))
        expected = by_runtime("GlobalAveragePool", [(q, x)], y, "QLinearGlobalAveragePool")
        np.testing.assert_array_equal(pooling.global_average_pool(quantized(q, x), encoding(y)).integers.numpy(), expected)


@DTYPE
def test_sigmoid(dtype):
    rng = np.random.default_rng(9)
    for _ in range(25):
        x, y = random_grid(rng, dtype, 10 ** rng.uniform(-3, -0.5)), Grid(np.float32(rng.uniform(0.002, 0.004)), RANGES[dtype][0], dtype)
        expected = by_runtime("Sigmoid", [(every(dtype), x)], y, "QLinearSigmoid")
        np.testing.assert_array_equal(activations.sigmoid(quantized(every(dtype), x), encoding(y)).integers.numpy(), expected)


def test_logistic():
    x = np.concatenate([np.linspace(-20, 20, 100_003), [0.0, -0.0, 1e-40, 1e38, -1e38, np.inf, -np.inf]]).astype(np.float32)
    graph = GraphBuilder()
    node = graph.node("Sigmoid", graph.input("x", ["n"]))
    expected = graph.session({node: TensorProto.FLOAT}).run(None, {"x": x})[0]
    np.testing.assert_array_equal(activations.logistic(torch.tensor(x)).numpy(), expected)


@DTYPE
@pytest.mark.parametrize("axis", [-1, 1])
def test_softmax(dtype, axis):
    rng = np.random.default_rng([10, axis % 3])
    for steps in (255.0, 255.0, 300.0, 700.0, 5000.0):  # the grid ends at 1, or far below it
        for _ in range(4):
            length = int(rng.integers(2, 70))
            x, y = random_grid(rng, dtype, 10 ** rng.uniform(-3, -0.3)), Grid(np.float32(1 / steps), RANGES[dtype][0], dtype)
            q = integers(rng, dtype, (40, length, 3) if axis == 1 else (40, 3, length))
            expected = by_runtime("Softmax", [(q, x)], y, "QLinearSoftmax", axis=axis)
            np.testing.assert_array_equal(activations.softmax(quantized(q, x), encoding(y), axis).integers.numpy(), expected)


def test_fma_rounds_once():
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 2**23, (3, 20_000), dtype=np.uint32) & rng.choice([0x7FFFFF, 0x7F0000, 0x400000], (3, 20_000)).astype(np.uint32)
    exponents = np.stack([rng.integers(100, 150, 20_000), rng.integers(100, 150, 20_000), rng.integers(60, 180, 20_000)]).astype(np.uint32)
    signs = rng.integers(0, 2, (3, 20_000)).astype(np.uint32)
    a, b, c = (signs << 31 | exponents << 23 | bits).view(np.float32)
    c[:5000] = -(a[:5000] * b[:5000])  # what is left is below the last bit of the product
    found = fma(*(torch.tensor(x) for x in (a, b, c))).numpy()
    for x, y, z, got in zip(a[:6000], b[:6000], c[:6000], found[:6000], strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        errors = [abs(Fraction(float(n)) - exact) for n in (np.nextafter(got, -np.inf), got, np.nextafter(got, np.inf))]
        assert errors[1] <= min(errors), (x, y, z, got)
        if errors[1] in (errors[0], errors[2]):
            assert got.view(np.uint32) % 2 == 0
