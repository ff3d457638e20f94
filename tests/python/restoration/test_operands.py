"""Operations as products of matrices: what PyTorch computes is the oracle."""

import math

import pytest
import torch
import torch.nn.functional as F

from qsim.graph.execute.tapped import WeightedCall
from qsim.restoration.operands import WeightProduct, argument, product_of, with_arguments

g = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=g)


CASES = {
    "linear": (F.linear, 1, (normal(5, 7), normal(3, 7), normal(3)), {}),
    "linear of a sequence": (F.linear, 1, (normal(2, 4, 7), normal(3, 7)), {}),
    "linear of a vector": (F.linear, 1, (normal(7), normal(3, 7)), {}),
    "conv1d": (F.conv1d, 1, (normal(2, 4, 9), normal(6, 4, 3), normal(6)), {"stride": 2, "padding": 1}),
    "conv2d": (F.conv2d, 1, (normal(2, 4, 9, 8), normal(6, 4, 3, 2), normal(6), (2, 1), (0, 1), (1, 2)), {}),
    "conv2d in groups": (F.conv2d, 1, (normal(2, 4, 7, 8), normal(6, 2, 3, 3)), {"groups": 2, "padding": 1}),
    "conv2d depthwise": (F.conv2d, 1, (normal(3, 4, 7, 8), normal(4, 1, 3, 3), normal(4), 1, 1, 1, 4), {}),
    "conv2d same, uneven": (F.conv2d, 1, (normal(2, 4, 7, 8), normal(5, 4, 4, 2)), {"padding": "same", "dilation": (2, 2)}),
    "conv2d valid": (F.conv2d, 1, (normal(2, 4, 7, 8), normal(5, 4, 3, 3)), {"padding": "valid"}),
    "conv2d without a batch": (F.conv2d, 1, (normal(4, 7, 8), normal(5, 4, 3, 3)), {}),
    "conv2d, strided input": (F.conv2d, 1, (normal(8, 7, 4, 2).permute(3, 2, 1, 0), normal(5, 4, 3, 3)), {"padding": 1}),
    "conv3d": (F.conv3d, 1, (normal(1, 2, 5, 4, 6), normal(3, 2, 2, 3, 2), normal(3)), {"stride": (1, 2, 1)}),
    "conv_transpose1d": (F.conv_transpose1d, 1, (normal(2, 4, 5), normal(4, 3, 3), normal(3)), {"stride": 2, "padding": 1}),
    "conv_transpose2d": (
        F.conv_transpose2d,
        1,
        (normal(2, 4, 5, 3), normal(4, 3, 3, 2), normal(6)),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 2, "dilation": (2, 1)},
    ),
    "conv_transpose2d, more padding than kernel": (F.conv_transpose2d, 1, (normal(1, 2, 6, 6), normal(2, 3, 1, 1)), {"padding": 1}),
    "matmul": (torch.matmul, 1, (normal(2, 5, 7), normal(7, 3)), {}),
    "mm": (torch.mm, 1, (normal(5, 7), normal(7, 3)), {}),
    "addmm": (torch.addmm, 2, (normal(3), normal(5, 7), normal(7, 3)), {}),
}


def call_of(name):
    func, slot, args, kwargs = CASES[name]
    return func, WeightedCall("w", func.__name__, slot, args, kwargs)


@pytest.mark.parametrize("name", CASES)
def test_rows_times_columns_is_what_the_function_computes(name):
    func, call = call_of(name)
    product = product_of(call)
    assert isinstance(product, WeightProduct)
    weight = argument(call, call.slot)
    got = product.to_rows(weight) @ product.columns(10**9, g)
    if product.bias is not None:
        got = got + argument(call, product.bias).reshape(product.groups, -1, 1)
    expected = func(*call.args, **call.kwargs)
    if func.__name__.startswith("conv"):
        rows = expected.reshape(-1, *expected.shape[-(weight.dim() - 1) :]).transpose(0, 1).reshape(product.groups, got.shape[1], -1)
    else:
        rows = expected.reshape(-1, expected.shape[-1]).T[None]
    assert product.places == got.shape[2]
    torch.testing.assert_close(got, rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_weights_come_back_from_rows(name):
    product = product_of(call_of(name)[1])
    weight = normal(*product.shape)
    rows = product.to_rows(weight)
    assert rows.dim() == 3
    assert rows.shape[0] == product.groups
    assert torch.equal(product.from_rows(rows), weight)


@pytest.mark.parametrize("name", CASES)
def test_a_choice_of_columns_is_a_choice_and_the_same_for_the_same_numbers(name):
    product = product_of(call_of(name)[1])
    every = product.columns(10**9, g)
    few = min(4, product.places)
    chosen, again = (product.columns(few, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(chosen, again)
    found = (chosen[..., None] == every[:, :, None]).all(1).any(-1)
    assert chosen.shape[2] == few
    assert bool(found.all())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (WeightedCall("w", "embedding", 1, (torch.tensor([1]), normal(3, 4)), {}), "looks up rows"),
        (WeightedCall("w", "matmul", 0, (normal(3, 4), normal(4, 2)), {}), "first operand"),
        (WeightedCall("w", "matmul", 1, (normal(2, 3, 4), normal(2, 4, 2)), {}), "3 dimensions"),
        (WeightedCall("w", "einsum", 1, ("ij,jk->ik", normal(3, 4), normal(4, 2)), {}), "einsum is no product"),
    ],
)
def test_what_is_no_product_says_why(call, reason):
    assert reason in product_of(call)


@pytest.mark.parametrize("bias", [None, normal(3)])
def test_keywords_and_a_missing_bias(bias):
    call = WeightedCall("w", "linear", "weight", (normal(5, 7),), {"weight": normal(3, 7), "bias": bias})
    product = product_of(call)
    assert product.bias == (None if bias is None else "bias")
    args, kwargs = with_arguments(call, {"weight": torch.zeros(3, 7)})
    assert args is not call.args
    assert not kwargs["weight"].any()
    assert kwargs["bias"] is bias
    assert math.prod(product.shape) == 21
