"""Fingerprints of tensors: of equal contents equal, wherever these lie; of others others, be it the order alone."""

import pytest
import torch

from qsim.runs.fingerprint import fingerprint

SHAPES = [(5,), (3, 12), (7, 3), (6, 4096), (4097, 6), (2, 3, 2048)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_counts(shape, dtype):
    x = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = [x.flip(0), x.flip(-1), x.roll(1, 0), x.flatten().flip(0).view(shape)]
    swapped = x.flatten().clone()
    swapped[[0, -1]] = torch.tensor([1, 2], dtype=dtype)
    changed += [swapped.clone().view(shape)]
    swapped[[0, -1]] = swapped[[-1, 0]]
    changed += [swapped.view(shape)]
    found = [fingerprint(t.contiguous()) for t in changed]
    for t, print_ in zip(changed, found, strict=True):
        assert (print_ == fingerprint(x)) == torch.equal(t, x)
    assert found[-1] != found[-2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_contents_are_equal_wherever_they_lie(shape, dtype):
    x = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for before in (1, 2, 3):
        elsewhere = torch.cat([torch.zeros(before, dtype=dtype), x.flatten()])[before:].view(shape)
        assert fingerprint(elsewhere) == fingerprint(x)
    assert fingerprint(x.unsqueeze(-1).expand(*shape, 2)[..., 0]) == fingerprint(x)
    assert fingerprint(x.to("meta")) == ()
