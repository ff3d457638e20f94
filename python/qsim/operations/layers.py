"""Convolutions and linear layers of `torch.nn`: where their channels are."""

from __future__ import annotations

from torch import Tensor, nn

Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Linear
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED, nn.Linear)

# Dimensions of batched input and output, by function: with these the channels are on axis 1, which is the axis that BatchNorm normalizes.
DIMS = {"linear": 2, **{f"{kind}{n}d": n + 2 for kind in ("conv", "conv_transpose") for n in (1, 2, 3)}}


def by_channel(weight: Tensor, layer: Layer) -> Tensor:
    """A view of the weight as [group, output channel in the group, input channel in the group, tap]."""
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    view = weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return view.transpose(1, 2) if isinstance(layer, TRANSPOSED) else view


def channel_axis(layer: Layer) -> int:
    """The axis of the channels in what a layer reads and returns, counted from the end: batches may be missing, or be many."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)
