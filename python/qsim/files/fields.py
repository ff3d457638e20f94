"""Values of an entry, each checked for type, range and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qsim.files.file_place import FilePlace, listed, shown
from qsim.numbers.encoding import Encoding

MAX_DIMS = 8
MAX_NAME = 4096
MAX_BITS = 32
MAX_ENTRIES = 1 << 17  # a kilobyte each
_INT32 = torch.iinfo(torch.int32)


def is_integer(value: Any) -> bool:
    """A number without fraction; writers that compute in floats have -114.0 for -114."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def checked_name(value: Any, place: FilePlace) -> str:
    """`value` if it can name a tensor."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise place.wanted("the name of an entry", value, f"a string of 1 to {MAX_NAME} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise place.wanted("the name of an entry", value, "text that UTF-8 can encode") from None
    return value


def array(value: Any, place: FilePlace, what: str, legal: Callable[[Any], bool], expected: str) -> tuple[tuple[int, ...], list[Any]]:
    """Shape and elements, row by row, of a nested list; of a number by itself, ``()`` and one element."""
    shape: list[int] = []
    level = [value]
    while isinstance(level[0], list):
        length = len(level[0])
        if length == 0 or len(shape) == MAX_DIMS or any(not isinstance(part, list) or len(part) != length for part in level):
            raise place.wanted(what, value, f"{expected}; lists of equal lengths, not empty, at most {MAX_DIMS} levels deep")
        shape.append(length)
        level = [element for part in level for element in part]
    for element in level:
        if not legal(element):
            raise place.error(f"{what} holds {shown(element)}; expected {expected}")
    return tuple(shape), level


def scales(value: Any, place: FilePlace, what: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Positive numbers, in the nesting that they have."""
    shape, elements = array(value, place, what, is_number, "a positive finite number")
    return positive(torch.tensor([float(element) for element in elements], dtype=torch.float64), place, what, dtype).reshape(shape)


def positive(values: Tensor, place: FilePlace, what: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """float64 as scales of `dtype`."""
    rounded = values.to(dtype)
    wrong = ~(rounded.isfinite() & (rounded > 0))
    if bool(wrong.any()):
        name = str(dtype).removeprefix("torch.")
        raise place.error(f"{what} holds {values[wrong].flatten()[0].item():g}; expected a number that is positive and finite in {name}")
    return rounded


def integers(value: Any, place: FilePlace, what: str, low: int = _INT32.min, high: int = _INT32.max) -> Tensor:
    """Integers from `low` to `high` as int64, in the nesting that they have."""
    shape, elements = array(value, place, what, lambda v: is_integer(v) and low <= v <= high, f"integers from {low} to {high}")
    return torch.tensor([int(element) for element in elements], dtype=torch.int64).reshape(shape)


def make_encoding(
    place: FilePlace, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, *layout: Any, **options: Any
) -> Encoding:
    """`Encoding`, whose objections become errors that name the entry."""
    off = (zero_point < float(quant_min)) | (zero_point > float(quant_max))
    if bool(off.any()):
        raise place.error(f"has the zero point {zero_point[off][0].item()}; expected a number from {quant_min} to {quant_max}, the grid")
    try:
        return Encoding(scale, zero_point.to(torch.int32), quant_min, quant_max, *layout, **options)
    except (ValueError, TypeError) as error:
        raise place.error(str(error)) from None


def check_count(count: int, place: FilePlace) -> None:
    """Refuse more entries than any model has tensors."""
    if count > MAX_ENTRIES:
        raise place.error(f"has {count} entries; expected at most {MAX_ENTRIES}, the encodings of one model")


def check_layout(place: FilePlace, scale: Tensor, axis: int | tuple[int, ...] | None, size: int | tuple[int, ...] | None) -> None:
    """Refuse axes and blocks that scales of this shape do not have."""
    axes, sizes = ([] if part is None else [part] if isinstance(part, int) else list(part) for part in (axis, size))
    dims = scale.dim()
    if not axes:
        fits = not dims and not sizes
    elif not sizes:
        fits = dims == 1 and isinstance(axis, int)
    else:
        inside = all(-dims <= a < dims for a in axes) and len({a % dims for a in axes}) == len(axes)
        fits = inside and len(axes) == len(sizes) and isinstance(axis, int) == isinstance(size, int)
    if not fits:
        raise place.error(
            f"has axis={axis}, block_size={size} and scales of shape {tuple(scale.shape)}; expected one scale; or an axis and a list; "
            "or an axis, a block size and nested lists"
        )


class Fields:
    """The fields of one object of a file.

    Parameters
    ----------
    value : object
        What the file has; an error unless it is an object.
    place : FilePlace
        What errors begin with.
    """

    def __init__(self, value: Any, place: FilePlace) -> None:
        if not isinstance(value, dict):
            raise place.error(f"is {shown(value)}; expected an object")
        self.values: Mapping[str, Any] = value
        self.place = place

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        """The value of a field that has to be there."""
        if name not in self.values:
            raise self.place.error(f"has no {name!r}; expected it beside {listed(self.values) or 'others'}")
        return self.values[name]

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        if not (is_integer(value) and low <= value <= high):
            raise self.place.wanted(repr(name), value, f"an integer from {low} to {high}")
        return int(value)

    def number(self, name: str) -> float:
        value = self.get(name)
        if not is_number(value):
            raise self.place.wanted(repr(name), value, "a number")
        return float(value)

    def choice(self, name: str, choices: Iterable[Any]) -> Any:
        """The value of a field that is one of a few strings or booleans."""
        value, choices = self.get(name), list(choices)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise self.place.wanted(repr(name), value, "one of " + ", ".join(map(shown, choices)))
        return value

    def scales(self, name: str) -> Tensor:
        return scales(self.get(name), self.place, repr(name))

    def integers(self, name: str, low: int = _INT32.min, high: int = _INT32.max) -> Tensor:
        return integers(self.get(name), self.place, repr(name), low, high)

    def without(self, *names: str) -> dict[str, Any]:
        """The other fields."""
        return {name: value for name, value in self.values.items() if name not in names}
