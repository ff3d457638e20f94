"""Operations written out with their sums: equal to torch's own, and every sum is shown."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qsim.operations.internals import inside, partial_sums

W, B = torch.linspace(0.5, 1.5, 6), torch.linspace(-1, 1, 6)
CALLS = [
    (torch.mean, (), {}),
    (torch.mean, (1,), {"keepdim": True}),
    (Tensor.mean, ((-1, -2),), {}),
    (torch.mean, (), {"axis": 1, "keepdims": True}),
    (torch.sum, (-1,), {}),
    (torch.nanmean, (), {}),
    (torch.nanmean, ((1, -1), True), {}),
    (Tensor.nansum, (1,), {}),
    (torch.softmax, (1,), {}),
    (F.log_softmax, (-1,), {"dtype": torch.float32}),
    (torch.trapezoid, (), {"dx": 0.5, "dim": 1}),
    (torch.trapz, (torch.tensor([0.0, 1, 3, 4, 9, 10, 12]),), {}),
    (F.interpolate, (3,), {"mode": "area"}),
    (Tensor.sum, (), {"dim": 1}),
    (Tensor.cumsum, (-1,), {}),
    (torch.cumsum, (), {"dim": 0}),
    (F.layer_norm, ((5, 7),), {}),
    (F.layer_norm, ((7,), torch.linspace(1, 2, 7), torch.linspace(0, 1, 7), 0.1), {}),
    (F.rms_norm, ((7,), torch.linspace(1, 2, 7)), {}),
    (F.rms_norm, ((7,),), {"eps": 0.1}),
    (F.group_norm, (3, W, B), {}),
    (F.group_norm, (2,), {"eps": 0.1}),
    (F.instance_norm, (), {"weight": W, "bias": B}),
    (torch.var, (), {}),
    (torch.var, (1,), {"correction": 0}),
    (Tensor.var, ((2, 3), False, True), {}),
    (Tensor.var, (False,), {}),
    (torch.std, (-1,), {"keepdim": True}),
    (torch.norm, (), {}),
    (torch.norm, (), {"p": 3, "dim": 1}),
    (torch.linalg.vector_norm, (2, (1, 2)), {"keepdim": True}),
    (torch.linalg.vector_norm, (), {"ord": 3, "dim": 1}),
    (torch.linalg.norm, (), {"ord": "fro", "dim": (1, 2)}),
    (F.normalize, (), {}),
    (F.normalize, (1.0, -1), {}),
    (F.avg_pool2d, (2,), {}),
    (F.avg_pool2d, ((3, 2), 2, 1), {"count_include_pad": False}),
    (F.adaptive_avg_pool2d, (1,), {}),
    (F.adaptive_avg_pool2d, ((2, 3),), {}),
    (F.local_response_norm, (3,), {}),
    (F.local_response_norm, (4, 0.1), {"beta": 0.5, "k": 2.0}),
    (F.tanhshrink, (), {}),
    (F.logsigmoid, (), {}),
    (torch.logaddexp, (torch.linspace(-1, 1, 7),), {}),
    (torch.logaddexp2, (torch.linspace(-1, 1, 7),), {}),
    (torch.expm1, (), {}),
    (torch.log1p, (), {}),
    (torch.special.log1p, (), {}),
    (torch.erfc, (), {}),
    (torch.special.logit, (), {"eps": 0.1}),
    (torch.sinc, (), {}),
    (torch.addcmul, (torch.linspace(1, 2, 7), torch.linspace(2, 3, 7)), {"value": 0.5}),
    (torch.addcdiv, (torch.linspace(1, 2, 7), torch.linspace(2, 3, 7)), {"value": 0.5}),
    (Tensor.addcmul, (torch.linspace(1, 2, 7), torch.linspace(2, 3, 7)), {}),
    (F.lp_pool2d, (4, 2), {}),
    (F.lp_pool2d, (2.0, (3, 2)), {"stride": 1, "ceil_mode": True}),
]

WITHOUT_SUMS = [
    (torch.mean, (), {"dim": -1, "out": None}),
    (F.scaled_dot_product_attention, (torch.linspace(-1, 1, 840).reshape(4, 6, 5, 7),) * 2, {}),
    (F.scaled_dot_product_attention, (torch.linspace(-1, 1, 840).reshape(4, 6, 5, 7),) * 2, {"is_causal": True, "scale": 0.5}),
    (F.scaled_dot_product_attention, (torch.ones(4, 6, 3, 7), torch.rand(4, 6, 3, 2), torch.randn(5, 3)), {}),
    (F.scaled_dot_product_attention, (torch.ones(4, 6, 3, 7), torch.rand(4, 6, 3, 2), torch.eye(5, 3) > 0), {}),
    (F.scaled_dot_product_attention, (torch.ones(4, 2, 3, 7), torch.rand(4, 2, 3, 2)), {"enable_gqa": True}),
    (F.instance_norm, (B, W, W, B, False), {}),
    (Tensor.norm, (float("inf"), -1), {}),
    (F.lp_pool2d, (float("inf"), 2), {}),
    (F.lp_pool2d, (float("-inf"), (2, 3)), {"stride": 1}),
]


def kept(added: Tensor, mean, count: float) -> Tensor:
    return added


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS + WITHOUT_SUMS)
def test_is_what_torch_computes(func, args, kwargs):
    x = torch.randn(4, 6, 5, 7, generator=torch.Generator().manual_seed(1))
    out = inside(func, (x, *args), kwargs)(kept)
    torch.testing.assert_close(out, func(x, *args, **kwargs), equal_nan=True)  # logarithms of negative numbers


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS)
def test_shows_its_sums(func, args, kwargs):
    """Sums that come back as Inf reach the result, and none is larger than as many numbers of the mean magnitude."""
    x = torch.rand(4, 6, 5, 7) + 1
    seen = []

    def overflowing(added, mean, count):
        seen.append(bool((added.abs() <= mean() * count * 1.001)[added.isfinite()].all()))  # what was stored before made others Inf
        return added * torch.inf

    out = inside(func, (x, *args), kwargs)(overflowing)
    assert seen
    assert all(seen)
    assert not torch.equal(out, func(x, *args, **kwargs))


@pytest.mark.parametrize("func", [torch.var_mean, torch.std_mean])
@pytest.mark.parametrize("kwargs", [{}, {"dim": 1}, {"dim": (0, 2), "keepdim": True}, {"dim": -1, "correction": 0}])
def test_pairs_of_moments_are_what_torch_computes(func, kwargs):
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(inside(func, (x,), kwargs)(kept), func(x, **kwargs), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"alpha": 0.25}, {"beta": 0.5}, {"alpha": -2.0, "beta": 0.0}])
def test_a_scaled_product_is_what_torch_computes(options):
    x, a, b = torch.randn(3, 4, 6), torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    torch.testing.assert_close(inside(torch.baddbmm, (x, a, b), options)(kept), torch.baddbmm(x, a, b, **options))


@pytest.mark.parametrize("func", [torch.std, Tensor.norm, F.normalize, torch.linalg.vector_norm])
def test_gradients_where_a_root_is_zero_are_torchs(func):
    x, expected = (torch.ones(2, 5).mul_(torch.tensor([[0.0], [1.0]]) if func is not torch.std else 1.0).requires_grad_() for _ in range(2))
    inside(func, (x, *((2.0, 1) if func is not torch.std else (1,))), {})(kept).sum().backward()
    func(expected, *((2.0, 1) if func is not torch.std else (1,))).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


@pytest.mark.parametrize("func", [torch.cov, torch.corrcoef])
@pytest.mark.parametrize("shape", [(3, 16), (16,)])
def test_moments_are_what_torch_computes(func, shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(inside(func, (x,), {})(kept), func(x))
    torch.testing.assert_close(inside(torch.cov, (x,), {"correction": 0})(kept), torch.cov(x, correction=0))


def test_knows_no_other_operations():
    assert inside(torch.relu, (torch.ones(2),), {}) is None
    assert inside(torch.mean, (torch.ones(2),), {"of": 0}) is None
    assert inside(torch.sum, (torch.ones(2) > 0,), {}) is None
    assert inside(F.interpolate, (torch.ones(1, 2, 3),), {"scale_factor": 2}) is None
    assert inside(torch.cov, (torch.ones(2, 3),), {"fweights": torch.ones(3)}) is None
    for p in ("nuc", 1, 2, 0):
        assert inside(torch.linalg.norm, (torch.ones(2, 3), p), {}) is None
    assert partial_sums(torch.relu, (torch.ones(2),), {}) is None


@pytest.mark.parametrize("signs", ["alternating", "halves"])
def test_partial_sums_against_the_running_sum(signs):
    x = torch.ones(1, 64)
    weight = torch.ones(1, 64)
    weight[0, 32:] = -1
    if signs == "alternating":
        weight[0] = torch.tensor([1.0, -1.0]).repeat(32)
    expected = {"alternating": 0.0, "halves": 32.0}[signs]  # after each eighth
    assert partial_sums(F.linear, (x, weight), {}).item() == expected
    assert partial_sums(torch.matmul, (x, weight.T), {}).item() == expected
    assert partial_sums(F.conv2d, (x[..., None, None], weight[..., None, None], None, 1, 0), {"dilation": 1}).item() == expected
    assert (x @ weight.T).item() == 0.0
