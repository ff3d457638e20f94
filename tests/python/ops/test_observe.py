import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output

import qsim

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SPECIALS = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 1e-40, 6e-8, -6e-8, 65504.0]
SPECIALS += [3e38, 3.4028234e38, -3.4028234e38, 1e300, -1e300]


def state(shape=(), sketch=False):
    tensors = [torch.full(shape, torch.inf), torch.full(shape, -torch.inf), torch.zeros(4, dtype=torch.int64)]
    return [*tensors, torch.zeros(16384, dtype=torch.int64), torch.zeros((), dtype=torch.int32)] if sketch else tensors


def range_shape(x, axis, block_size):
    if axis is None:
        return ()
    if block_size is None:
        return (x.shape[axis],)
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // block_size)
    return tuple(shape)


def bits(tensors):
    return [tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor for tensor in tensors]


def assert_same_state(got, expected):
    for a, b in zip(bits(got), bits(expected), strict=True):
        assert torch.equal(a, b)


def sample(shape, dtype, seed, specials=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    special = torch.tensor(SPECIALS, dtype=torch.float64)[torch.randint(len(SPECIALS), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < specials, special, x).to(dtype)


def check_range(x, axis=None, block_size=None):
    got, expected = state(range_shape(x, axis, block_size)), state(range_shape(x, axis, block_size))
    qsim.ops.observe_range_(x, *got, axis=axis, block_size=block_size)
    qsim.reference.observe_range_(x, *expected, axis=axis, block_size=block_size)
    assert_same_state(got, expected)


def check_sketch(x):
    got, expected = state(sketch=True), state(sketch=True)
    qsim.ops.observe_(x, *got)
    qsim.reference.observe_(x, *expected)
    assert_same_state(got, expected)
    assert got[3].sum() + got[2][1:].sum() == x.numel()  # every element is in a bin or counted as not finite


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.01, 0.9]),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_range_matches_reference(shape, dtype, seed, specials, random, strided):
    x = sample(shape, dtype, seed, specials)
    x = x.permute(*random.sample(range(x.dim()), x.dim()))
    if strided:
        x = x[..., ::2]
    axis = random.choice([None, *range(-x.dim(), x.dim())])
    check_range(x, axis, random.choice([None, 1, 3, 16, 100]) if axis is not None else None)


@given(st.integers(0, 9000), st.sampled_from(DTYPES), st.integers(0, 1000), st.sampled_from([0.0, 0.01, 0.9]), st.sampled_from([0, 1, 3]))
def test_sketch_matches_reference(n, dtype, seed, specials, offset):
    check_sketch(sample((n + offset,), dtype, seed, specials)[offset:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 40, 67), (2, 64, 20, 20), (40, 1000), (40, 7, 11), (1, 3, 130, 90), (70000,)])
def test_large_tensors_in_every_order_of_axes(shape, dtype):
    x = sample(shape, dtype, 1, specials=0.001)
    layouts = [x, x.transpose(0, -1)] + ([x.contiguous(memory_format=torch.channels_last)] if x.dim() == 4 else [])
    for y in layouts:
        check_sketch(y)
        for axis in [None, *range(x.dim())]:
            check_range(y, axis)
            if axis is not None:
                check_range(y, axis, 32)


@pytest.mark.parametrize("n", [4096, 4097, 524280, 524281, 528376, 528377, 1048600])
@pytest.mark.parametrize("value", [-0.0, 0.3, torch.inf])
def test_counters_of_16_bits_do_not_overflow(n, value):
    check_sketch(torch.full((n,), value))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_value(dtype):
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    check_sketch(x)
    check_range(x.reshape(256, 256), axis=1)
    check_range(x.reshape(-1, 1), axis=0)


@pytest.mark.parametrize("n", [5, 5000])
@pytest.mark.parametrize("special", SPECIALS[:4])
def test_nothing_but(special, n):
    check_sketch(torch.full((n,), special))
    check_range(torch.full((n, 3), special), axis=1)


def test_a_nonfinite_element_anywhere_changes_nothing_else():
    clean = sample((3000,), torch.float32, 0)
    for position in [0, 1, 15, 16, 63, 64, 1023, 1024, 2047, 2048, 2984, 2999]:
        x = clean.clone()
        x[position] = torch.nan
        check_sketch(x)
        check_range(x)


def test_negative_zeros_are_counted_as_zeros_and_tiny_negatives_are_not():
    x = torch.tensor([-0.0, 0.0, -1e-45, 1e-45]).repeat(3000)
    seen = state(sketch=True)
    qsim.ops.observe_(x, *seen)
    assert seen[3][0] == 9000
    assert seen[3][8192] == 3000
    check_range(torch.zeros(10) * -1)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 0x30000), (torch.float16, 0x3E000), (torch.float8_e4m3fn, 0)])
def test_low_bits_are_those_of_the_values_dtype(dtype, expected):
    for n in (3000, 4001):  # through scratch and directly, with what has all bits but is not finite
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype).float()
        x[::50] = torch.tensor(-1).int().view(torch.float32)
        seen = state(sketch=True)
        qsim.ops.observe_(x, *seen)
        assert seen[4] == expected


@given(st.lists(st.integers(0, 20000), max_size=6), st.integers(0, 100))
@settings(max_examples=20)
def test_batches_and_their_order_do_not_matter(cuts, seed):
    x = sample((20000,), torch.float32, seed, specials=0.01)
    whole, parts, swapped = (state(sketch=True) for _ in range(3))
    qsim.ops.observe_(x, *whole)
    pieces = x.tensor_split(sorted(cuts))
    for piece, piece_of_swapped in zip(pieces, reversed(pieces), strict=True):
        qsim.ops.observe_(piece, *parts)
        qsim.ops.observe_(piece_of_swapped, *swapped)
    assert_same_state(parts, whole)
    assert_same_state(swapped, whole)


def test_threads_do_not_matter():
    x = sample((300, 70, 41), torch.float32, 0, specials=0.001)
    threads, results = torch.get_num_threads(), []
    try:
        for count in [1, 2, 5]:
            torch.set_num_threads(count)
            sketched = state(sketch=True)
            qsim.ops.observe_(x, *sketched)
            ranges = [state(range_shape(x, axis, block)) for axis, block in [(0, None), (1, None), (2, None), (1, 32)]]
            for seen, (axis, block) in zip(ranges, [(0, None), (1, None), (2, None), (1, 32)], strict=True):
                qsim.ops.observe_range_(x, *seen, axis=axis, block_size=block)
            results.append([*sketched, *(tensor for seen in ranges for tensor in seen)])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_same_state(result, results[0])


_DIGEST = """
import hashlib, torch, qsim
torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in [torch.float32, torch.float16, torch.bfloat16, torch.float64]:
    x = torch.randn(3, 50, 21, 7, dtype=torch.float64).to(dtype)
    x.flatten()[::997] = torch.nan
    for axis, shape in [(None, ()), (0, (3,)), (1, (50,)), (3, (7,))]:
        state = [torch.full(shape, torch.inf), torch.full(shape, -torch.inf), torch.zeros(4, dtype=torch.int64)]
        state += [] if axis is not None else [torch.zeros(16384, dtype=torch.int64), torch.zeros((), dtype=torch.int32)]
        qsim.ops.observe_(x, *state) if axis is None else qsim.ops.observe_range_(x, *state, axis=axis)
        for tensor in state:
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_gives_the_same_bits(level):
    assert_same_output(level, _DIGEST)


def test_expanded_and_overlapping_inputs():
    check_sketch(torch.randn(5, 1).expand(5, 2000))
    check_range(torch.randn(1, 7).expand(9, 7), axis=1)
    check_range(torch.randn(30).as_strided((10, 10), (2, 1)), axis=0)
    check_range(torch.tensor(3.0))


SKETCH_SAMPLES = [torch.randn(10), torch.randn(0), torch.randn(3, 3, dtype=torch.bfloat16), torch.randn(4, requires_grad=True)]


@pytest.mark.parametrize("x", SKETCH_SAMPLES)
def test_opcheck(x):
    torch.library.opcheck(torch.ops.qsim.observe_.default, (x, *state(sketch=True)))
    torch.library.opcheck(torch.ops.qsim.observe_range_.default, (x, *state()))
    torch.library.opcheck(torch.ops.qsim.observe_range_.default, (x, *state((x.shape[-1],))), {"axis": -1})
    torch.library.opcheck(torch.ops.qsim.observe_range_.default, (x, *state(range_shape(x, 0, 4))), {"axis": 0, "block_size": 4})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, tensor in zip("abcde", state(sketch=True), strict=True):
                self.register_buffer(name, tensor)
            self.channels = state((6,))

        def forward(self, x):
            qsim.ops.observe_(x, self.a, self.b, self.c, self.d, self.e)
            qsim.ops.observe_range_(x, *self.channels, axis=1)
            return x * 2

    model, expected, channels = Model(), state(sketch=True), state((6,))
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for n in [4, 5, 9]:
        x = torch.randn(n, 6, requires_grad=True)
        compiled(x).sum().backward()
        qsim.reference.observe_(x, *expected)
        qsim.reference.observe_range_(x, *channels, axis=1)
    assert_same_state([model.a, model.b, model.c, model.d, model.e], expected)
    assert_same_state(model.channels, channels)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_versions_are_bumped(mode):
    seen = state(sketch=True)
    before = [tensor._version for tensor in seen]
    with mode():
        qsim.ops.observe_(torch.randn(3), *seen)
        qsim.ops.observe_range_(torch.randn(3), *seen[:3])
    assert [tensor._version for tensor in seen] == [version + 2 for version in before[:3]] + [version + 1 for version in before[3:]]


def test_state_made_in_inference_mode():
    with torch.inference_mode():
        seen = state(sketch=True)
        qsim.ops.observe_(torch.ones(3), *seen)
    assert seen[2][0] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, dtype=torch.int32)}, "expected float32, float16"),
        ({"lowest": torch.zeros(2)}, r"lowest has shape \[2\]; expected \[\]"),
        ({"highest": torch.zeros((), dtype=torch.float64)}, "highest is Double; expected Float"),
        ({"counts": torch.zeros(4)}, "counts is Float; expected Long"),
        ({"counts": torch.zeros(8, dtype=torch.int64)[::2]}, "counts is not contiguous"),
        ({"sketch": torch.zeros(16, dtype=torch.int64)}, r"sketch has shape \[16\]; expected \[16384\]"),
        ({"low_bits": torch.zeros(1, dtype=torch.int32)}, r"low_bits has shape \[1\]; expected \[\]"),
        ({"low_bits": torch.zeros(())}, "low_bits is Float; expected Int"),
        ({"lowest": torch.zeros((), device="meta")}, "lowest is on meta and x on cpu"),
    ],
)
def test_errors_say_what_was_expected(change, message):
    names = ["lowest", "highest", "counts", "sketch", "low_bits"]
    arguments = {"x": torch.ones(3), **dict(zip(names, state(sketch=True), strict=True)), **change}
    with pytest.raises((ValueError, TypeError), match=message):
        qsim.ops.observe_(**arguments)


def test_errors_of_axis_and_block_size():
    x = torch.ones(4, 6)
    with pytest.raises(IndexError, match="axis 2 of x with 2 dimensions"):
        qsim.ops.observe_range_(x, *state((6,)), axis=2)
    with pytest.raises(ValueError, match="without axis"):
        qsim.ops.observe_range_(x, *state(), block_size=2)
    with pytest.raises(ValueError, match="block_size is 0"):
        qsim.ops.observe_range_(x, *state((4, 6)), axis=1, block_size=0)
    with pytest.raises(ValueError, match=r"lowest has shape \[4, 3\]; expected \[4, 2\]"):
        qsim.ops.observe_range_(x, *state((4, 3)), axis=1, block_size=4)
