import dataclasses
import json

import ml_dtypes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsim import TensorSpec
from qsim.numbers.block_formats import BLOCK_FORMATS
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.numbers.range_methods import RANGE_METHODS
from qsim.numbers.spec import range_shape


def _stored_scale(dtype):
    """A fraction as the largest number has no scale that is chosen as for integers."""
    form = FLOAT_FORMATS.get(dtype)
    return "float8_e8m0fnu" if form and form.scaled and form.largest % 1 else None


@pytest.mark.parametrize("bits", range(2, 17))
def test_grids_are_those_of_twos_complement(bits):
    levels = 2**bits
    signed, unsigned = TensorSpec(bits=bits), TensorSpec(bits=bits, signed=False)
    assert range(signed.quant_min, signed.quant_max + 1) == range(-levels // 2, levels // 2)
    assert range(unsigned.quant_min, unsigned.quant_max + 1) == range(levels)
    narrow = TensorSpec(bits=bits, narrow=True)
    assert narrow.quant_min == -narrow.quant_max
    assert (signed.encoding_dtype, unsigned.encoding_dtype) == (f"int{bits}", f"uint{bits}")


@pytest.mark.parametrize("dtype", FLOAT_FORMATS)
def test_float_formats_fix_their_width_and_those_of_8_bits_and_fewer_have_scales(dtype):
    spec = TensorSpec(bits=4, axis=1, block_size=32, dtype=dtype, scale_format=_stored_scale(dtype))
    info = ml_dtypes.finfo(getattr(ml_dtypes, dtype, dtype))
    scaled = info.bits <= 8
    assert (spec.bits, spec.encoding_dtype, spec.has_scale) == (info.bits, dtype, scaled)
    assert (spec.axis, spec.block_size) == ((1, 32) if scaled else (None, None))
    assert (spec.quant_min, spec.quant_max) == (int(float(info.min)), int(float(info.max)))


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_float8_takes_methods_that_do_not_count_steps(method):
    if method == "ema":
        with pytest.raises(ValueError, match="follows an integer grid"):
            TensorSpec(dtype="float8_e5m2", method=method)
        return
    spec = TensorSpec(dtype="float8_e5m2", method=method)
    assert (spec.method, spec.symmetric) == (method if method in ("percentile", "dynamic") else "minmax", True)


def _spec(dtype, method, **fields):
    runs = dtype != "int" and FLOAT_FORMATS[dtype].scaled and method == "ema"
    return TensorSpec(dtype=dtype, method="minmax" if runs else method, scale_format=_stored_scale(dtype), **fields)


specs = st.builds(
    _spec,
    bits=st.integers(2, 16),
    symmetric=st.booleans(),
    signed=st.sampled_from([None, True]),
    narrow=st.booleans(),
    axis=st.integers(-4, 4),
    block_size=st.none() | st.integers(1, 128),
    method=st.sampled_from(list(RANGE_METHODS)),
    dtype=st.sampled_from(["int", *FLOAT_FORMATS]),
    percentile=st.floats(1, 100, exclude_min=True),
    gamma=st.floats(0, 1e300),
    min_scale=st.floats(0, 1),
)


@given(specs)
def test_json_is_lossless(spec):
    assert TensorSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@given(specs)
def test_is_a_value(spec):
    assert dataclasses.replace(spec) == spec
    assert hash(dataclasses.replace(spec)) == hash(spec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.bits = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 1}, "got bits=1; expected an integer from 2 to 16"),
        ({"bits": True}, "got bits=True"),
        ({"bits": 8.0}, "got bits=8.0"),
        ({"axis": "0"}, "got axis='0'; expected an integer, a tuple of integers, or None"),
        ({"axis": 0, "block_size": 0}, "got block_size=0; expected a positive integer"),
        ({"block_size": 32}, "got axis=None"),
        ({"method": "max"}, "expected one of 'minmax', 'percentile'"),
        ({"dtype": "float32"}, "expected one of 'int', 'float16'"),
        ({"percentile": 0}, "got percentile=0"),
        ({"percentile": float("nan")}, "got percentile=nan"),
        ({"gamma": -1}, "got gamma=-1"),
        ({"min_scale": float("inf")}, "got min_scale=inf"),
        ({"rounding": "up"}, "expected one of 'divide', 'reciprocal'"),
        ({"nonfinite": "ignore"}, "expected one of 'skip', 'raise', 'saturate'"),
        ({"narrow": True, "signed": False}, "got signed=False"),
        ({"saturate": False}, "integers always saturate"),
        ({"dtype": "float16", "learnable": True}, "trains the scale of an integer grid"),
    ],
)
def test_errors_say_what_was_got_and_expected(fields, message):
    with pytest.raises(ValueError, match="TensorSpec: ") as error:
        TensorSpec(**fields)
    assert message in str(error.value)


def test_unknown_keys_are_named():
    with pytest.raises(ValueError, match="'bit'"):
        TensorSpec.from_dict({"bit": 8})


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_range_shape_is_that_of_the_reduced_tensor(shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    block_size = data.draw(st.integers(1, 10))
    x = torch.empty(shape)
    assert range_shape(shape, None, None) == ()
    assert range_shape(shape, axis, None) == (x.shape[axis],)
    blocks = x.split(block_size, axis) if x.shape[axis] else ()
    first_of_each = torch.cat([block.narrow(axis, 0, 1) for block in blocks], axis) if blocks else x
    assert range_shape(shape, axis, block_size) == tuple(first_of_each.shape)


@pytest.mark.parametrize(("shape", "axis", "block_size"), [((3,), 1, None), ((), 0, None), ((-1, 4), 0, None), ((-1, 4), 1, 2)])
def test_range_shape_rejects_what_does_not_tell(shape, axis, block_size):
    with pytest.raises(ValueError, match="shape"):
        range_shape(shape, axis, block_size)


def test_open_lengths_do_not_matter_to_channels():
    assert range_shape((-1, 4, -1), 1, None) == (4,)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_names_of_block_formats_say_how_blocks_lie(name):
    spec = TensorSpec(dtype=name)
    size = {"nvfp4": 16, "lpbq": 64, "q6_k": 16}.get(name, 32)
    scales = {"nvfp4": "float8_e4m3fn", "lpbq": "int", "q4_k": "int", "q6_k": "int"}.get(name, "float8_e8m0fnu")
    assert (spec.axis, spec.block_size, spec.symmetric, spec.scale_format) == (-1, size, True, scales)
    assert TensorSpec(dtype=name, axis=1, block_size=8) == dataclasses.replace(spec, axis=1, block_size=8)
    assert TensorSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "dynamic", "learnable": True}, "takes it from each tensor"),
        ({"method": "dynamic", "axis": (0, 1), "block_size": (8, 8)}, "one axis"),
        ({"method": "dynamic", "nonfinite": "raise"}, "what calibration does"),
        ({"dtype": "float6_e2m3fn"}, "mxfp6_e2m3"),
        ({"dtype": "float16", "scale_format": "float8_e8m0fnu"}, "has no scale"),
        ({"scale_format": "float8_e8m0fnu", "signed": False}, "signed grid"),
        ({"scale_format": "float8_e8m0fnu", "learnable": True}, "float32"),
        ({"scale_format": "e8m0"}, "float8_e8m0fnu"),
    ],
)
def test_what_dynamic_and_stored_scales_do_not_go_with(fields, message):
    with pytest.raises(ValueError, match=message):
        TensorSpec(**fields)
