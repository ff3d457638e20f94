"""Scales of two levels against loops in exact fractions, and against AIMET's formula."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import qsim
from qsim.numbers.two_levels import TwoLevels

LEVELS = [1, 3, 16, 63, 127, 1000]
_MAX = Fraction(torch.finfo(torch.float32).max)


def scales(rows=6, blocks=11):
    torch.manual_seed(0)
    s = torch.rand(rows, blocks) * 10.0 ** torch.randint(-20, 20, (rows, 1))
    s[0], s[1, ::2] = torch.finfo(torch.float32).tiny, s[1, 0]
    s[2, 3] = s[2].max() * 1e-9
    s[3] = float(_MAX) / 8 * torch.linspace(0.1, 1, blocks)
    return s


def to_float32(value: Fraction) -> Fraction:
    return Fraction(float(np.float32(float(value))))


def by_hand(row, levels):
    """Of one super-block."""
    largest = max(map(Fraction, row))
    step = to_float32(largest / levels)
    if step * levels > largest:
        step = Fraction(float(np.nextafter(np.float32(float(step)), np.float32(0))))
    step = max(step, Fraction(float(np.finfo(np.float32).tiny)))
    integers = [min(max(round(Fraction(s) / step), 1), levels) for s in row]  # half to even
    return [float(to_float32(k * step)) for k in integers]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("count", [None, 4, 1])
def test_nearest_is_what_fractions_give(levels, count):
    given, size = scales(), count or 11
    expected = [[x for at in range(0, 11, size) for x in by_hand(row[at : at + size], levels)] for row in given.tolist()]
    found = TwoLevels(levels, 1, count).nearest(given)
    assert torch.equal(found, torch.tensor(expected))
    assert bool((found * 8 < torch.inf).all())
    integers, step = TwoLevels(levels, 1, count).split(found)
    assert integers.min() >= 1
    assert integers.max() <= levels
    assert step.shape == (6, -(-11 // size))
    assert torch.equal(integers * step.repeat_interleave(size, 1)[:, :11], found)


def test_along_any_axis():
    given = scales().T.contiguous()
    along = TwoLevels(63, 0, 4)
    assert torch.equal(along.nearest(given), TwoLevels(63, 1, 4).nearest(given.T).T)
    assert torch.equal(along.split(along.nearest(given))[0].T, TwoLevels(63, 1, 4).split(along.nearest(given).T)[0])


def test_lpbq_is_aimets():
    """The scale of its GroupedBlockQuantizeDequantize, in NumPy's float32: the largest over 16, the others rounded to multiples of it."""
    given = scales()
    s = given.numpy()
    per_channel = s.max(1, keepdims=True) / np.float32(16)
    expected = np.clip(np.rint(s / per_channel), 1, 16).astype(np.float32) * per_channel
    normal = per_channel[:, 0] >= np.finfo(np.float32).tiny  # of what is smaller ours has a floor
    assert normal.sum() == 5
    assert np.array_equal(TwoLevels(16, 1).nearest(given).numpy()[normal], expected[normal])


def test_other_scales_are_refused():
    found = TwoLevels(63, 1, 6).nearest(scales())
    found[1, 2] *= 1.001
    found[4, 8] *= 1.001
    with pytest.raises(ValueError, match="2 of 12 super-blocks have scales that are not one float times integers from 1 to 63"):
        TwoLevels(63, 1, 6).split(found)


def test_floats_of_few_bits_are_subnormal_too():
    given = torch.tensor([[1e-6, 5e-7, 3e-7], [1e-12, 1e-12, 1e-12], [0.5, 0.25, 0.1]])
    found = TwoLevels(63, 1).nearest(given, torch.float16)
    integers, step = TwoLevels(63, 1).split(found, torch.float16)
    assert torch.equal(integers * step, found)
    assert torch.equal(step.half().float(), step)
    assert torch.equal(found[1], torch.full((3,), 2.0**-24))
    assert torch.allclose(found[2], given[2], rtol=0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": None}, "is of blocks along one axis"),
        ({"super_block": 48}, "a multiple of block_size=32"),
        ({"method": "dynamic"}, "is of weights"),
        ({"dtype": "float8_e4m3fn"}, "is of integers"),
        ({"learnable": True}, "learnable=True"),
        ({"scale_format": None, "super_block": 64}, "super_block needs scale_format='int'"),
    ],
)
def test_what_a_spec_refuses(fields, message):
    good = {"bits": 4, "axis": 1, "block_size": 32, "scale_format": "int"}
    assert qsim.TensorSpec(**good).symmetric
    with pytest.raises(ValueError, match=message):
        qsim.TensorSpec(**{**good, **fields})


def test_an_encoding_refuses_what_no_file_can_mean():
    zero = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="a multiple of block_size"):
        qsim.Encoding(torch.ones(1, 2), zero, -8, 7, 1, 32, "int4", scale_levels=16, super_block=48)
    with pytest.raises(ValueError, match="levels of 1 and more"):
        qsim.Encoding(torch.ones(1, 2), zero, -8, 7, 1, 32, "int4", super_block=64)
