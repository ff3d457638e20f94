"""What modules compute with their weights, tried on the call at hand: scaling asks for what a module does, not for its class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qsim.batch_norm.own_forward import is_torchs_own
from qsim.equalization.channels import along, input_range, scale_input, scale_output
from qsim.graph.record.own_arguments import own_arguments
from qsim.operations.layers import LAYERS, Layer, channel_axis
from qsim.runs.snapshot import rewriting


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer computes what its class in torch does."""
    return isinstance(layer, LAYERS) and is_torchs_own(layer, "forward") and is_torchs_own(layer, "_conv_forward")


def output_form(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> tuple[int, float] | None:
    """The axis of a producer's channels, and what a norm adds to its weight before it multiplies; None if it does not scale so."""
    if isinstance(module, LAYERS):
        axes, offsets = [channel_axis(module)], [0.0]
        if is_plain(module):
            return axes[0], 0.0
    else:
        channels = len(getattr(module, "weight", ()))
        axes, offsets = [axis for axis in (-1, 1) if axis < out.dim() and out.shape[axis] == channels], [0.0, 1.0]
    return next(((a, o) for a in axes for o in offsets if _is_scaled(module, args, kwargs, out, a, o)), None)


def _is_scaled(module: nn.Module, args: Any, kwargs: Any, out: Tensor, axis: int, offset: float) -> bool:
    """Whether a module returns `out` with scaled channels when its weight and bias are."""
    factors = _powers(out.shape[axis])
    with put_back(module):
        scale_output(module, factors, offset)
        found = _forward(module, args, kwargs)
    return _agree(found, out * along(factors, out, axis))


def reads_scaled(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer that reads scaled channels returns the same when its weight is scaled the other way."""
    if is_plain(layer):
        return True
    x, axis = (args[0], channel_axis(layer)) if args else (None, -1)
    if x is None or x.shape[axis] != len(input_range(layer)):
        return False
    expected = _forward(layer, args, kwargs)
    factors = _powers(x.shape[axis])
    with put_back(layer):
        scale_input(layer, 1 / factors)
        found = _forward(layer, (x * along(factors, x, axis), *args[1:]), kwargs)
    return _agree(found, expected)


def _forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module returns, which may overwrite what it likes of its arguments."""
    args, kwargs = own_arguments(module, (args, kwargs))[0]
    return module.forward(*args, **kwargs)


def _powers(channels: int) -> Tensor:
    return ((torch.arange(channels) % 5) - 2.0).exp2()


def _agree(found: Any, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Undo what the body did to the contents of the module's own parameters."""
    saved = [(t, t.detach().clone()) for t in module.parameters(recurse=False)]
    try:
        yield
    finally:
        with rewriting():
            for t, contents in saved:
                t.copy_(contents)
