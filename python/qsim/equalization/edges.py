"""Scalable edges: channels that can be scaled where they are produced, and back where they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qsim.equalization.channels import scale_input, scale_output
from qsim.equalization.input_statistics import InputStatistics
from qsim.operations.layers import LAYERS, Layer

# Sums over positions, with the same weights for all channels of a head.
MIXING = frozenset({"matmul", "rmatmul", "bmm", "scaled_dot_product_attention"})


@dataclass(frozen=True, eq=False)
class Edge:
    """A producer, and all the layers that read it.

    Attributes
    ----------
    producer : str
        Path of a convolution, a linear layer or a norm.
    channels : int
        That it returns.
    readers : dict of str to Tensor, int64 [input channels]
        Path of each layer that reads it: which of the producer's channels each input channel is a multiple of, -1 for none of them.
        One channel may be read several times: flattened positions, repeated heads.
    between : frozenset of str
        Names of the functions on the way, other than those that move values.
    offset : float
        What a norm adds to its weight before it multiplies: 1 for Gemma's.
    sliced : bool
        Whether other channels of the producer go elsewhere; `between` then says what lies on either way.
    """

    producer: str
    channels: int
    readers: Mapping[str, Tensor]
    between: frozenset[str] = frozenset()
    offset: float = 0.0
    sliced: bool = False

    @property
    def is_mixing(self) -> bool:
        """Whether an attention's sums over positions lie between, and as far as is known nothing else: they are the same for a head."""
        return bool(self.between & MIXING) and (self.sliced or self.between <= MIXING)

    def source(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.producer)

    def layers(self, model: nn.Module) -> dict[str, Layer]:
        found = {path: model.get_submodule(path) for path in self.readers}
        return {path: m for path, m in found.items() if isinstance(m, LAYERS)}

    def largest(self, model: nn.Module, values: Callable[[str, Layer], Tensor]) -> Tensor:
        """By channel of the producer, the largest of what `values` says of the input channels of its readers; 0 where nothing reads."""
        found = torch.zeros(self.channels, dtype=torch.float64)
        for path, layer in self.layers(model).items():
            index = self.readers[path]
            read = index >= 0
            found.scatter_reduce_(0, index[read], values(path, layer).detach().to("cpu", torch.float64)[read], "amax")
        return found

    def largest_read(self, model: nn.Module, inputs: InputStatistics) -> Tensor:
        """By channel of the producer, the largest magnitude that a reader gets."""
        return self.largest(model, lambda path, _: inputs.largest[path])

    def scale(self, model: nn.Module, factors: Tensor) -> None:
        """Divide the producer's channels by `factors`, float64 [channels], all above 0, and multiply what the readers do with them."""
        scale_output(self.source(model), 1 / factors, self.offset)
        for path, layer in self.layers(model).items():
            scale_input(layer, self.spread(path, factors))

    def spread(self, path: str, values: Tensor, others: float = 1.0) -> Tensor:
        """`values` of the producer's channels by the input channels of a reader; `others` for those of others."""
        index = self.readers[path]
        return torch.where(index >= 0, values[index.clamp_min(0)], others)
