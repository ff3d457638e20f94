"""The grid of a weight in the layout of a product: the quantizer is the oracle."""

import pytest
import torch

import qsim
from qsim.graph.execute.tapped import WeightedCall
from qsim.restoration.grids import Grid
from qsim.restoration.operands import product_of

LAYOUTS = {
    "tensor": {},
    "channel": {"axis": 0},
    "groups": {"axis": 1, "block_size": 4},
    "groups with a rest": {"axis": 1, "block_size": 5},
    "tiles": {"axis": (0, 1), "block_size": (2, 4)},
    "asymmetric": {"axis": 0, "symmetric": False},
    "unsigned": {"axis": 0, "symmetric": False, "signed": False},
    "narrow": {"axis": 0, "narrow": True},
    "float8": {"axis": 0, "dtype": "float8_e4m3fn"},
}
SEEDED = torch.Generator().manual_seed(0)
OPERATIONS = {
    "linear": ((torch.zeros(1, 12), torch.randn(6, 12, generator=SEEDED)), {}),
    "conv2d": ((torch.zeros(1, 24, 3, 3), torch.randn(6, 12, 3, 2, generator=SEEDED)), {"groups": 2}),
    "conv_transpose2d": ((torch.zeros(1, 6, 3, 3), torch.randn(6, 12, 3, 2, generator=SEEDED)), {"groups": 2}),
}


def grid_of(name, layout, bits=4):
    args, kwargs = OPERATIONS[name]
    spec = qsim.TensorSpec(**{"bits": bits, "symmetric": True, "method": "minmax", **LAYOUTS[layout]})
    quantizer = qsim.Quantizer(spec, args[1].shape)
    encoding = quantizer.compute_encoding_from(args[1])
    product = product_of(WeightedCall("w", name, 1, args, kwargs))
    return quantizer, Grid.of(spec, encoding, product), product, args[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_rounds_as_the_quantizer_does(name, layout):
    quantizer, grid, product, weight = grid_of(name, layout)
    values = weight * torch.linspace(0.1, 3, weight.numel()).reshape(weight.shape)  # beyond the grid's ends too
    got = product.from_rows(grid.rounded(product.to_rows(values.double()))).float()
    torch.testing.assert_close(got, quantizer(values), rtol=1e-6, atol=0)
    assert torch.equal(quantizer(got), got)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_cheapest_scales_are_no_worse_than_those_in_use(name, layout):
    _, grid, product, weight = grid_of(name, layout, bits=3)
    target = product.to_rows(weight.double())
    root = torch.randn(product.groups, target.shape[-1], 20, dtype=torch.float64)
    found = grid.cheapest(target, root)

    def cost(each):
        return (each.rounded(target) - target).matmul(root).square().sum()

    assert found.encoding.scale.shape == grid.encoding.scale.shape
    assert torch.equal(found.encoding.zero_point, grid.encoding.zero_point)
    if bool((grid.step == grid.step[..., :1]).all()):  # scales of one row are judged each by itself
        assert cost(found) <= cost(grid)
    same = found.encoding.scale == grid.encoding.scale
    assert not bool(same.all())


def test_each_scale_is_about_the_best_of_all():
    """Brute force over 200 factors, scale by scale, per channel: the search of 18 finds nearly as good ones."""
    _, grid, product, weight = grid_of("linear", "channel", bits=3)
    target, root = product.to_rows(weight.double()), torch.randn(1, 12, 30, dtype=torch.float64)

    def costs(each):
        return ((each.rounded(target) - target) @ root).square().sum((0, 2))

    every = torch.stack([costs(grid.with_factors(torch.full((6,), f))) for f in torch.linspace(0.3, 1.4, 200)])
    found = costs(grid.cheapest(target, root))
    assert bool((found <= costs(grid)).all())
    assert (found / every.amin(0)).mean() < 1.15
