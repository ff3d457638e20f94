"""Core ML's weight hints: buffers from which ``coremltools.convert`` stores the integers that a training or calibration chose.

Beside ``<module>.<parameter>`` a state dict has ``<module>._COREML_/<parameter>/`` and ``compression_type`` (``[3]``: quantization),
``quantization_n_bits``, ``quantization_scale`` and ``zero_point``, and once ``_COREML_/metadata_version``. Scales have as many dimensions
as the parameter; where they are shorter, a block is the quotient of the lengths. The converter divides, rounds, adds the zero point and
clips by itself; it takes unsigned integers where neither these nor zero points are negative. Without zero point a grid is symmetric and
signed. Published in Core ML Tools' guide, "Compression info protocol", version 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

import torch
from torch import Tensor

from qsim.errors import FileFormatError
from qsim.files.encoding_file import EncodingFile, Entry
from qsim.files.expressible import bits_of, check_grid, encoding_of
from qsim.files.fields import make_encoding
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import Encoding, grid_of

_MARK = "_COREML_/"
_VERSION = _MARK + "metadata_version"
_HINT = re.compile(r"(?P<module>(?:.*\.)?)_COREML_/(?P<parameter>[^/]+)/(?P<field>[^/]+)", re.DOTALL)
_FIELDS = ("compression_type", "quantization_n_bits", "quantization_scale", "zero_point")
_QUANTIZATION = 3
_BITS = (4, 8)
_Axes = int | tuple[int, ...] | None
_PLACE = FilePlace("Core ML hints")


def with_coreml_hints(state_dict: Mapping[str, Tensor], file: EncodingFile) -> dict[str, Tensor]:
    """A state dict with the hints of all parameters that the file has encodings of.

    Parameters
    ----------
    state_dict : mapping of str to Tensor
        Of the model to convert. Register what is new as buffers of its modules.
    file : EncodingFile
        With the names of parameters; entries of activations have no place here, and are left out.

    Returns
    -------
    dict of str to Tensor

    Raises
    ------
    FileFormatError
        There is no such parameter, or Core ML has no such integers.

    Examples
    --------
    >>> file = EncodingFile({"fc.weight": Entry(Encoding(torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), -128, 127), "parameter")})
    >>> sorted(with_coreml_hints({"fc.weight": torch.zeros(2, 3)}, file))[0]
    '_COREML_/metadata_version'
    """
    hints = {_VERSION: torch.tensor(1)}
    for name, entry in file.entries.items():
        if entry.role == "activation":
            continue
        place = _PLACE.at(name)
        if name not in state_dict:
            close = ", ".join(map(repr, get_close_matches(name, state_dict))) or "none"
            raise place.error(f"is no tensor of the state dict (close to it: {close}); expected the name of a parameter")
        module, _, parameter = name.rpartition(".")
        prefix = f"{module}.{_MARK}{parameter}/" if module else f"{_MARK}{parameter}/"
        fields = _hint(encoding_of(name, entry, place), state_dict[name], place)
        hints.update({prefix + field: value for field, value in fields.items()})
    return {**state_dict, **hints}


def _hint(encoding: Encoding, weight: Tensor, place: FilePlace) -> dict[str, Tensor]:
    bits = bits_of(encoding)
    if "float" in encoding.dtype or bits not in _BITS:
        raise place.error(f"is {encoding.dtype}; Core ML has integers of 4 and 8 bits")
    check_grid(encoding, place)
    parts = list(encoding.scale.shape)
    if encoding.block_size is None:
        parts = [1] * weight.dim()
        if isinstance(encoding.axis, int):
            parts[encoding.axis] = encoding.scale.numel()
    if len(parts) != weight.dim() or any(n % part for n, part in zip(weight.shape, parts, strict=True)):
        raise _unfit(encoding.scale.shape, weight.shape, place)
    scale = encoding.scale.float().reshape(parts)
    zero_point = _zero_point(encoding.zero_point.reshape(parts) - encoding.quant_min, scale, weight, 1 << (bits - 1))
    fields = {
        "compression_type": torch.tensor([_QUANTIZATION]),
        "quantization_n_bits": torch.tensor(bits),
        "quantization_scale": scale,
    }
    return fields if zero_point is None else {**fields, "zero_point": zero_point}


def _zero_point(above: Tensor, scale: Tensor, weight: Tensor, half: int) -> Tensor | None:
    """Zero points, `above` the lowest integer, of the type for which the converter clips where the grid ends; None for symmetric ones."""
    signed = above - half
    numbers = (weight.detach() / _spread(scale, weight.shape)).round() + _spread(signed, weight.shape)
    taken_as_unsigned = bool((numbers >= 0).all()) and bool((signed >= 0).all())
    if taken_as_unsigned and bool((numbers >= half).any()):  # beyond the end of the signed grid: not clipped there
        return above.to(torch.uint8)
    return signed.to(torch.int8) if bool(signed.any()) else None


def _spread(values: Tensor, shape: torch.Size) -> Tensor:
    for axis, n in enumerate(shape):
        values = values.repeat_interleave(n // values.shape[axis], axis)
    return values


def _unfit(scales: torch.Size, shape: torch.Size, place: FilePlace) -> FileFormatError:
    return place.error(f"has scales of shape {tuple(scales)} for a tensor of shape {tuple(shape)}; expected blocks that fill it")


def without_coreml_hints(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict without its hints."""
    return {name: value for name, value in state_dict.items() if name != _VERSION and not _HINT.fullmatch(name)}


def read_coreml_hints(state_dict: Mapping[str, Tensor]) -> EncodingFile:
    """The encodings that the hints of a state dict stand for, by the names of its parameters.

    Raises
    ------
    FileFormatError
        A hint is of another version, of no parameter, of another compression, or its fields contradict each other.
    """
    if _VERSION in state_dict and state_dict[_VERSION].tolist() not in (1, [1]):
        raise _PLACE.wanted(repr(_VERSION), state_dict[_VERSION].tolist(), "1")
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state_dict.items():
        if hint := _HINT.fullmatch(name):
            found.setdefault(hint["module"] + hint["parameter"], {})[hint["field"]] = value
    return EncodingFile({name: Entry(_read(fields, state_dict.get(name), _PLACE.at(name)), "parameter") for name, fields in found.items()})


def _read(fields: dict[str, Tensor], parameter: Tensor | None, place: FilePlace) -> Encoding:
    if parameter is None:
        raise place.error("has hints, and there is no such parameter in the state dict; expected both")
    if unknown := fields.keys() - set(_FIELDS):
        raise place.wanted("a hint", min(unknown), "one of " + ", ".join(_FIELDS))
    if missing := set(_FIELDS[:3]) - fields.keys():
        raise place.error(f"has no {min(missing)!r}; expected {', '.join(_FIELDS[:3])}")
    kind, bits, scale = fields["compression_type"].flatten().tolist(), fields["quantization_n_bits"], fields["quantization_scale"]
    if kind != [_QUANTIZATION]:
        raise place.wanted("'compression_type'", kind, f"[{_QUANTIZATION}], quantization alone")
    if bits.numel() != 1 or bits.item() not in _BITS:
        raise place.wanted("'quantization_n_bits'", bits.flatten().tolist(), "4 or 8")
    if scale.dim() != parameter.dim() or any(part == 0 or n % part for n, part in zip(parameter.shape, scale.shape, strict=True)):
        raise _unfit(scale.shape, parameter.shape, place)
    zero_point = fields.get("zero_point", torch.zeros_like(scale, dtype=torch.int8))
    if zero_point.shape != scale.shape or zero_point.is_floating_point():
        raise place.error(f"has a zero point of {zero_point.dtype}, {tuple(zero_point.shape)}; expected integers, one for each scale")
    signed = zero_point.dtype == torch.int8 or bool((zero_point < 0).any())
    dtype = f"{'' if signed else 'u'}int{int(bits)}"
    axis, size, shape = _parts(tuple(parameter.shape), tuple(scale.shape))
    return make_encoding(place, scale.float().reshape(shape), zero_point.to(torch.int32).reshape(shape), *grid_of(dtype), axis, size, dtype)


def _parts(shape: tuple[int, ...], parts: tuple[int, ...]) -> tuple[_Axes, _Axes, tuple[int, ...]]:
    """Axis, block size and shape of scales that lie in `parts` over a tensor of `shape`."""
    several = [axis for axis, part in enumerate(parts) if part > 1]
    if not several:
        return None, None, ()
    if len(several) == 1 and parts[several[0]] == shape[several[0]]:
        return several[0], None, (shape[several[0]],)
    axes = tuple(axis for axis, (n, part) in enumerate(zip(shape, parts, strict=True)) if n != part)
    sizes = tuple(shape[axis] // parts[axis] for axis in axes)
    return (axes[0], sizes[0], parts) if len(axes) == 1 else (axes, sizes, parts)
