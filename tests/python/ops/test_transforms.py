"""Operators under torch.vmap and torch.func: what a loop over the samples computes, values and gradients."""

import warnings

import pytest
import torch
from torch import Tensor

from qsim import _library as _library  # registers the operators

OPS = torch.ops.qsim
ZERO = torch.tensor(3, dtype=torch.int32)
SCALE = torch.tensor(0.3)
CHANNELS, ZEROS = torch.rand(5) + 0.1, torch.arange(5, dtype=torch.int32)
BLOCKS = torch.rand(2, 5) + 0.1
X = torch.randn(4, 3, 5)

# Of a sample of shape (3, 5). Each has one rule for values, and one for gradients.
CALLS = {
    "per tensor": lambda x: OPS.fake_quantize(x, SCALE, ZERO, -8, 7),
    "per channel": lambda x: OPS.fake_quantize(x, CHANNELS, ZEROS, -8, 7, axis=1),
    "per channel from the end": lambda x: OPS.fake_quantize(x, CHANNELS, ZEROS, -8, 7, axis=-1),
    "per block": lambda x: OPS.fake_quantize(x, BLOCKS, torch.zeros(2, 5, dtype=torch.int32), -8, 7, axis=0, block_size=2),
    "of a view": lambda x: OPS.fake_quantize(x.t(), CHANNELS, ZEROS, -8, 7, axis=0),
    "of a result": lambda x: OPS.fake_quantize(x * 1.5, SCALE, ZERO, -8, 7),
    "a format": lambda x: OPS.round_to_format(x * 300, "float8_e4m3fn"),
    "a format of a view": lambda x: OPS.round_to_format(x.t() * 300, "float8_e4m3fn"),
    "a format with scales": lambda x: OPS.round_to_format(x * 300, "float8_e4m3fn", scale=CHANNELS, axis=1),
    "a scale from each row": lambda x: OPS.fake_quantize_dynamic(x, -8, 7, axis=1, symmetric=True),
    "a scale from each sample": lambda x: OPS.fake_quantize_dynamic(x, -8, 7, symmetric=True),
    "a format with a scale from each row": lambda x: OPS.round_to_format_dynamic(x, "float8_e4m3fn", axis=1),
}
FIXED = {name: call for name, call in CALLS.items() if "from each" not in name}
every = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
every_fixed = pytest.mark.parametrize("call", FIXED.values(), ids=list(FIXED))


def weighted(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()


def gradient(call, x: Tensor) -> Tensor:
    """By the tape of eager mode."""
    x = x.clone().requires_grad_()
    weighted(call(x)).backward()
    return x.grad


@every
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_map_is_a_loop(call, dim):
    x = X.movedim(0, dim).clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of torch: there is no batching rule, and a performance drop
        y = torch.vmap(call, in_dims=dim)(x)
    assert torch.equal(y, torch.stack([call(sample) for sample in x.unbind(dim)]))


@every
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_go_through_a_map(call, dim):
    x = X.movedim(0, dim).clone()
    assert torch.equal(
        gradient(torch.vmap(call, in_dims=dim), x), gradient(lambda x: torch.stack([call(sample) for sample in x.unbind(dim)]), x)
    )


@every
def test_maps_inside_maps(call):
    x = torch.randn(2, 3, 3, 5)
    y = torch.vmap(torch.vmap(call, in_dims=1), in_dims=0)(x.movedim(1, 2))
    assert torch.equal(y, torch.stack([torch.stack([call(sample) for sample in rows]) for rows in x]))


@every_fixed
def test_functional_gradients(call):
    assert torch.equal(torch.func.grad(lambda x: weighted(call(x)))(X[0]), gradient(call, X[0]))


@every_fixed
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_each_sample(call, dim):
    x = X.movedim(0, dim).clone()
    found = torch.vmap(torch.func.grad(lambda x: weighted(call(x))), in_dims=dim)(x)
    assert torch.equal(found, torch.stack([gradient(call, sample) for sample in x.unbind(dim)]))


@every_fixed
def test_jacobians(call):
    x = X[0]
    rows = torch.autograd.functional.jacobian(call, x)
    assert torch.equal(torch.func.jacrev(call)(x), rows)


def test_the_gradient_of_a_scale_of_each_sample():
    def loss(scale: Tensor, x: Tensor) -> Tensor:
        return weighted(OPS.fake_quantize(x, scale, ZERO, -8, 7, grad_factor=0.5))

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(SCALE, X)
    assert torch.equal(
        found, torch.stack([gradient(lambda s, x=x: OPS.fake_quantize(x, s, ZERO, -8, 7, grad_factor=0.5), SCALE) for x in X])
    )


def test_a_scale_of_each_sample():
    x, scales = torch.randn(4, 6), torch.rand(4) + 0.1
    y = torch.vmap(lambda a, s: OPS.fake_quantize(a, s, ZERO, -8, 7))(x, scales)
    assert torch.equal(y, torch.stack([OPS.fake_quantize(a, s, ZERO, -8, 7) for a, s in zip(x, scales, strict=True)]))
    shared = torch.vmap(lambda s: OPS.fake_quantize(x, s, ZERO, -8, 7))(scales)
    assert torch.equal(shared, torch.stack([OPS.fake_quantize(x, s, ZERO, -8, 7) for s in scales]))


def test_in_place():
    given = X.clone()
    expected = torch.stack([OPS.fake_quantize(sample, SCALE, ZERO, -8, 7) for sample in given.unbind(1)], 1)
    torch.vmap(lambda t: OPS.fake_quantize_(t, SCALE, ZERO, -8, 7), in_dims=1)(given)
    assert torch.equal(given, expected)


def test_what_is_quantized_to_integers():
    def there_and_back(x: Tensor) -> Tensor:
        q = OPS.quantize(x, CHANNELS, ZEROS, -8, 7, axis=1, dtype=torch.int8)
        return OPS.dequantize(q, CHANNELS, ZEROS, axis=1)

    assert torch.equal(torch.vmap(there_and_back, in_dims=1)(X.movedim(0, 1)), torch.stack([there_and_back(x) for x in X]))


def running() -> list[Tensor]:
    on = torch.ones((), dtype=torch.uint8)
    ranges = torch.full((), torch.inf), torch.full((), -torch.inf), torch.zeros(4, dtype=torch.int64)
    return [on, on.clone(), *ranges, torch.ones(()), torch.zeros((), dtype=torch.int32)]


def test_a_running_range_follows_all_samples_at_once():
    def call(x: Tensor, state: list[Tensor]) -> Tensor:
        return OPS.observe_fake_quantize(x, *state, -128, 127, averaging=0.1)

    mapped, whole = running(), running()
    y = torch.vmap(lambda x: call(x, mapped), in_dims=1)(X.movedim(0, 1))
    assert torch.equal(y, call(X, whole))
    assert all(map(torch.equal, mapped, whole))
    with pytest.raises(NotImplementedError, match=r"inside a transform of torch\.func"):
        torch.func.grad(lambda x: call(x, mapped).sum())(X)


def test_one_tensor_is_not_written_for_each_sample():
    x = torch.randn(3)
    with pytest.raises(NotImplementedError, match="'x' would be written once for each sample"):
        torch.vmap(lambda scale: OPS.fake_quantize_(x, scale, ZERO, -8, 7))(torch.rand(4) + 0.1)
