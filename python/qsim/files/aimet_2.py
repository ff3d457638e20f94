"""AIMET 2.0.0 and 2.1.0: one list, each entry the inputs and attributes of an ONNX QuantizeLinear.

``output_dtype`` is what integers or floats are stored, ``y_scale`` a number or nested list of the shape that ONNX wants, ``y_zero_point``
the zero point of that type, left out when it is 0 everywhere; ``axis`` and ``block_size`` as in ONNX. Biases have "int32". float16,
bfloat16 and float32 are no quantized types here: a tensor without entry is not quantized. Activations and parameters are not told apart.

LPBQ is ``per_block_int_scale`` times ``per_channel_float_scale`` in place of ``y_scale``, in 2.1.0 also an object as ``y_scale``: numbers
``x`` that are dequantized with ``x_scale`` and ``x_zero_point`` along ``axis``, in blocks of ``block_size``.

Published in AIMET's "Encoding Format Specification", versions 2.0.0 and 2.1.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim.files.aimet_grids import doubling_levels
from qsim.files.encoding_file import Entry, Source
from qsim.files.expressible import check_grid, check_one_axis, encoding_of, leave_out
from qsim.files.fields import MAX_DIMS, Fields, array, check_layout, is_integer, is_number, make_encoding, positive
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import Encoding, grid_of

_INTEGERS = ("int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32")
_FLOATS = {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
_FOREIGN = ("float4e2m1", "float8e4m3fnuz", "float8e5m2fnuz")  # of which an Encoding has no grid
_NAMES = {**{name: name for name in _INTEGERS}, **_FLOATS}
_MAX_BLOCK = 1 << 31


def read_entry(value: Any, role: str | None, place: FilePlace, format: str) -> Entry:
    fields = Fields(value, place)
    source = Source(format, value)
    dtype = fields.choice("output_dtype", (*_NAMES, *_FOREIGN))
    axis = fields.integer("axis", -MAX_DIMS, MAX_DIMS - 1) if "axis" in fields else None
    size = fields.integer("block_size", 1, _MAX_BLOCK) if "block_size" in fields else None
    scale = _scale(fields, format)
    if axis is None and size is None and scale.shape == (1,):  # as ONNX, which takes one number in a list too
        scale = scale.reshape(())
    check_layout(place, scale, axis, size)
    if dtype in _FOREIGN:
        return Entry(None, role, note=f"{dtype}, for which qsim has no grid", source=source)
    zero_point = _zero_point(fields, scale)
    if zero_point is None:
        return Entry(None, role, note="on a grid that is moved by a fraction of a step", source=source)
    name = _NAMES[dtype]
    return Entry(make_encoding(place, scale, zero_point, *grid_of(name), axis, size, name), role, source=source)


def _scale(fields: Fields, format: str) -> Tensor:
    if "per_block_int_scale" in fields:
        x, step = fields.integers("per_block_int_scale", 1, (1 << 16) - 1), fields.scales("per_channel_float_scale")
        axis = None if x.dim() < 2 else int(fields.integer("axis", -MAX_DIMS, MAX_DIMS - 1) % x.dim() == 0)  # what blocks do not lie along
        what = "'per_channel_float_scale'"
        return positive(x * _spread(step.double(), x, axis, None, what, fields.place), fields.place, f"'per_block_int_scale' times {what}")
    value = fields.get("y_scale")
    if not isinstance(value, dict):
        return fields.scales("y_scale")
    if format == "aimet-2.0.0":
        raise fields.place.error('\'y_scale\' is an object, which version 2.1.0 has; expected numbers, or "version": "2.1.0"')
    return _dequantized(Fields(value, fields.place))


def _dequantized(meta: Fields) -> Tensor:
    """The scales that version 2.1.0 stores quantized."""
    place = meta.place
    x, step = _numbers(meta, "x"), meta.scales("x_scale").double()
    axis = meta.integer("axis", -MAX_DIMS, MAX_DIMS - 1) if "axis" in meta else None
    size = meta.integer("block_size", 1, _MAX_BLOCK) if "block_size" in meta else None
    if "x_zero_point" in meta:
        x = x - _spread(_numbers(meta, "x_zero_point"), x, axis, size, "'x_zero_point'", place)
    return positive(x * _spread(step, x, axis, size, "'x_scale'", place), place, "'y_scale'")


def _numbers(meta: Fields, name: str) -> Tensor:
    shape, elements = array(meta.get(name), meta.place, repr(name), is_number, "numbers")
    return torch.tensor([float(element) for element in elements], dtype=torch.float64).reshape(shape)


def _spread(values: Tensor, x: Tensor, axis: int | None, size: int | None, what: str, place: FilePlace) -> Tensor:
    """One number for everything, a list along `axis`, or one number for each block of `size`, so that it broadcasts to `x`."""
    if axis is not None and not -x.dim() <= axis < x.dim():
        raise place.error(f"numbers of shape {tuple(x.shape)} are scaled along axis {axis}; expected one of their axes")
    if values.dim() == 1 < x.dim() and axis is not None:
        shape = [1] * x.dim()
        shape[axis] = len(values)
        values = values.reshape(shape)
    elif values.dim() == x.dim() > 0 and axis is not None and size is not None and values.shape[axis] == -(-x.shape[axis] // size):
        values = values.index_select(axis, torch.arange(x.shape[axis]) // size)
    if values.dim() and (values.dim() != x.dim() or any(n not in (1, m) for n, m in zip(values.shape, x.shape, strict=True))):
        raise place.error(f"{what} has the shape {tuple(values.shape)} beside numbers of shape {tuple(x.shape)}; expected 1 or as many")
    return values


def _zero_point(fields: Fields, scale: Tensor) -> Tensor | None:
    """The zero points; None if some are fractions."""
    if "y_zero_point" not in fields:
        return torch.zeros_like(scale, dtype=torch.int32)
    legal = 2.0**31
    what = "'y_zero_point'"
    shape, elements = array(
        fields.get("y_zero_point"), fields.place, what, lambda v: is_number(v) and -legal <= v < legal, "numbers of int32"
    )
    if shape and shape != (tuple(scale.shape) or (1,)):
        raise fields.place.error(f"{what} has the shape {shape}; expected that of the scales, {tuple(scale.shape)}")
    if not all(is_integer(element) for element in elements):
        return None
    numbers = torch.tensor([int(element) for element in elements], dtype=torch.int32)
    return numbers.reshape(scale.shape) if len(numbers) == scale.numel() else numbers.expand(scale.numel()).reshape(scale.shape)


def write_entry(name: str, entry: Entry, place: FilePlace) -> dict[str, Any]:
    encoding = encoding_of(name, entry, place)
    _check(name, entry, encoding, place)
    fields: dict[str, Any] = {
        "name": name,
        "output_dtype": next(theirs for theirs, ours in _NAMES.items() if ours == encoding.dtype),
        **_scales(encoding),
    }
    if bool(encoding.zero_point.any()):
        fields["y_zero_point"] = encoding.zero_point.tolist()
    layout = {"axis": encoding.axis, "block_size": encoding.block_size}
    return {**fields, **{key: value for key, value in layout.items() if value is not None}}


def _scales(encoding: Encoding) -> dict[str, Any]:
    two_levels = doubling_levels(encoding)
    if two_levels is None:
        return {"y_scale": encoding.scale.tolist()}
    integers, per_channel = two_levels.split(encoding.scale)
    return {"per_block_int_scale": integers.tolist(), "per_channel_float_scale": per_channel.tolist()}


def _check(name: str, entry: Entry, encoding: Encoding, place: FilePlace) -> None:
    if encoding.dtype not in _NAMES.values():
        advice = f"{leave_out(name)}: what has no entry stays in float" if "float" in encoding.dtype else "use format='qsim'"
        raise place.error(f"is {encoding.dtype}; this format has {', '.join(_NAMES)}: {advice}")
    check_grid(encoding, place)
    check_one_axis(encoding, place)
    if encoding.block_size is not None and not entry.layout_given:
        raise place.error(
            "has blocks whose layout its file does not tell; this format needs it: load the file into a simulation "
            "(sim.load_encodings) and save from there"
        )
