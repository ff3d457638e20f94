"""QLinearConv, QGemm, QLinearMatMul and MatMulIntegerToFloat against ONNX Runtime: no integer differs, ties and saturation included."""

import numpy as np
import pytest
import torch
from onnx import TensorProto
from onnx_graphs import TYPES, GraphBuilder, Grid, encoding, integers, kernels, random_grid

from qsim.integer.kernels import products
from qsim.integer.kernels.exact import AccumulatorOverflow, Addend, Weight, sums
from qsim.integer.kernels.products import Bias, Operator
from qsim.integer.kernels.quantized import QuantizedTensor

RUNS = [("int8", 8), ("uint8", 7), ("int8", 4)]  # activations, and how many bits weights have


def weights(rng, shape, bits):
    half = 1 << (bits - 1)
    return rng.integers(-half, half, shape).astype(np.int8)


def weight_grid(rng, channels, axis, exact):
    """Scales per channel, or one; powers of two where products shall have ties."""
    scales = np.float32(10) ** rng.uniform(-3, -1, channels) if rng.random() < 0.7 else np.float32(10 ** rng.uniform(-3, -1))
    scales = 2.0 ** np.round(np.log2(scales)) if exact else scales
    return Grid(np.asarray(scales, np.float32), 0, "int8", axis)


def result_grid(rng, dtype, x, w, terms, exact):
    scale = float(x.scale) * float(np.mean(w.scale)) * np.sqrt(terms) * 40 * 2.0 ** rng.integers(-3, 2)
    return random_grid(rng, dtype, 2.0 ** np.round(np.log2(scale)) if exact else scale)


def bias_grid(x, w):
    return Grid(np.asarray(np.float32(x.scale) * w.scale, np.float32), 0, "int32")


def operator(q, grid, b, channels=0):
    bias = None if b is None else Bias(torch.tensor(b.astype(np.float64)), torch.tensor(1.0))
    return Operator.of(QuantizedTensor(torch.tensor(q), encoding(grid)), bias, channels=channels)


def convolution(rng, dtype, bits, dims, exact):
    groups = int(rng.choice([1, 1, 2, 3]))
    inputs, outputs = groups * int(rng.integers(1, 5)), groups * int(rng.integers(1, 5))
    if rng.random() < 0.3:  # depthwise
        groups, outputs = inputs, inputs * int(rng.integers(1, 3))
    kernel, stride, dilation = rng.integers(1, 4, dims), rng.integers(1, 3, dims), rng.integers(1, 3, dims)
    padding = rng.integers(0, 3, dims)
    x = random_grid(rng, dtype, 2.0 ** rng.integers(-9, 0) if exact else 10 ** rng.uniform(-3, 0))
    w = weight_grid(rng, outputs, 0, exact)
    q = integers(rng, dtype, [2, inputs, *rng.integers(8, (0, 160, 24, 12)[dims], dims)])
    stored = weights(rng, (outputs, inputs // groups, *kernel), bits)
    b = None if rng.random() < 0.3 else rng.integers(-(10**4), 10**4, outputs).astype(np.int32)
    y = result_grid(rng, dtype, x, w, inputs // groups * kernel.prod(), exact)
    graph = GraphBuilder()
    operands = [graph.dequantize(graph.input("x", ["n", *q.shape[1:]], TYPES[dtype]), x), graph.stored(stored, w)]
    operands += [] if b is None else [graph.stored(b, bias_grid(x, w))]
    options = {"kernel_shape": kernel, "strides": stride, "dilations": dilation, "pads": [*padding, *padding]}
    node = graph.node("Conv", *operands, group=groups, **{name: [int(n) for n in value] for name, value in options.items()})
    expected = graph.run({graph.quantize(node, y): TYPES[dtype]}, {"x": q}, "QLinearConv")
    options = {name: [int(n) for n in value] for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation))}
    found = products.conv(QuantizedTensor(torch.tensor(q), encoding(x)), operator(stored, w, b), encoding(y), groups=groups, **options)
    return found.integers.numpy(), expected


@pytest.mark.parametrize("exact", [False, True], ids=["any scales", "powers of two"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "bits"), RUNS)
def test_convolution(dtype, bits, dims, exact):
    rng = np.random.default_rng([dims, bits, exact])
    compared = saturated = 0
    while compared < 10_000:
        found, expected = convolution(rng, dtype, bits, dims, exact)
        np.testing.assert_array_equal(found, expected)
        compared, saturated = (
            compared + found.size,
            saturated + np.isin(found, [np.iinfo(found.dtype).min, np.iinfo(found.dtype).max]).sum(),
        )
    assert 0 < saturated < 0.9 * compared


@pytest.mark.parametrize("channels", [30, 600, 1500])  # float32, operand split in two, float64
def test_convolution_with_large_sums(channels):
    rng = np.random.default_rng(channels)
    x, w, y = Grid(np.float32(0.1), -128), Grid(np.float32(0.01), 0), Grid(np.float32(channels * 30.0), 3)
    q = np.where(rng.random((2, channels, 9, 9)) < 0.9, 127, integers(rng, "int8", (2, channels, 9, 9))).astype(np.int8)
    stored = np.where(rng.random((4, channels, 3, 3)) < 0.9, -128, weights(rng, (4, channels, 3, 3), 8)).astype(np.int8)
    graph = GraphBuilder()
    operands = [graph.dequantize(graph.input("x", q.shape, TYPES["int8"]), x), graph.stored(stored, w)]
    node = graph.quantize(graph.node("Conv", *operands, kernel_shape=[3, 3]), y)
    expected = graph.run({node: TYPES["int8"]}, {"x": q}, "QLinearConv")
    options = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    found = products.conv(QuantizedTensor(torch.tensor(q), encoding(x)), operator(stored, w, None), encoding(y), **options)
    np.testing.assert_array_equal(found.integers.numpy(), expected)
    total = torch.nn.functional.conv2d(torch.tensor(q).double() + 128, torch.tensor(stored).double())
    exact = sums(torch.tensor(q).float() + 128, 255.0, operator(stored, w, None).weight, lambda a, b: torch.nn.functional.conv2d(a, b))
    assert (torch.equal(exact.double(), total) and total.abs().max() > 2**24) or channels == 30


@pytest.mark.parametrize("quantized", [True, False], ids=["integers", "float"])
@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
@pytest.mark.parametrize(("dtype", "bits"), RUNS)
def test_product_with_a_constant(dtype, bits, op, quantized):
    rng = np.random.default_rng([bits, quantized])
    compared = 0
    while compared < 10_000:
        exact, (rows, terms, columns) = rng.random() < 0.5, (int(n) for n in rng.integers(8, 90, 3))
        x, w = random_grid(rng, dtype, 2.0 ** rng.integers(-9, 0)), weight_grid(rng, columns, 1, exact)
        y = result_grid(rng, dtype, x, w, terms, exact)
        q, stored = integers(rng, dtype, (rows, terms)), weights(rng, (terms, columns), bits)
        b = rng.integers(-(10**4), 10**4, columns).astype(np.int32) if op == "Gemm" and rng.random() < 0.7 else None
        graph = GraphBuilder()
        operands = [graph.dequantize(graph.input("x", ["n", terms], TYPES[dtype]), x), graph.stored(stored, w)]
        node = graph.node(op, *operands, *([] if b is None else [graph.stored(b, bias_grid(x, w))]))
        kernel = "QGemm" if op == "Gemm" else "QLinearMatMul" if quantized else "MatMulIntegerToFloat"
        end = graph.quantize(node, y) if quantized else node
        expected = graph.run({end: TYPES[dtype] if quantized else TensorProto.FLOAT}, {"x": q}, kernel)
        left, right = QuantizedTensor(torch.tensor(q), encoding(x)), operator(stored, w, b, channels=1)
        found = products.gemm(left, right, encoding(y) if quantized else None, product=torch.matmul)
        np.testing.assert_array_equal((found.integers if quantized else found).numpy(), expected)
        compared += expected.size


@pytest.mark.parametrize("quantized", [True, False], ids=["integers", "float"])
@pytest.mark.parametrize("shapes", [([2, 3], [2, 3]), ([2, 1], [1, 3]), ([], [4]), ([], [])], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_product_of_activations(dtype, shapes, quantized):
    rng = np.random.default_rng(5)
    compared = 0
    while compared < 10_000:
        rows, terms, columns = (int(n) for n in rng.integers(8, 90, 3))
        a, b = (random_grid(rng, dtype, 10 ** rng.uniform(-3, 0)) for _ in range(2))
        y = random_grid(rng, dtype, float(a.scale) * float(b.scale) * np.sqrt(terms) * 60)
        left, right = integers(rng, dtype, (*shapes[0], rows, terms)), integers(rng, dtype, (*shapes[1], terms, columns))
        graph = GraphBuilder()
        ends = [graph.dequantize(graph.input(name, q.shape, TYPES[dtype]), grid) for name, q, grid in (("a", left, a), ("b", right, b))]
        node = graph.node("MatMul", *ends)
        kernel = "QLinearMatMul" if quantized else "MatMulIntegerToFloat"
        end = {graph.quantize(node, y): TYPES[dtype]} if quantized else {node: TensorProto.FLOAT}
        expected = graph.run(end, {"a": left, "b": right}, kernel)
        operands = [QuantizedTensor(torch.tensor(q), encoding(grid)) for q, grid in ((left, a), (right, b))]
        found = products.matmul(*operands, encoding(y) if quantized else None)
        np.testing.assert_array_equal((found.integers if quantized else found).numpy(), expected)
        compared += expected.size


@pytest.mark.parametrize("op", ["Conv", "Gemm", "MatMul"])
def test_weights_stored_in_four_bits_run_in_float(op, tmp_path):
    # why qsim.integer takes them to be stored in bytes, and the exporter stores them so
    rng = np.random.default_rng(0)
    counts = {}
    for dtype in ("int4", "int8"):
        graph = GraphBuilder()
        x = graph.dequantize(graph.input("x", ["n", 4, 8, 8] if op == "Conv" else ["n", 4], TYPES["int8"]), Grid(0.1, 3))
        shape, axis = ((8, 4, 3, 3), 0) if op == "Conv" else ((4, 8), 1)
        w = graph.stored(rng.integers(-8, 8, shape), Grid(np.full(8, 0.1, np.float32), 0, dtype, axis))
        y = graph.quantize(graph.node(op, x, w), Grid(1.0, 0))
        graph.session({y: TYPES["int8"]}, save=tmp_path / "model.onnx")
        counts[dtype] = kernels(tmp_path / "model.onnx")
    assert counts["int4"][op] == 1
    assert counts["int8"][op] == 0


def test_overflow_is_an_error():
    x, weight = torch.full((1, 2), 255.0), Weight.of(torch.full((2, 3), 127.0), [0])
    bias = torch.tensor([2.0**31 - 2 * 255 * 127, 0.0, 0.0], dtype=torch.float64)
    with pytest.raises(AccumulatorOverflow) as raised:
        sums(x, 255.0, weight, torch.matmul, Addend.of(bias))
    assert raised.value.largest == 2.0**31
    assert sums(x, 255.0, weight, torch.matmul, Addend.of(bias - 1)).max() == 2**31 - 1


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_results_do_not_depend_on_the_precision_that_torch_may_use(dtype):
    rng = np.random.default_rng(1)
    q, stored = integers(rng, dtype, (4, 64, 9, 9)), weights(rng, (8, 64, 3, 3), 8)
    grids = Grid(0.01, 3, dtype), Grid(0.01, 0), Grid(1.0, 3, dtype)
    options = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1]}

    def computed():
        return products.conv(
            QuantizedTensor(torch.tensor(q), encoding(grids[0])), operator(stored, grids[1], None), encoding(grids[2]), **options
        )

    expected = computed().integers
    was = torch.backends.mkldnn.conv.fp32_precision
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    try:
        assert torch.equal(computed().integers, expected)
    finally:
        torch.backends.mkldnn.conv.fp32_precision = was


def test_bias_of_the_simulation_and_of_the_runtime():
    # 3 / (0.1 * 0.1) lies at a tie in float32, not in float64
    rng = np.random.default_rng(2)
    x, w = encoding(Grid(np.float32(0.1), 0)), encoding(Grid(rng.uniform(0.001, 0.1, 1000).astype(np.float32), 0, "int8", 0))
    b = torch.tensor(rng.normal(0, 10, 1000).astype(np.float32))
    scale = np.float32(0.1) * w.scale.numpy()
    assert Bias.simulated(b, x, w).integers.tolist() == np.rint(b.numpy().astype(np.float64) / scale.astype(np.float64)).tolist()
    assert Bias.made_by_runtime(b, x, w).integers.tolist() == np.rint(b.numpy() / scale).tolist()
    assert Bias.simulated(torch.tensor([1e30]), x, encoding(Grid(0.1))).integers.item() == 2**31 - 1
