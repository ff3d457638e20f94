"""ONNX Runtime's ``TensorQuantOverrides``: encodings that its own quantizer shall use.

``quantize_static(..., extra_options={"TensorQuantOverrides": overrides})`` takes a dict from tensors to lists: one dict with
``quant_type``, ``scale`` and ``zero_point`` for a tensor, or one a channel, with ``axis``. Its quantizer then makes the same integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qsim.files.encoding_file import EncodingFile, Entry
from qsim.files.expressible import check_grid, encoding_of, leave_out
from qsim.files.fields import MAX_DIMS, Fields, checked_name, integers, make_encoding, scales
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import grid_of

_TYPES = {"int8": "QInt8", "uint8": "QUInt8", "int16": "QInt16", "uint16": "QUInt16", "int4": "QInt4", "uint4": "QUInt4"}
_PLACE = FilePlace("TensorQuantOverrides")


def _quant_types() -> Any:
    try:
        from onnxruntime.quantization import QuantType
    except ImportError as error:
        raise ImportError("qsim: TensorQuantOverrides are of onnxruntime, which is not installed: pip install qsim[onnx]") from error
    return QuantType


def tensor_quant_overrides(file: EncodingFile) -> dict[str, list[dict[str, Any]]]:
    """The encodings of a file as ONNX Runtime's quantizer takes them.

    Parameters
    ----------
    file : EncodingFile
        With the names of ONNX tensors: `EncodingFile.without` leaves out what the model does not have.

    Returns
    -------
    dict of str to list of dict

    Raises
    ------
    FileFormatError
        An encoding is of a type, grid or granularity that ONNX Runtime's quantizer has not.
    ImportError
        There is no onnxruntime.
    """
    types = _quant_types()
    return {name: _write(name, entry, _PLACE.at(name), types) for name, entry in file.entries.items()}


def _write(name: str, entry: Entry, place: FilePlace, types: Any) -> list[dict[str, Any]]:
    encoding = encoding_of(name, entry, place)
    if encoding.dtype not in _TYPES:
        raise place.error(f"is {encoding.dtype}; expected one of {', '.join(_TYPES)}: {leave_out(name)}")
    check_grid(encoding, place)
    if encoding.block_size is not None:
        raise place.error(f"has blocks; ONNX Runtime's quantizer has one scale for the tensor or for each channel: {leave_out(name)}")
    common = {"quant_type": types[_TYPES[encoding.dtype]], **({} if encoding.axis is None else {"axis": encoding.axis})}
    # Arrays without dimensions, of a type that NumPy has: what the quantizer itself computes.
    scales = encoding.scale.float().reshape(-1, 1).numpy(force=True)
    zero_points = encoding.zero_point.reshape(-1, 1).numpy(force=True).astype(encoding.dtype.replace("int4", "int8"))
    return [{**common, "scale": s.reshape(()), "zero_point": z.reshape(())} for s, z in zip(scales, zero_points, strict=True)]


def from_tensor_quant_overrides(overrides: Mapping[str, list[dict[str, Any]]]) -> EncodingFile:
    """Inverse of `tensor_quant_overrides`.

    Parameters
    ----------
    overrides : mapping
        Scales and zero points may be numbers, or arrays with one. An override that gives none (``symmetric``, ``rmin`` ...) is a setting
        and no encoding, and an error.

    Returns
    -------
    EncodingFile
        What has several scales is a parameter, as ONNX Runtime asks for; of other tensors the role is not known.
    """
    names = {_quant_types()[theirs]: ours for ours, theirs in _TYPES.items()}
    return EncodingFile({checked_name(name, _PLACE): _read(value, names, _PLACE.at(name)) for name, value in overrides.items()})


def _read(value: Any, names: Mapping[Any, str], place: FilePlace) -> Entry:
    if not isinstance(value, list) or not value:
        raise place.wanted("the override", value, "a list with one dict a channel")
    channels = [Fields({key: _plain(part) for key, part in Fields(channel, place).values.items()}, place) for channel in value]
    first = channels[0]
    dtype = names[first.choice("quant_type", names)]
    axis = first.integer("axis", -MAX_DIMS, MAX_DIMS - 1) if "axis" in first else None
    for channel in channels:
        if rest := channel.without("quant_type", "axis", "scale", "zero_point"):
            raise place.wanted("an option", next(iter(rest)), "quant_type, axis, scale and zero_point alone: others are no encoding")
        if (channel.values.get("quant_type", first.get("quant_type")), channel.values.get("axis", axis)) != (first.get("quant_type"), axis):
            raise place.error("its channels differ in 'quant_type' or 'axis'; expected the same for all")
    if axis is None and len(channels) > 1:
        raise place.error(f"has {len(channels)} channels and no 'axis'; expected the axis that they lie along")
    shape = () if axis is None else (len(channels),)
    scale = scales([channel.get("scale") for channel in channels], place, "'scale'").reshape(shape)
    zero_point = integers([channel.get("zero_point") for channel in channels], place, "'zero_point'").reshape(shape).to(torch.int32)
    return Entry(make_encoding(place, scale, zero_point, *grid_of(dtype), axis, dtype=dtype), None if axis is None else "parameter")


def _plain(value: Any) -> Any:
    """Arrays of NumPy with one element as its number."""
    return value.item() if getattr(value, "size", 0) == 1 and hasattr(value, "item") else value
