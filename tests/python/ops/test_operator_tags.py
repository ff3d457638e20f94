"""Every operator carries torch.Tag.pt2_compliant_tag, and is: torch's own checks of registration, of schema, of fake tensors and of
compiled against eager."""

import random

import pytest
import torch
from operator_fuzz.outcome import plain
from operator_fuzz.scene import Scene, operators

from qsim.ops import fake_quantize


def finite(value):
    """torch's checks take NaN for a difference."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return torch.where(value.isfinite(), value, 0.5) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("operator", operators(), ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_pt2_compliant(operator, seed):
    assert torch.Tag.pt2_compliant_tag in operator.tags
    torch.manual_seed(seed)
    drawn = Scene(random.Random(f"{operator} {seed}"), operator).arguments(operator)
    arguments = {name: finite(plain(value)) for name, value in drawn.items()}
    schema = operator._schema.arguments
    positional = tuple(arguments[a.name] for a in schema if not a.kwarg_only)
    torch.library.opcheck(operator, positional, {a.name: arguments[a.name] for a in schema if a.kwarg_only})


def test_inductor_may_choose_layouts():
    """Operators with flexible_layout after producers whose layout Inductor chooses: compiled is eager, strides included."""
    ops, scale, zero_point = torch.ops.qsim, torch.rand(6) + 0.1, torch.zeros(6, dtype=torch.int32)
    tiles = torch.rand(10, 1, 2) + 0.1

    def model(x):
        y = (x.transpose(0, 2) * 2 + 1).transpose(1, 2)
        y = y[:, ::2] - 0.5
        grid = (scale, zero_point, -8, 7)
        q = ops.quantize(y, *grid, axis=2)
        quantized = ops.fake_quantize(y, *grid, axis=2)
        low, high = ops.search_range_data(y, -8, 7, axis=1, method="minmax")
        return [
            quantized,
            ops.fake_quantize_backward(y, y + 1, *grid, axis=2),
            ops.dequantize(q, scale, zero_point, axis=2),
            ops.unpack_int4(ops.pack_int4(q), q.shape),
            ops.round_to_format(y, "float8_e4m3fn", scale=scale, axis=2),
            *ops.choose_qparams(low, high, -8, 7),
            q,
            ops.fake_quantize_dynamic(y, -8, 7, axis=2),
            ops.round_to_format_dynamic(y, "float4_e2m1fn", axis=2, block_size=4, scale_format="float8_e4m3fn"),
            fake_quantize(y, tiles, torch.zeros_like(tiles, dtype=torch.int32), -8, 7, axis=(1, 2), block_size=(2, 3)),
        ]

    x = torch.randn(4, 6, 10)
    with torch.no_grad():
        expected, found = model(x), torch.compile(model, fullgraph=True)(x)
    for y, z in zip(found, expected, strict=True):
        assert y.stride() == z.stride()
        torch.testing.assert_close(y, z, rtol=0, atol=0)
