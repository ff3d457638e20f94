from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsim.call_fit import tells_construction
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.numbers.two_levels import TwoLevels

_OF_TWO_LEVELS = ("scale_levels", "super_block")


def grid_of(dtype: str) -> tuple[int, int]:
    """Smallest and largest finite number of a storage type: "int8", "uint4", ... or a float format."""
    if dtype in FLOAT_FORMATS:
        largest = int(FLOAT_FORMATS[dtype].largest)
        return -largest, largest
    match = re.fullmatch(r"(u?)int([1-9]\d?)", dtype)
    if match is None:
        raise ValueError(f"Encoding: got dtype={dtype!r}; expected intN, uintN, or one of {', '.join(FLOAT_FORMATS)}")
    bits = int(match[2])
    return (0, 2**bits - 1) if match[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@tells_construction("")
@dataclass(frozen=True, eq=False)
class Encoding:
    """What an exported model needs to know about a quantized tensor: ``x ~ (q - zero_point) * scale``.

    Parameters
    ----------
    scale : Tensor, float32 or float64
        Positive and finite. Shape ``()`` per tensor, ``[C]`` per channel, the tensor's shape with ``ceil(n / block_size)`` along
        `axis` per block.
    zero_point : Tensor, int32, shape of `scale`
        Within the grid.
    quant_min, quant_max : int
        Smallest and largest number of the grid; of a float format, of all its finite numbers.
    axis, block_size : int or tuple of int, optional
        Which elements share a scale, as in `TensorSpec`.
    dtype : str
        What the tensor is stored as: "int8", "uint8", "int4", "int16", "float8_e4m3fn" (with a scale), "float16" (whose scale is 1) ...
    scale_levels, super_block : int, optional
        Of scales that are integers beside a float for each super-block, as in `TensorSpec`: `two_levels` tells these apart.

    Examples
    --------
    >>> encoding = Encoding(torch.tensor(0.5), torch.tensor(-128, dtype=torch.int32), -128, 127)
    >>> encoding.min.item(), encoding.max.item(), encoding.symmetric
    (0.0, 127.5, False)
    """

    scale: Tensor
    zero_point: Tensor
    quant_min: int
    quant_max: int
    axis: int | tuple[int, ...] | None = None
    block_size: int | tuple[int, ...] | None = None
    dtype: str = "int8"
    scale_levels: int | None = None
    super_block: int | None = None

    def __post_init__(self) -> None:
        for name in ("axis", "block_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)  # JSON has no tuples
        scale, zero_point = self.scale, self.zero_point
        if scale.dtype not in (torch.float32, torch.float64) or zero_point.dtype != torch.int32:
            raise TypeError(
                f"Encoding: got scale of {scale.dtype} and zero_point of {zero_point.dtype}; expected float32 or float64, and int32"
            )
        if scale.shape != zero_point.shape:
            raise ValueError(f"Encoding: scale has shape {tuple(scale.shape)} and zero_point {tuple(zero_point.shape)}; expected the same")
        if self.quant_min >= self.quant_max:
            raise ValueError(f"Encoding: got quant_min={self.quant_min}, quant_max={self.quant_max}; expected quant_min < quant_max")
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError("Encoding: every scale must be positive and finite; 0, negative, Inf or NaN found")
        low, high = grid_of(self.dtype)
        if not low <= self.quant_min <= self.quant_max <= high:
            raise ValueError(f"Encoding: the grid [{self.quant_min}, {self.quant_max}] does not fit into {self.dtype}")
        # As floats: the grid of bfloat16 ends beyond every integer type.
        if not bool(((zero_point >= float(self.quant_min)) & (zero_point <= float(self.quant_max))).all()):
            raise ValueError(f"Encoding: every zero_point must lie within [{self.quant_min}, {self.quant_max}]")

        if self.scale_levels is None and self.super_block is None:
            return
        size, blocks = self.block_size, self.super_block
        known = isinstance(self.axis, int) and isinstance(size, int) and self.scale_levels is not None and self.scale_levels > 0
        if not known or (blocks is not None and (blocks < 1 or blocks % size != 0)):  # type: ignore[operator]
            raise ValueError(
                f"Encoding: got scale_levels={self.scale_levels}, super_block={blocks} with axis={self.axis}, block_size={size}; expected "
                "levels of 1 and more, blocks along one axis, and a multiple of block_size or None"
            )

    @property
    def min(self) -> Tensor:
        """Smallest value that the grid holds, of `scale`'s shape."""
        return self._value(self.quant_min)

    @property
    def max(self) -> Tensor:
        """Largest value that the grid holds, of `scale`'s shape."""
        return self._value(self.quant_max)

    def _value(self, number: float) -> Tensor:
        if self.dtype in FLOAT_FORMATS and number in grid_of(self.dtype):
            number = FLOAT_FORMATS[self.dtype].largest * (1 if number > 0 else -1)  # 7.5 of float6_e2m3fn
        return ((float(number) - self.zero_point.double()) * self.scale).to(self.scale.dtype)

    @property
    def symmetric(self) -> bool:
        """Whether every zero point lies in the middle of the grid."""
        return bool((self.zero_point == round((self.quant_min + self.quant_max) / 2)).all())

    @property
    def two_levels(self) -> TwoLevels | None:
        """How scales are stored, if as integers beside floats.

        Examples
        --------
        >>> zero = torch.zeros(1, 2, dtype=torch.int32)
        >>> encoding = Encoding(torch.tensor([[8.0, 1.5]]), zero, -8, 7, 1, 32, "int4", scale_levels=16)
        >>> [t.tolist() for t in encoding.two_levels.split(encoding.scale)]
        [[[16, 3]], [[0.5]]]
        """
        if self.scale_levels is None:
            return None
        assert isinstance(self.axis, int)
        assert isinstance(self.block_size, int)
        return TwoLevels(self.scale_levels, self.axis, None if self.super_block is None else self.super_block // self.block_size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Encoding):
            return NotImplemented
        tensors = [(self.scale, other.scale), (self.zero_point, other.zero_point)]
        same = all(mine.dtype == theirs.dtype and torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in tensors)
        return same and self._plain_fields() == other._plain_fields()

    __hash__ = None  # type: ignore[assignment]  # equality looks at the values of tensors, which can change

    def _plain_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("scale", "zero_point")}

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON has them: tensors as nested lists, and the dtype of `scale`. Lossless, except for the device.

        Examples
        --------
        >>> encoding = Encoding(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7)
        >>> Encoding.from_dict(encoding.to_dict()).quant_max
        7
        """
        precision = str(self.scale.dtype).removeprefix("torch.")
        return {
            "scale": self.scale.tolist(),
            "zero_point": self.zero_point.tolist(),
            "scale_dtype": precision,
            **{name: value for name, value in self._plain_fields().items() if value is not None or name not in _OF_TWO_LEVELS},
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Encoding:
        """Inverse of `to_dict`. A missing or unknown key is an error that names it."""
        names = {f.name for f in dataclasses.fields(cls)} | {"scale_dtype"}
        if unknown := sorted(set(fields) - names):
            raise ValueError(f"Encoding: got unknown field {unknown[0]!r}; expected {', '.join(sorted(names))}")
        if missing := sorted(names - set(fields) - set(_OF_TWO_LEVELS)):
            raise ValueError(f"Encoding: field {missing[0]!r} is missing")
        precisions = {"float32": torch.float32, "float64": torch.float64}
        plain = dict(fields)
        name = plain.pop("scale_dtype")
        if name not in precisions:
            raise ValueError(f"Encoding: got scale_dtype={name!r}; expected 'float32' or 'float64'")
        scale = torch.tensor(plain.pop("scale"), dtype=precisions[name])
        zero_point = torch.tensor(plain.pop("zero_point"), dtype=torch.int32)
        return cls(scale, zero_point, **plain)
