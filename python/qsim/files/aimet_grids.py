"""Integer grids as AIMET 0.6.1 and 1.0.0 write them: a bit width, a scale, an offset, and whether the grid is symmetric.

Both formats describe ``x ~ (q + offset) * scale`` with q from 0 to ``2**bits - 1``, so the smallest number of the grid is
``offset * scale``: for whatever integers a runtime stores, ``offset = quant_min - zero_point``. Symmetric int8 has offset -128, and
what AIMET calls strict symmetric, without the lowest integer, -127 and one step less. Whether stored integers are signed is
not in the file. Symmetric grids are signed in what AIMET reads back, others unsigned, and so they are here; a simulation takes either,
since they are the same numbers (`qsim.files.fitting`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim.files.encoding_file import UNQUANTIZED, Entry, role_of
from qsim.files.expressible import bits_of, check_grid, check_one_axis, encoding_of
from qsim.files.fields import MAX_BITS, make_encoding
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import Encoding, grid_of
from qsim.numbers.two_levels import TwoLevels


def decoded(
    place: FilePlace, scale: Tensor, offset: Tensor, bits: int, symmetric: bool, narrow: bool = False, axis: int | None = None, **block: Any
) -> Encoding:
    """The encoding of a grid of `bits`; `narrow` has one integer less."""
    signed = symmetric or bits == MAX_BITS  # a zero point of uint32 may not fit into int32
    dtype = f"int{bits}" if signed else f"uint{bits}"
    quant_min, quant_max = grid_of(dtype)
    quant_min += narrow
    return make_encoding(place, scale, quant_min - offset, quant_min, quant_max, axis, dtype=dtype, **block)


def offsets(encoding: Encoding) -> Tensor:
    """The offset of every scale, int64."""
    return encoding.quant_min - encoding.zero_point.long()


def doubling_levels(encoding: Encoding) -> TwoLevels | None:
    """How scales of two levels are stored, where LPBQ holds them: with one float an output channel, and a power of two of integers, by
    which a grid of few bits becomes one of more; None for others."""
    found = encoding.two_levels
    return found if found is not None and found.levels.bit_count() == 1 and found.count is None and encoding.symmetric else None


def float_entry(bits: int, **common: Any) -> Entry:
    """What "float" of so many bits means. These formats have one 16-bit float, and nothing but the width of narrower ones."""
    if bits == 16:
        encoding = Encoding(torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), *grid_of("float16"), dtype="float16")
        return Entry(encoding, **common)
    return Entry(None, note=UNQUANTIZED if bits == 32 else f"a float of {bits} bits without scale", **common)


def float_bits(entry: Entry) -> int | None:
    """Inverse of `float_entry`; None for integers."""
    if entry.encoding is None:
        return 32 if entry.note == UNQUANTIZED else None
    return 16 if entry.encoding.dtype == "float16" else None


def integer_encoding(name: str, entry: Entry, place: FilePlace, bits: range, narrow: bool) -> Encoding:
    """The integer encoding of an entry that these formats can hold."""
    encoding = encoding_of(name, entry, place)
    if "float" in encoding.dtype:
        raise place.error(f"is {encoding.dtype}; this format has float16 and no other float: use format='qsim'")
    if bits_of(encoding) not in bits:
        raise place.error(f"has {bits_of(encoding)} bits; this format has {bits.start} to {bits.stop - 1}: use format='qsim'")
    check_grid(encoding, place, narrow)
    check_one_axis(encoding, place)
    if encoding.axis is not None and role_of(name, entry) == "activation":
        raise place.error(
            f"is an activation with {encoding.scale.numel()} scales; this format has one for each: quantize activations per tensor, "
            "or use format='qsim'"
        )
    return encoding
