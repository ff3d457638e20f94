import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output

import qsim
from qsim import reference
from qsim.ops import pack_int4, unpack_int4

RANGES = {torch.int8: (-8, 8, onnx.TensorProto.INT4), torch.uint8: (0, 16, onnx.TensorProto.UINT4)}
SHAPES = [(), (0,), (1,), (2,), (7, 3), (4, 0, 5), (33, 64), (1000, 77), (3, 5, 7, 11)]


def integers(shape, dtype, seed=0):
    low, high, _ = RANGES[dtype]
    return torch.randint(low, high, shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_onnx(shape, dtype):
    q = integers(shape, dtype)
    kind = RANGES[dtype][2]
    tensor = onnx.helper.make_tensor("q", kind, shape, q.flatten().tolist(), raw=False)
    stored = onnx.numpy_helper.to_array(tensor)
    raw = onnx.numpy_helper.from_array(stored, "q").raw_data
    packed = pack_int4(q)
    assert packed.dtype == torch.uint8
    assert packed.numpy().tobytes() == raw
    assert torch.equal(packed, reference.pack_int4(q))
    back = unpack_int4(torch.from_numpy(np.frombuffer(raw, np.uint8).copy()), shape, dtype=dtype)
    assert back.dtype == dtype
    assert torch.equal(back, q)


@given(st.lists(st.integers(0, 30), max_size=3), st.sampled_from(list(RANGES)), st.integers(0, 99))
def test_any_strides(shape, dtype, seed):
    q = integers(shape, dtype, seed)
    for view in (q, q.movedim(0, -1) if shape else q, torch.stack([q, q], -1)[..., 1]):
        packed = pack_int4(view)
        assert torch.equal(packed, reference.pack_int4(view))
        assert torch.equal(unpack_int4(packed, view.shape, dtype=dtype), view)
        assert torch.equal(reference.unpack_int4(packed, view.shape, dtype=dtype), view)


def test_only_four_bits_count_and_every_byte_unpacks():
    everything = torch.arange(-128, 128, dtype=torch.int8)
    assert torch.equal(pack_int4(everything), pack_int4(everything & 15))
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    for dtype in RANGES:
        q = unpack_int4(packed, (512,), dtype=dtype)
        assert torch.equal(q, reference.unpack_int4(packed, (512,), dtype=dtype))
        assert torch.equal(pack_int4(q), packed.flatten())


def test_a_weight_packs_by_rows_and_keeps_what_quantize_gave():
    weight = torch.randn(6, 10)
    scale, zero_point = torch.full((6, 2), 0.3), torch.zeros(6, 2, dtype=torch.int32)
    q = qsim.ops.quantize(weight, scale, zero_point, -8, 7, axis=1, block_size=5)
    packed = pack_int4(q).view(6, 5)
    assert torch.equal(pack_int4(q[2]), packed[2])
    back = qsim.ops.dequantize(unpack_int4(packed, weight.shape), scale, zero_point, axis=1, block_size=5)
    assert torch.equal(back, qsim.ops.fake_quantize(weight, scale, zero_point, -8, 7, axis=1, block_size=5))


def test_nothing_depends_on_the_number_of_threads():
    q = integers((500_001,), torch.int8)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        packed = pack_int4(q)
        assert torch.equal(packed, reference.pack_int4(q))
        assert torch.equal(unpack_int4(packed, q.shape), q)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_agree(level):
    script = "import torch; from qsim.ops import *; torch.manual_seed(0); p = pack_int4(torch.randint(-8, 8, (9999,), dtype=torch.int8));"
    assert_same_output(level, script + "print(p.tolist(), unpack_int4(p, (9999,)).tolist())")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_int4(torch.zeros(4, dtype=torch.int16)), "q is Short; expected int8 or uint8"),
        (lambda: unpack_int4(torch.zeros(4, dtype=torch.int8), (8,)), "packed is Char; expected uint8"),
        (lambda: unpack_int4(torch.zeros(4, dtype=torch.uint8), (9,)), r"packed has 4 bytes; expected 5 for shape \[9\]"),
        (lambda: unpack_int4(torch.zeros(4, dtype=torch.uint8), (8,), dtype=torch.int16), "dtype is Short"),
    ],
)
def test_errors_say_what_was_expected(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_opcheck():
    q = integers((3, 5), torch.int8)
    torch.library.opcheck(torch.ops.qsim.pack_int4, (q.t(),))
    torch.library.opcheck(torch.ops.qsim.unpack_int4, (pack_int4(q), (3, 5)))
    torch.library.opcheck(torch.ops.qsim.unpack_int4, (pack_int4(q), (3, 5)), {"dtype": torch.uint8})


def test_compiles_in_one_graph_with_dynamic_shapes():
    compiled = torch.compile(lambda q: unpack_int4(pack_int4(q), q.shape), fullgraph=True, dynamic=True)
    for shape in ((4, 6), (3, 5), (7, 9)):
        q = integers(shape, torch.int8)
        assert torch.equal(compiled(q), q)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_equals_the_cpu(shape):
    for dtype in RANGES:
        q = integers(shape, dtype)
        packed = pack_int4(q.cuda())
        assert torch.equal(packed.cpu(), pack_int4(q))
        assert torch.equal(unpack_int4(packed, shape, dtype=dtype).cpu(), q)
