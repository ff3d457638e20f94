from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.numbers.blocks import ranges_shape
from qsim.numbers.encoding import Encoding, grid_of
from qsim.numbers.spec import TensorSpec

Blocks = int | tuple[int, int] | None  # columns of a group, or rows and columns of a tile


@dataclass(frozen=True)
class Scheme:
    """How a weight is packed, without its numbers: what the config of a checkpoint says of it.

    Attributes
    ----------
    bits : int
    block_size : int, pair of int, or None
        As in `PackedWeight`.
    symmetric : bool
        Whether all zero points are in the middle of the grid.
    in_order : bool
        Whether groups follow the columns.
    per_tensor : bool
        Whether one scale is for all.
    is_float : bool
        Whether elements are float8.
    activation : TensorSpec, optional
        How what it is multiplied with is quantized, without what chose the range.
    """

    bits: int
    block_size: Blocks
    symmetric: bool
    in_order: bool
    per_tensor: bool = False
    is_float: bool = False
    activation: TensorSpec | None = None


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight as a checkpoint stores it: integers, and for each group of columns a scale and a zero point, as they are in the file.

    It stands for ``(integers - zero_point) * scale - minimum``.

    Parameters
    ----------
    integers : Tensor, shape ``[..., columns]``, int8, uint8 or float8_e4m3fn
        Output channels first, unpacked. Of float8 the numbers that scales are multiplied with.
    scale : Tensor, shape ``[..., groups]``, a float type
        Of any sign: GGUF has negative ones. Of shape ``[1, 1]`` where one is for all of a matrix, of tiles ``[tiles down, tiles across]``.
        Before these stand the axes of `integers` that tell matrices of a stack apart.
    zero_point : Tensor, int32, shape of `scale`
    bits : int
        Width of an integer in the file.
    block_size : int or pair of int, optional
        Columns of a group, or rows and columns of a tile; the last may be short. None where a row, or all, has one scale.
    order : Tensor, int32, shape ``[columns]``, optional
        The group of each column, where they do not follow each other: GPTQ's ``g_idx`` (``desc_act=True``).
    minimum : Tensor, float32, shape of `scale`, optional
        What GGUF's Q4_K takes off, in place of a zero point.

    Examples
    --------
    >>> scale, zero_point = torch.tensor([[0.5], [1.0]]), torch.tensor([[8], [8]], dtype=torch.int32)
    >>> weight = PackedWeight(torch.tensor([[8, 9], [7, 15]], dtype=torch.uint8), scale, zero_point, 4, 2)
    >>> weight.dequantize().tolist()
    [[0.0, 0.5], [-1.0, 7.0]]
    >>> weight.encoding.dtype, weight.group_size, weight.middle, weight.scheme.symmetric, weight.is_float
    ('uint4', 2, 8, True, False)
    >>> one = PackedWeight(torch.ones(2, 2, dtype=torch.int8), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), 8)
    >>> one.is_per_tensor, one.is_tiled
    (True, False)
    """

    integers: Tensor
    scale: Tensor
    zero_point: Tensor
    bits: int
    block_size: Blocks = None
    order: Tensor | None = None
    minimum: Tensor | None = None

    def __post_init__(self) -> None:
        columns = self.integers.shape[-1]
        groups = (*self.integers.shape[:-1], -(-columns // self.group_size))
        if isinstance(self.block_size, tuple):
            if self.integers.dim() < 2 or self.order is not None:
                raise ValueError(f"PackedWeight: got block_size={self.block_size}; expected tiles of a matrix, without an order of columns")
            groups = ranges_shape(self.integers.shape, dict(zip(self._last_axes, self.block_size, strict=True)))
        for name in ("scale", "zero_point", "minimum"):
            given: Tensor | None = getattr(self, name)
            if given is not None and given.shape != groups and not (self.is_per_tensor and given.shape == self.scale.shape):
                raise ValueError(f"PackedWeight: {name} has shape {tuple(given.shape)}; expected {groups}")
        if self.order is not None:
            expected = torch.arange(columns) // self.group_size
            if self.order.shape != (columns,) or not torch.equal(self.order.sort().values.long(), expected):
                raise ValueError(f"PackedWeight: order does not put {self.group_size} columns into each of {groups[-1]} groups")

    @property
    def is_per_tensor(self) -> bool:
        """Whether one scale is for all rows of a matrix, each of a stack; a single row has its own."""
        shape = self.integers.shape
        if self.block_size is not None or self.scale.dim() != len(shape):
            return False
        return self.scale.shape == (*shape[:-2], 1, 1)[-len(shape) :] and shape[max(len(shape) - 2, 0)] > 1

    @property
    def _last_axes(self) -> tuple[int, int]:
        """The axes of a matrix."""
        return self.integers.dim() - 2, self.integers.dim() - 1

    @property
    def group_size(self) -> int:
        """Columns of a group or tile; all of them where a row has one scale."""
        size = self.block_size[1] if isinstance(self.block_size, tuple) else self.block_size
        return self.integers.shape[-1] if size is None else size

    @property
    def is_tiled(self) -> bool:
        """Whether several rows share the scales of their columns."""
        return isinstance(self.block_size, tuple)

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 1 << (self.bits - 1) if self.integers.dtype == torch.uint8 else 0

    @property
    def is_float(self) -> bool:
        """Whether its elements are float8."""
        return self.integers.is_floating_point()

    @property
    def scheme(self) -> Scheme:
        """How it is packed."""
        symmetric = not bool((self.zero_point != self.middle).any())
        return Scheme(self.bits, self.block_size, symmetric, self.order is None, self.is_per_tensor, self.is_float)

    def dequantize(self) -> Tensor:
        """What it stands for, computed in float32: shape of `integers`."""
        group = torch.arange(self.integers.shape[-1]) // self.group_size if self.order is None else self.order.long()
        zero_point, scale = self.zero_point.float()[..., group], self.scale.float()[..., group]
        if isinstance(self.block_size, tuple):
            row = torch.arange(self.integers.shape[-2]) // self.block_size[0]
            zero_point, scale = zero_point[..., row, :], scale[..., row, :]
        value = (self.integers.float() - zero_point).mul_(scale)
        return value if self.minimum is None else value.sub_(self.minimum[..., group])

    @property
    def encoding(self) -> Encoding:
        """As a quantizer holds it: with ``axis=0`` where a row has one scale, without where all have, else with blocks along the last axis
        or tiles along both. Of a stack of matrices with ``axis=0`` where each has one scale, with a block a row where each row has.

        Raises
        ------
        ValueError
            No simulation has such a grid: a scale that is not positive, groups out of order, minima.
        """
        if self.order is not None:
            raise ValueError("its groups are not in the order of the columns (desc_act=True), as no quantizer has them")
        if self.minimum is not None:
            raise ValueError("its groups have minima in float in place of zero points, as no quantizer has them")
        grid = f"{'int' if self.integers.dtype == torch.int8 else 'uint'}{self.bits}"
        if self.is_float:
            grid = str(self.integers.dtype).removeprefix("torch.")
        scale = self.scale.float()
        if self.is_per_tensor:
            stacked = tuple(scale.shape[:-2])
            axis = 0 if len(stacked) == 1 else None
            return Encoding(scale.reshape(stacked), self.zero_point.reshape(stacked), *grid_of(grid), axis, None, grid)
        if isinstance(self.block_size, tuple):
            return Encoding(scale, self.zero_point, *grid_of(grid), self._last_axes, self.block_size, grid)
        if self.block_size is None and self.scale.dim() == 2:
            return Encoding(scale[:, 0], self.zero_point[:, 0], *grid_of(grid), 0, None, grid)
        return Encoding(scale, self.zero_point, *grid_of(grid), self.integers.dim() - 1, self.group_size, grid)


def left_in_float(linear: Sequence[str] | None, packed: Collection[str]) -> list[str]:
    """The linear layers that are not packed, where all of them are known.

    Examples
    --------
    >>> left_in_float(["a", "b"], {"a"}), left_in_float(None, {"a"})
    (['b'], [])
    """
    return [module for module in linear or () if module not in packed]
