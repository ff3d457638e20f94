"""Every operator on a GPU: the bits of the CPU (test_cuda_streams.py: on any stream, in a graph, without waiting).

Sums of gradients alone are compared with a tolerance (docs/numerics.md, section 1). Without a GPU everything here is skipped.
"""

import pytest
import torch
from cuda_calls import QINT, range_state, sketch_state
from models import ConvNet, seeded
from test_fake_quantize import DTYPES, elements, parameters

import qsim
from qsim import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPES = [(), (0,), (1,), (7,), (50001,), (3, 20011), (2, 64, 17, 13), (2, 3, 90, 91), (1000, 33), (0, 4)]
LAYOUTS = ["contiguous", "channels_last", "strided", "expanded"]


def granularities(shape):
    """Per tensor, each axis, blocks with a short last one along first and last axis."""
    if not shape:
        return [(None, None)]
    return [(None, None), *((axis, None) for axis in range(len(shape))), (0, 3), (-1, 32)]


CASES = [(shape, *granularity) for shape in SHAPES for granularity in granularities(shape)]


BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def same_bits(a, b):
    """Equal bits; the payload of a NaN is the device's own affair."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if a.is_floating_point():
        bits = BITS[a.element_size()]
        assert ((a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())).all()
    else:
        assert torch.equal(a, b)


def to_cuda(value):
    """Copies of tensors with the same strides: a plain .cuda() fills gaps."""
    if isinstance(value, torch.Tensor):
        memory = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
        return memory.cuda().as_strided(value.shape, value.stride(), value.storage_offset())
    return type(value)(to_cuda(v) for v in value) if isinstance(value, list | tuple) else value


def on_both(call, *args, **options):
    """Results on the CPU and on the GPU, as lists on the CPU."""
    found = []
    on_gpu = {name: to_cuda(value) for name, value in options.items()}
    for given, named in ((args, options), (to_cuda(args), on_gpu)):
        result = call(*given, **named)
        found.append([t.cpu() for t in (result if isinstance(result, tuple) else (result,))])
    return found


def check_same_bits(call, *args, **options):
    expected, got = on_both(call, *args, **options)
    for a, b in zip(got, expected, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_quantize(dtype, layout):
    for shape, axis, block_size in CASES:
        x = elements(shape, dtype, layout)
        for learned in (False, True):
            scale, zero_point = parameters(x, axis, block_size, learned)
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
            args, options = (scale, zero_point, -8, 7), {"axis": axis, "block_size": block_size}
            check_same_bits(ops.fake_quantize, x, *args, **options)
            check_same_bits(ops.fake_quantize, x, *args, **options, rounding="reciprocal")
            check_same_bits(QINT.fake_quantize_with_mask, x, *args, **options)
            check_same_bits(QINT.fake_quantize_backward, grad, x, *args, **options)
            check_same_bits(lambda x, *rest, **kw: ops.fake_quantize_(x.clone(), *rest, **kw), x, *args, **options)
            check_same_bits(masked_gradient, grad, x, *args, **options)


def masked_gradient(grad, x, *args, **options):
    y, mask = QINT.fake_quantize_with_mask(x, *args, **options)
    return QINT.fake_quantize_mask_backward(grad, mask, strides=y.stride())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_learned_gradients(dtype, layout):
    for shape, axis, block_size in CASES:
        x = elements(shape, dtype, layout)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        args = (grad, x, *parameters(x, axis, block_size, True), -8, 7)
        options = {"axis": axis, "block_size": block_size, "grad_factor": 0.5}
        (dx, *sums), (cuda_dx, *cuda_sums) = on_both(QINT.fake_quantize_learnable_backward, *args, **options)
        again = on_both(QINT.fake_quantize_learnable_backward, *args, **options)[1]
        same_bits(cuda_dx, dx)
        for got, expected, repeated in zip(cuda_sums, sums, again[1:], strict=True):
            same_bits(got, repeated)
            terms = max(1, x.numel() // max(1, expected.numel()))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6 * terms, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_observers(dtype, layout):
    def observe_range(x, *state, **options):
        ops.observe_range_(x, *state, **options)
        ops.observe_range_(x * 0.5, *state, **options)
        return state

    def observe(x, *state):
        ops.observe_(x, *state)
        return state

    for shape, axis, block_size in CASES:
        x = elements(shape, dtype, layout)
        check_same_bits(observe_range, x, *range_state(x, axis, block_size), axis=axis, block_size=block_size)
        check_same_bits(observe, x, *range_state(x, None, None), *sketch_state())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_running_ranges(dtype, layout):
    def two_batches(x, observing, quantizing, *state, **options):
        first = ops.observe_fake_quantize(x, observing, quantizing, *state, -8, 7, averaging=0.25, **options)
        second, mask = QINT.observe_fake_quantize_with_mask(x * 0.5, observing, quantizing, *state, -8, 7, averaging=0.25, **options)
        return first, second, mask, *state

    for shape, axis, block_size in CASES:
        x = elements(shape, dtype, layout)
        for observing, quantizing in ((True, True), (True, False), (False, True)):
            lowest, highest, counts = range_state(x, axis, block_size)
            scale, zero_point = torch.full_like(lowest, 0.25), torch.zeros_like(lowest, dtype=torch.int32)
            switches = torch.tensor(observing), torch.tensor(quantizing)
            state = (lowest, highest, counts, scale, zero_point)
            check_same_bits(two_batches, x, *switches, *state, axis=axis, block_size=block_size, symmetric=observing)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_integers(dtype, layout):
    for shape, axis, block_size in CASES:
        x = elements(shape, dtype, layout)
        options = {"axis": axis, "block_size": block_size}
        for low, high in ((-8, 7), (0, 255), (-32768, 32767)):
            args = parameters(x, axis, block_size, grid=(low, high))
            check_same_bits(ops.quantize, x, *args, low, high, **options)
            q = ops.quantize(x, *args, low, high, **options)
            to = dtype if dtype.itemsize == 2 else None  # else the type of the scale
            check_same_bits(ops.dequantize, q, *args, dtype=to, **options)
            if high == 7:
                check_same_bits(ops.pack_int4, q)
                check_same_bits(ops.unpack_int4, ops.pack_int4(q), q.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float_formats(dtype, layout):
    for shape in SHAPES:
        x = elements(shape, dtype, layout)
        for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
            for saturate in (False, True):
                counts, squares = torch.zeros(6, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
                check_same_bits(QINT.round_to_format_with_mask, x, name, saturate=saturate)
                check_same_bits(lambda x, *to: ops.round_to_format_(x.clone(), *to), x, name)
                expected, got = on_both(counted, x, name, counts, squares, saturate)
                for a, b in zip(got[:2], expected[:2], strict=True):
                    same_bits(a, b)
                torch.testing.assert_close(got[2], expected[2], rtol=1e-12, atol=0)  # another order of the sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_from_the_tensor_itself(dtype, layout):
    for shape in SHAPES:
        x = elements(shape, dtype, layout)
        for axis, block_size in ((None, None), (-1, None), (-1, 16)):
            groups = {"axis": axis if x.dim() else None, "block_size": block_size if x.dim() else None}
            check_same_bits(ops.fake_quantize_dynamic, x, -128, 127, **groups)
            check_same_bits(ops.fake_quantize_dynamic, x, -8, 7, symmetric=True, **groups)
            check_same_bits(ops.round_to_format_dynamic, x, "float8_e4m3fn", **groups)
            for scale_format in ("float8_e8m0fnu", "float8_e4m3fn"):
                check_same_bits(ops.round_to_format_dynamic, x, "float4_e2m1fn", scale_format=scale_format, **groups)


def counted(x, name, counts, squares, saturate):
    y = ops.round_to_format_counted(x, name, counts, squares, saturate=saturate)
    ops.count_format_(x, name, counts, squares, saturate=saturate)
    return y, counts, squares


@pytest.mark.parametrize("symmetric", [False, True])
def test_ranges_and_their_encodings(symmetric):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3000, generator=generator) * torch.logspace(-30, 30, 9)[:, None]
    sketches, low_bits, ends = [], [], []
    for row in x:
        state = (*range_state(row, None, None), *sketch_state())
        ops.observe_(row, *state)
        ends.append(torch.stack(state[:2]))
        sketches.append(state[3])
        low_bits.append(state[4])
    lowest, highest = torch.stack(ends, 1).contiguous()
    for method in ("minmax", "percentile", "mse", "tf_enhanced"):
        options = {"symmetric": symmetric, "method": method}
        sketched = lowest, highest, torch.stack(sketches)
        check_same_bits(ops.search_range, *sketched, -128, 127, **options)
        check_same_bits(ops.search_range, *sketched, -128, 127, **options, low_bits=torch.stack(low_bits))
        for dtype in DTYPES:
            for where in ({}, {"axis": 0}, {"axis": 1, "block_size": 700}):
                check_same_bits(ops.search_range_data, x.to(dtype), -8, 7, **where, **options)
        weights = [x[:2, : 30 + i] for i in range(60)] + [x.to(dtype) for dtype in DTYPES]  # more than a table holds
        check_same_bits(search_weights, weights, symmetric=symmetric, method=method)
    for dtype in (torch.float32, torch.float64):
        low = torch.tensor([-1.0, 0.0, -3e38, torch.inf, torch.nan, -1e-45], dtype=dtype)
        high = torch.tensor([2.0, 0.0, 3e38, -torch.inf, 1.0, 1e-45], dtype=dtype)
        check_same_bits(ops.choose_qparams, low, high, -128, 127, symmetric=symmetric)


def search_weights(weights, **options):
    lows, highs = ops.search_range_weights(weights, -8, 7, axis=0, **options)
    return (*lows, *highs)


@pytest.mark.parametrize("nonfinite", ["skip", "zero"])
@pytest.mark.parametrize("broken", [False, True])
def test_gradient_clipping(nonfinite, broken):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (), (0,), (16384,), (16385,), (300, 77), (2, 3, 5, 7)] * 20  # more than one table of gradients
    grads = [torch.randn(s, generator=generator).to(DTYPES[i % 4]) for i, s in enumerate(shapes)]
    if broken:
        grads[3][77] = torch.nan
        grads[-1][0] = torch.inf
    for norm_type in (2.0, 1.0, torch.inf):
        power, counts = on_both(ops.grad_power_sum, grads, norm_type=norm_type)[1]
        cpu_power, cpu_counts = ops.grad_power_sum(grads, norm_type=norm_type)
        assert torch.equal(counts, cpu_counts)
        torch.testing.assert_close(power, cpu_power, rtol=1e-13, atol=0)

        def scale(grads, power, counts, norm_type=norm_type):
            copies = [g.clone() for g in grads]
            norm = ops.scale_grad_(copies, power, counts, 1.0, norm_type=norm_type, nonfinite=nonfinite)
            return (norm, *copies)

        check_same_bits(scale, grads, cpu_power, cpu_counts)  # from equal sums equal bits


def test_training_and_evaluation_of_a_model():
    x = torch.linspace(-2, 2, 4 * 144).reshape(4, 1, 12, 12).sin()
    sims = []
    for device in ("cpu", "cuda"):
        sim = qsim.QuantSim(seeded(ConvNet).to(device), x.to(device))
        sim.calibrate([x.to(device)], progress=False)
        sims.append(sim)
    cpu, gpu = sims
    for sim in sims:
        sim.set_method("minmax")  # near equal candidates of a search might be chosen differently
    for key, encoding in cpu.encodings().items():  # convolutions differ in the last bits, their ranges hardly
        torch.testing.assert_close(gpu.encodings()[key].scale.cpu(), encoding.scale, rtol=1e-2, atol=0)
    torch.testing.assert_close(gpu(x.cuda()).cpu(), cpu(x), rtol=0.1, atol=0.1)
    gpu(x.cuda()).square().sum().backward()
    grads = [p.grad for p in gpu.model.parameters() if p.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)


def test_more_than_two_to_the_31_elements():
    n = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("less than 16 GB of free device memory")
    x = torch.empty(n, dtype=torch.bfloat16, device="cuda")
    pattern = elements((65536,), torch.bfloat16).cuda()
    whole = n // 65536 * 65536
    x[:whole].view(-1, 65536).copy_(pattern)
    x[whole:] = pattern[: n - whole]
    one = torch.tensor(0.1, device="cuda"), torch.tensor(3, dtype=torch.int32, device="cuda")
    expected = ops.fake_quantize(pattern, *one, -8, 7)
    state = [*(t.cuda() for t in (*range_state(x, None, None), *sketch_state()))]
    ops.observe_(x, *state)
    assert state[2][0] == n
    assert state[3].sum() + state[2][1:].sum() == n
    ops.fake_quantize_(x, *one, -8, 7)
    rows = x[:whole].view(-1, 65536)
    for first in range(0, len(rows), 1024):
        part = rows[first : first + 1024]
        assert (torch.eq(part, expected) | (part.isnan() & expected.isnan())).all()
    same_bits(x[whole:].cpu(), expected[: n - whole].cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_quantize_bias(dtype):
    for channels in (0, 1, 7, 8, 9, 513, 3000):
        bias = elements((channels,), dtype, "contiguous")
        for scale in (0.03, 1e-9, 1e-38):
            for weight_scale in (torch.tensor([0.01]), torch.rand(channels) * 0.01):
                given = bias, torch.tensor(scale), weight_scale
                check_same_bits(ops.fake_quantize_bias, *given)
                check_same_bits(QINT.fake_quantize_bias_with_mask, *given)
