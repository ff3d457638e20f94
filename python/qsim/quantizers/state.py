from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, device, nn

from qsim.numbers.blocks import Axes
from qsim.numbers.spec import range_shape

UNKNOWN_SHAPE = (0,)  # shape of a tensor whose shape is not known yet


class RangeState(nn.Module):
    """A module that holds something per tensor, channel or block: a range, or a scale.

    Its tensors keep their dtypes whatever happens to the model around it: ranges and scales are float32 and counters int64 by
    contract, so ``.half()`` and ``.to(dtype)`` only move them. All of them are in the state dict from construction. Where their
    shape is not known then, they have shape ``(0,)`` until the first tensor or a state dict tells it.

    Parameters
    ----------
    axis, block_size : int or tuple of int, optional
        As in `TensorSpec`.
    shape : sequence of int, optional
        Shape of the tensors to come; without `block_size` only its length along `axis` is used.
    """

    _shape_key: str  # name of a tensor that has the state's shape
    _buffers: dict[str, Tensor]  # type: ignore[assignment]  # none of them is None; this dict is ten times faster than attributes

    def __init__(self, axis: Axes, block_size: Axes, shape: Sequence[int] | None) -> None:
        super().__init__()
        self.axis, self.block_size = axis, block_size
        self._shape_fixed = axis is None or shape is not None
        self.held_shape = range_shape(shape or (), axis, block_size) if self._shape_fixed else None

    def _allocate(self, shape: tuple[int, ...], on: device | None = None) -> None:
        """Make the tensors anew, holding nothing. The constructor of a subclass ends with it."""
        raise NotImplementedError

    def adopt(self, shape: tuple[int, ...]) -> None:
        """Take `shape` as the state's shape; what the state held is dropped."""
        self.held_shape = None if shape == UNKNOWN_SHAPE else shape
        device = getattr(self, self._shape_key).device
        if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None:
            self._allocate(shape, device)
        else:  # inside `torch.func.grad` and `vmap` new tensors are wrappers, which mean nothing behind it
            with torch._C._DisableFuncTorch():
                self._allocate(shape, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + self._shape_key
        if key in state_dict:
            incoming = tuple(state_dict[key].shape)
            fits = len(incoming) == 1 if self.block_size is None else len(incoming) > 0
            if fits and not self._shape_fixed and incoming != self.held_shape:
                self.adopt(incoming)
            present = UNKNOWN_SHAPE if self.held_shape is None else self.held_shape
            if incoming != present:  # nn.Module would let a tensor without dimensions take the first of many
                error_messages: list[str] = args[-1]
                error_messages.append(f"{key} has shape {incoming}; expected {present} (axis={self.axis}, block_size={self.block_size}).")
                return
        super()._load_from_state_dict(state_dict, prefix, *args)
