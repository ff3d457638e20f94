import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qsim

GRIDS = [(-128, 127), (-127, 127), (0, 255), (-8, 7), (0, 15), (-2, 1), (0, 3), (-1, 0), (0, 1), (-32768, 32767), (0, 65535)]
ends = st.lists(st.floats(width=32), min_size=0, max_size=20)


@given(ends, ends, st.sampled_from(GRIDS), st.booleans(), st.sampled_from([0.0, 1e-7]), st.sampled_from([torch.float32, torch.float64]))
def test_matches_reference(a, b, grid, symmetric, min_scale, dtype):
    n = min(len(a), len(b))
    low, high = torch.tensor(a[:n], dtype=dtype), torch.tensor(b[:n], dtype=dtype)
    got = qsim.ops.choose_qparams(low, high, *grid, symmetric=symmetric, min_scale=min_scale)
    expected = qsim.reference.choose_qparams(low, high, *grid, symmetric=symmetric, min_scale=min_scale)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_opcheck(shape):
    low = -torch.rand(shape)
    torch.library.opcheck(torch.ops.qsim.choose_qparams.default, (low, low + 1, -128, 127), {"symmetric": True})


def test_strided_ranges():
    low = -torch.rand(6, 4).t()[::2]
    assert torch.equal(qsim.ops.choose_qparams(low, low + 2, 0, 255)[0], qsim.reference.choose_qparams(low, low + 2, 0, 255)[0])


@pytest.mark.parametrize(
    ("low", "high", "grid", "message"),
    [
        (torch.zeros(2), torch.zeros(3), (0, 255), "same shape"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), (0, 255), "both float32"),
        (torch.zeros(2), torch.zeros(2), (3, 3), "quant_min < quant_max"),
    ],
)
def test_errors_say_what_was_expected(low, high, grid, message):
    with pytest.raises((ValueError, TypeError), match=message):
        qsim.ops.choose_qparams(low, high, *grid)
