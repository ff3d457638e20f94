"""Streams of bits against Python's integers."""

import pytest
import torch

from qsim.checkpoints.bit_stream import pack, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 7, 32, 33, 96])
def test_every_width(bits, columns):
    numbers = torch.randint(0, 2**bits, (5, columns), dtype=torch.int32)
    words = pack(numbers, bits)
    assert words.shape == (5, -(-columns * bits // 32))
    for row, packed in zip(numbers.tolist(), words.tolist(), strict=True):
        stream = int.from_bytes(b"".join((word % 2**32).to_bytes(4, "little") for word in packed), "little")
        assert stream == sum(number << (bits * i) for i, number in enumerate(row))
    assert torch.equal(unpack(words, bits, columns), numbers.to(torch.uint8))
