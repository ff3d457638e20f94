"""AIMET 0.6.1: objects of activations and of parameters by name, each a list with one object a channel.

An integer has ``bitwidth``, ``dtype`` "int", ``is_symmetric`` ("True" or "False", strings), ``scale``, ``offset``, and the ends of the
grid: ``min = offset * scale`` and ``max = (offset + steps) * scale`` with ``2**bitwidth - 1`` steps, strict symmetric one less. A
float has ``bitwidth`` and ``dtype`` "float" alone. More than one object in a list means one scale for each output channel.

Published in AIMET's "Encoding Format Specification", version 0.6.1; what `offset` means is in `qsim.files.aimet_grids`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim.files.aimet_grids import decoded, float_bits, float_entry, integer_encoding, offsets
from qsim.files.encoding_file import Entry, Source
from qsim.files.expressible import bits_of
from qsim.files.fields import MAX_BITS, Fields, positive
from qsim.files.file_place import FilePlace

FORMAT = "aimet-0.6.1"
BITS = range(4, MAX_BITS + 1)
_TOLERANCE = 1e-5  # of the ends: writers compute them in float32, steps of wide grids are smaller than their rounding


def read_entry(value: Any, role: str | None, place: FilePlace) -> Entry:
    if not isinstance(value, list) or not value:
        raise place.wanted("the entry", value, "a list with one object a channel")
    channels = [Fields(channel, place) for channel in value]
    first = channels[0]
    common: dict[str, Any] = {"role": role, "layout_given": False, "source": Source(FORMAT, value)}
    kind = first.choice("dtype", ("int", "float"))
    bits = first.integer("bitwidth", BITS.start, BITS.stop - 1)
    if any(channel.get(name) != first.get(name) for channel in channels for name in ("dtype", "bitwidth")):
        raise place.error("its channels differ in 'dtype' or 'bitwidth'; expected the same for all")
    if kind == "float":
        return float_entry(bits, **common)
    truths = {channel.choice("is_symmetric", ("True", "False", True, False)) in ("True", True) for channel in channels}
    if len(truths) > 1:
        raise place.error("its channels differ in 'is_symmetric'; expected the same for all")
    axis = None if len(channels) == 1 else 0
    shape = () if axis is None else (len(channels),)
    exact = torch.tensor([channel.number("scale") for channel in channels], dtype=torch.float64)
    scale = positive(exact, place, "'scale'").reshape(shape)
    offset = torch.tensor([channel.integer("offset", -(2**bits - 1), 0) for channel in channels]).reshape(shape)
    symmetric = truths.pop()
    steps = 2**bits - 1 - _missing_steps(channels, exact, offset.flatten(), bits, place)
    narrow = steps == 2**bits - 2 and symmetric
    if steps < 2**bits - 1 and not narrow:
        raise place.error(f"its grid has {steps} steps; expected {2**bits - 1}, or one less where 'is_symmetric' is \"True\"")
    return Entry(decoded(place, scale, offset, bits, symmetric, narrow, axis), **common)


def _missing_steps(channels: list[Fields], scale: Tensor, offset: Tensor, bits: int, place: FilePlace) -> int:
    """By how many steps less than its width the grid reaches to its "max": 0 or 1. Both ends have to be where the grid ends."""
    if not any("min" in channel or "max" in channel for channel in channels):
        return 0
    low = torch.tensor([channel.number("min") for channel in channels], dtype=torch.float64)
    high = torch.tensor([channel.number("max") for channel in channels], dtype=torch.float64)

    def far(found: Tensor, expected: Tensor) -> Tensor:
        return (found - expected).abs() > torch.maximum(scale / 2, expected.abs() * _TOLERANCE)

    full = (offset + (2**bits - 1)) * scale
    if bool(far(low, offset * scale).any()):
        raise place.error("'min' is not offset * scale; expected the smallest number of the grid: scale and range contradict each other")
    if not bool(far(high, full).any()):
        return 0
    if bool(far(high, full - scale).any()):
        raise place.error("'max' is not (offset + 2**bitwidth - 1) * scale; expected the largest number of the grid")
    return 1


def write_entry(name: str, entry: Entry, place: FilePlace) -> list[dict[str, Any]]:
    width = float_bits(entry)
    if width is not None:
        return [{"bitwidth": width, "dtype": "float"}]
    encoding = integer_encoding(name, entry, place, BITS, narrow=True)
    if encoding.block_size is not None:
        raise place.error("has blocks; this format has one scale a channel at most: use format='aimet-1.0.0', 'aimet-2.0.0' or 'qsim'")
    offset, scale = offsets(encoding), encoding.scale.double()
    steps = encoding.quant_max - encoding.quant_min
    # The ends as float64: float32 scales can have ends that are infinite in float32.
    columns = (values.flatten().tolist() for values in ((offset + steps) * scale, offset * scale, offset, scale))
    return [
        {
            "bitwidth": bits_of(encoding),
            "dtype": "int",
            "is_symmetric": str(encoding.symmetric),
            "max": high,
            "min": low,
            "offset": offset,
            "scale": scale,
        }
        for high, low, offset, scale in zip(*columns, strict=True)
    ]
