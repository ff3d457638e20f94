"""What a call came to: an error that changed nothing, or what the same call gives on plain tensors that share no memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from qsim import _C

Arguments = dict[str, Any]

# Sums run in memory order: another layout may change the last bits.
SUMS = ("fake_quantize_learnable_backward", "round_to_format_counted", "count_format_", "grad_power_sum", "clip_grad_", "scale_grad_")
ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


def is_plain(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized and not x.is_nested and not x._is_zerotensor() and x.device.type == "cpu"


def plain(value: Any) -> Any:
    """The same values in tensors of their own, dense and in the order of their dimensions."""
    if isinstance(value, Tensor):
        if value._is_zerotensor():
            return torch.zeros(value.shape, dtype=value.dtype)
        if not is_plain(value):
            return value
        resolved = value.detach().resolve_neg().resolve_conj()
        return torch.empty(value.shape, dtype=value.dtype).copy_(resolved)
    return [plain(item) for item in value] if isinstance(value, list) else value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for item in value for x in tensors(item)] if isinstance(value, (list, tuple)) else []


def call(operator: torch._ops.OpOverload, arguments: Arguments) -> Any:
    given = operator._schema.arguments
    positional = [arguments[a.name] for a in given if not a.kwarg_only]
    return operator(*positional, **{a.name: arguments[a.name] for a in given if a.kwarg_only})


def call_directly(operator: torch._ops.OpOverload, arguments: Arguments) -> Any:
    """The call through `qsim._C`, where that has the operator."""
    name = operator._schema.name.removeprefix("qsim::") + ("_out" if operator._schema.overload_name == "out" else "")
    function = getattr(_C, name, None)
    return call(operator, arguments) if function is None else function(*(arguments[a.name] for a in operator._schema.arguments))


def written(operator: torch._ops.OpOverload, arguments: Arguments) -> list[Tensor]:
    names = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for name in names for x in tensors(arguments[name])]


def judge(operator: torch._ops.OpOverload, arguments: Arguments) -> str:
    """Makes the call. Returns how it ended; raises AssertionError where it ended wrongly."""
    name = operator._schema.name.removeprefix("qsim::")
    expected_arguments = _plain_arguments(name, arguments)
    before = [plain(x) for x in written(operator, arguments)]
    result, raised = None, None
    try:
        result = call_directly(operator, arguments)
    except ERRORS as error:
        raised = f"{type(error).__name__}: {error}"
    if raised is not None:
        for x, old in zip(written(operator, arguments), before, strict=True):
            assert_equal(x, old, "a call that raises changed what it would have written")
        assert "INTERNAL ASSERT" not in raised, raised
        assert "can't allocate memory" not in raised, raised
        return raised
    given = [x for value in arguments.values() for x in tensors(value)]
    if any(x.device.type == "meta" for x in given):
        return "meta"
    try:
        expected = call(operator, expected_arguments)
    except ERRORS as error:
        raise AssertionError(f"raises on contiguous tensors only: {error}") from error
    found = tensors(result) + written(operator, arguments)
    wanted = tensors(expected) + written(operator, expected_arguments)
    if "with_mask" in name:
        _order_masks(name, arguments, result, found)
    compare = assert_close if name in SUMS else assert_equal
    for x, y in zip(found, wanted, strict=True):
        compare(x, y, "differs from the same call on contiguous tensors")
    if operator._schema.is_mutable is False:
        memory = {x.untyped_storage().data_ptr() for x in given if is_plain(x) and x.numel() > 0}
        assert not memory & {x.untyped_storage().data_ptr() for x in tensors(result)}, "the result lies in an argument"
    return "equal"


def _plain_arguments(name: str, arguments: Arguments) -> Arguments:
    """A mask that is read is in memory order: brought to that of a contiguous tensor."""
    changed = {key: plain(value) for key, value in arguments.items()}
    grad, mask, strides = (arguments.get(key) for key in ("grad", "mask", "strides"))
    if name != "fake_quantize_mask_backward" or not (isinstance(grad, Tensor) and isinstance(mask, Tensor)):
        return changed
    if is_plain(grad) and is_plain(mask) and mask.shape == ((grad.numel() + 7) // 8,):
        with contextlib.suppress(RuntimeError, TypeError):  # strides that no tensor has: the call has to fail
            like = torch.empty_strided(grad.shape, strides, dtype=torch.uint8) if strides is not None else dense_like(grad)
            changed |= {"mask": packed(logical(mask, like)), "strides": None}
    return changed


def dense_like(x: Tensor) -> Tensor:
    """A tensor in whose memory order masks of x are."""
    return torch.empty_strided(x.shape, torch.empty_like(x, device="meta").stride(), dtype=torch.uint8)


def logical(mask: Tensor, like: Tensor) -> Tensor:
    """The bits of a mask in the memory order of `like`, one uint8 per element, by position."""
    bits = (mask.contiguous()[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: like.numel()]
    return torch.as_strided(bits, like.shape, like.stride()) if like.numel() else bits.reshape(like.shape)


def packed(bits: Tensor) -> Tensor:
    flat = torch.nn.functional.pad(bits.flatten(), (0, -bits.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _order_masks(name: str, arguments: Arguments, result: Any, found: list[Tensor]) -> None:
    at = 0 if name.endswith("_mask_") else 1
    found[at] = packed(logical(found[at], dense_like(arguments["x"]) if at == 0 else result[0]))


def assert_equal(x: Tensor, y: Tensor, message: str) -> None:
    """To the bit, but for which NaN it is."""
    if not is_plain(x):
        return
    x, y = (torch.view_as_real(z.detach().resolve_conj()) if z.is_complex() else z.detach().resolve_neg() for z in (x, y))
    assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{message}: {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}"
    same = x == y
    if x.is_floating_point():
        same &= x.double().signbit() == y.double().signbit()
        same |= x.isnan() & y.isnan()
    assert bool(same.all()), f"{message}: {x[~same][:5].tolist()} and {y[~same][:5].tolist()}"


def assert_close(x: Tensor, y: Tensor, message: str) -> None:
    if not x.is_floating_point():
        return assert_equal(x, y, message)
    eps = torch.finfo(x.dtype).eps
    try:
        torch.testing.assert_close(x.detach(), y.detach(), rtol=max(64 * eps, 1e-5), atol=1e-4, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{message}: {error}") from None
