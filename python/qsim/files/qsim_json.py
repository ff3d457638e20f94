"""qsim's own format: all fields of each `Encoding` as JSON, float32 and float64 scales to the last bit.

    {"format": "qsim-encodings", "version": "1",
     "encodings": {"conv1.weight": {"role": "parameter", "scale": [0.5], "zero_point": [0], "scale_dtype": "float32",
                                    "quant_min": -128, "quant_max": 127, "axis": 0, "block_size": null, "dtype": "int8"}},
     ...}

An entry with ``"layout_given": false`` came from a format that does not tell the axes (`qsim.files.Entry`).
"""

from __future__ import annotations

from typing import Any

import torch

from qsim.files.encoding_file import Entry
from qsim.files.expressible import encoding_of
from qsim.files.fields import MAX_DIMS, Fields, array, check_layout, is_integer, make_encoding, scales
from qsim.files.file_place import FilePlace

FORMAT = "qsim"
MARK = "qsim-encodings"
FORMAT_VERSION = "1"
_PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
_LARGEST = 1 << 128  # beyond bfloat16
_LEVELS = ("scale_levels", "super_block")  # of scales that are integers beside floats; left out of others
_FIELDS = ("role", "scale", "zero_point", "scale_dtype", "quant_min", "quant_max", "axis", "block_size", "dtype", "layout_given", *_LEVELS)


def read_entry(value: Any, role: str | None, place: FilePlace) -> Entry:
    """An entry; it says itself which role it has."""
    fields = Fields(value, place)
    if unknown := list(fields.without(*_FIELDS)):
        raise place.wanted("a field", unknown[0], "one of " + ", ".join(_FIELDS))
    role = fields.choice("role", ("activation", "parameter", None))
    given = "layout_given" not in fields or fields.choice("layout_given", (True, False))
    scale = scales(fields.get("scale"), place, "'scale'", _PRECISIONS[fields.choice("scale_dtype", _PRECISIONS)])
    axis, size = _axes(fields, "axis", -MAX_DIMS, MAX_DIMS - 1), _axes(fields, "block_size", 1, 1 << 31)
    if given:
        check_layout(place, scale, axis, size)
    elif scale.dim() != (axis is not None) or isinstance(axis, tuple) or isinstance(size, tuple):
        raise place.error(
            f"has no layout, axis={axis} and scales of shape {tuple(scale.shape)}; expected one scale, or an axis and a flat list"
        )
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or len(dtype) > 16:
        raise place.wanted("'dtype'", dtype, 'a string such as "int8"')
    ends = [fields.integer(name, -_LARGEST, _LARGEST) for name in ("quant_min", "quant_max")]
    levels = {name: fields.integer(name, 1, 1 << 31) for name in _LEVELS if name in fields}
    return Entry(make_encoding(place, scale, fields.integers("zero_point"), *ends, axis, size, dtype, **levels), role, given)


def _axes(fields: Fields, name: str, low: int, high: int) -> int | tuple[int, ...] | None:
    value = fields.get(name)
    if value is None:
        return None
    shape, elements = array(value, fields.place, repr(name), lambda v: is_integer(v) and low <= v <= high, f"integers from {low} to {high}")
    if len(shape) > 1 or len(elements) > MAX_DIMS:
        raise fields.place.wanted(repr(name), value, f"an integer, or a list of at most {MAX_DIMS}")
    return int(elements[0]) if not shape else tuple(int(element) for element in elements)


def write_entry(name: str, entry: Entry, place: FilePlace) -> dict[str, Any]:
    layout = {} if entry.layout_given else {"layout_given": False}
    return {"role": entry.role, **encoding_of(name, entry, place).to_dict(), **layout}
