"""Which tensors distillation leaves as they are."""

from __future__ import annotations

from torch import Tensor, nn


def is_frozen(t: Tensor | None) -> bool:
    """Whether it is a parameter that is to keep its values: ``requires_grad_(False)``. Buffers, which never require a gradient, are not.

    Examples
    --------
    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.bias.requires_grad_(False)
    >>> is_frozen(layer.weight), is_frozen(layer.bias), is_frozen(None)
    (False, True, False)
    """
    return isinstance(t, nn.Parameter) and not t.requires_grad
