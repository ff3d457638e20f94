"""AIMET 1.0.0: lists of activations and of parameters, each an object with a name.

``dtype`` is "INT" or "FLOAT", ``bw`` the width, ``enc_type`` what shares a scale. An integer has ``is_sym``, and as flat lists ``scale``
and ``offset`` (`qsim.files.aimet_grids`): one number PER_TENSOR, one an output channel PER_CHANNEL, and PER_BLOCK one for each block of
``block_size`` input channels, output channel by output channel. ``zero_point_shift`` moves a grid by a fraction of a step.

LPBQ (low power blockwise quantization) stores integers of ``compressed_bw`` bits, whose scales are one float an output channel
(``scale``) times one integer a block (``per_block_int_scale``); ``bw`` and ``offset`` are of the grid that a runtime expands them to.

Published in AIMET's "Encoding Format Specification", version 1.0.0.
"""

from __future__ import annotations

from typing import Any

import torch

from qsim.files.aimet_grids import decoded, doubling_levels, float_bits, float_entry, integer_encoding, offsets
from qsim.files.encoding_file import Entry, Source
from qsim.files.expressible import bits_of
from qsim.files.fields import MAX_BITS, Fields, positive
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import Encoding
from qsim.numbers.two_levels import TwoLevels

FORMAT = "aimet-1.0.0"
BITS = range(2, MAX_BITS + 1)
_TYPES = ("PER_TENSOR", "PER_CHANNEL", "PER_BLOCK", "LPBQ", "VECTOR")
_MAX_BLOCK = 1 << 31


def read_entry(value: Any, role: str | None, place: FilePlace) -> Entry:
    fields = Fields(value, place)
    common: dict[str, Any] = {"role": role, "source": Source(FORMAT, value)}
    kind = fields.choice("enc_type", _TYPES)
    bits = fields.integer("bw", BITS.start, BITS.stop - 1)
    if fields.choice("dtype", ("INT", "FLOAT")) == "FLOAT":
        return float_entry(bits, **common)
    if kind == "VECTOR":
        return Entry(None, note="quantized to a code book of vectors", **common)
    symmetric = fields.choice("is_sym", (True, False))
    scale, offset = fields.scales("scale"), fields.integers("offset", -(2**bits - 1), 0)
    if scale.dim() != 1 or offset.shape != scale.shape:
        raise place.error(
            f"'scale' and 'offset' have the shapes {tuple(scale.shape)} and {tuple(offset.shape)}; expected two flat lists of one length"
        )
    if kind == "LPBQ":
        return Entry(_expanded(fields, scale, bits, symmetric), layout_given=False, **common)
    if "zero_point_shift" in fields:
        return Entry(None, note="on a grid that is moved by a fraction of a step", **common)
    if kind == "PER_TENSOR":
        if len(scale) != 1:
            raise place.error(f"PER_TENSOR has {len(scale)} scales; expected one")
        return Entry(decoded(place, scale[0], offset[0], bits, symmetric), **common)
    if kind == "PER_CHANNEL":
        return Entry(decoded(place, scale, offset, bits, symmetric, axis=0), layout_given=False, **common)
    size = fields.integer("block_size", 1, _MAX_BLOCK)
    return Entry(decoded(place, scale, offset, bits, symmetric, axis=1, block_size=size), layout_given=False, **common)


def _expanded(fields: Fields, per_channel: torch.Tensor, bits: int, symmetric: bool) -> Encoding:
    """LPBQ as blocks, each with the product of its two scales."""
    place = fields.place
    compressed = fields.integer("compressed_bw", BITS.start, bits)
    size = fields.integer("block_size", 1, _MAX_BLOCK)
    per_block = fields.integers("per_block_int_scale", 1, (1 << 16) - 1)
    if not symmetric:
        raise place.error('is LPBQ with "is_sym": false; expected symmetric grids')
    if per_block.dim() != 1 or len(per_block) % len(per_channel):
        raise place.error(
            f"'per_block_int_scale' has the shape {tuple(per_block.shape)}; expected a flat list with as many numbers for each of the "
            f"{len(per_channel)} scales"
        )
    products = per_block.double().reshape(len(per_channel), -1) * per_channel.double()[:, None]
    scale = positive(products.flatten(), place, "'scale' times 'per_block_int_scale'")
    middle = torch.full(scale.shape, -(2 ** (compressed - 1)))
    return decoded(place, scale, middle, compressed, True, axis=1, block_size=size)


def _lpbq(encoding: Encoding, two_levels: TwoLevels) -> dict[str, Any]:
    """The fields of LPBQ for scales of two levels."""
    integers, per_channel = two_levels.split(encoding.scale)
    expanded = bits_of(encoding) + two_levels.levels.bit_length() - 1
    return {
        "enc_type": "LPBQ",
        "bw": expanded,
        "compressed_bw": bits_of(encoding),
        "scale": per_channel.flatten().tolist(),
        "offset": [-(2 ** (expanded - 1))] * per_channel.numel(),
        "per_block_int_scale": integers.flatten().tolist(),
    }


def write_entry(name: str, entry: Entry, place: FilePlace) -> dict[str, Any]:
    width = float_bits(entry)
    if width is not None:
        return {"name": name, "dtype": "FLOAT", "enc_type": "PER_TENSOR", "bw": width}
    encoding = integer_encoding(name, entry, place, BITS, narrow=False)
    fields: dict[str, Any] = {
        "name": name,
        "dtype": "INT",
        "enc_type": "PER_TENSOR" if encoding.axis is None else "PER_CHANNEL" if encoding.block_size is None else "PER_BLOCK",
        "bw": bits_of(encoding),
        "is_sym": encoding.symmetric,
        "scale": encoding.scale.flatten().tolist(),
        "offset": offsets(encoding).flatten().tolist(),
    }
    if encoding.block_size is not None:
        if (two_levels := doubling_levels(encoding)) is not None:
            fields.update(_lpbq(encoding, two_levels))
        if encoding.axis != 1:
            raise place.error(
                f"has blocks along axis {encoding.axis}; in this format they lie along the input channels, axis 1: use "
                "format='aimet-2.0.0' or 'qsim'"
            )
        fields["block_size"] = encoding.block_size
    return fields
