import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsim import Encoding, TensorSpec

ZERO = torch.tensor(0, dtype=torch.int32)


@given(
    st.lists(st.tuples(st.floats(2.0**-149, 2.0**99, width=32), st.integers(-128, 127)), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_json_is_lossless(channels, dtype, scalar):
    scale = torch.tensor([scale for scale, _ in channels], dtype=dtype)
    zero_point = torch.tensor([zero for _, zero in channels], dtype=torch.int32)
    encoding = Encoding(scale[0], zero_point[0], -128, 127) if scalar else Encoding(scale, zero_point, -128, 127, axis=0)
    again = Encoding.from_dict(json.loads(json.dumps(encoding.to_dict())))
    assert again == encoding
    assert again.scale.dtype == dtype
    assert again.scale.shape == encoding.scale.shape


def test_blocks_and_float_formats_survive_json():
    spec = TensorSpec(dtype="bfloat16")
    for encoding in (
        Encoding(torch.rand(3, 2, 4) + 0.1, torch.zeros(3, 2, 4, dtype=torch.int32), -8, 7, axis=1, block_size=32, dtype="int4"),
        Encoding(torch.tensor(1.0), ZERO, spec.quant_min, spec.quant_max, dtype="bfloat16"),
    ):
        assert Encoding.from_dict(json.loads(json.dumps(encoding.to_dict()))) == encoding


def test_equality_looks_at_values():
    encoding = Encoding(torch.tensor(0.5), ZERO, -128, 127)
    assert encoding == Encoding(torch.tensor(0.5), ZERO.clone(), -128, 127)
    assert encoding != Encoding(torch.tensor(0.25), ZERO, -128, 127)
    assert encoding != Encoding(torch.tensor(0.5), ZERO, -127, 127)
    assert encoding != Encoding(torch.tensor(0.5, dtype=torch.float64), ZERO, -128, 127)
    assert encoding != "int8"


def test_range_and_symmetry():
    scale, zero_point = torch.tensor([0.5, 2.0]), torch.tensor([-128, 0], dtype=torch.int32)
    encoding = Encoding(scale, zero_point, -128, 127, axis=0)
    assert encoding.min.tolist() == [0, -256]
    assert encoding.max.tolist() == [127.5, 254]
    assert not encoding.symmetric
    assert Encoding(torch.tensor(1.0), ZERO + 128, 0, 255, dtype="uint8").symmetric


@pytest.mark.parametrize(
    ("scale", "zero_point", "grid", "message"),
    [
        (torch.tensor(0.0), ZERO, (-128, 127), "positive and finite"),
        (torch.tensor([1.0, torch.nan]), torch.zeros(2, dtype=torch.int32), (-128, 127), "positive and finite"),
        (torch.tensor(1.0), ZERO + 128, (-128, 127), r"within \[-128, 127\]"),
        (torch.ones(2), ZERO, (-128, 127), "shape"),
        (torch.tensor(1.0), ZERO, (127, -128), "quant_min < quant_max"),
        (torch.tensor(1.0), ZERO, (0, 255), r"\[0, 255\] does not fit into int8"),
        (torch.tensor(1.0), torch.tensor(0), (-128, 127), "int32"),
        (torch.tensor(1.0, dtype=torch.float16), ZERO, (-128, 127), "float32 or float64"),
    ],
)
def test_errors_say_what_was_expected(scale, zero_point, grid, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Encoding(scale, zero_point, *grid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 1}, "unknown field 'offset'"),
        ({"axis": ...}, "'axis' is missing"),
        ({"scale_dtype": "float16"}, "float16"),
        ({"dtype": "double"}, "got dtype='double'"),
    ],
)
def test_keys_of_json_are_checked(change, message):
    fields = {**Encoding(torch.tensor(1.0), ZERO, -128, 127).to_dict(), **change}
    with pytest.raises(ValueError, match=message):
        Encoding.from_dict({key: value for key, value in fields.items() if value is not ...})
