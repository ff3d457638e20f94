"""Whether an entry of a file says what a quantizer's spec wants.

The same numbers may be written in two ways: int8 around 0 and uint8 around 128, an axis counted from either end, or one channel and one
tensor where a file does not tell them apart. Those fit. Another width, grid or granularity does not: the grid of a quantizer is decided
when the simulation is made, since the choice of integer kernels depends on it.
"""

from __future__ import annotations

import dataclasses

from qsim.files.encoding_file import UNQUANTIZED, Entry
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.quantizer import Quantizer


def fitted(entry: Entry, quantizer: Quantizer, dims: int | None) -> Encoding:
    """The encoding of an entry as `Quantizer.set_encoding` takes it.

    Parameters
    ----------
    entry : Entry
    quantizer : Quantizer
    dims : int or None
        Dimensions of the tensor, where they are known.

    Returns
    -------
    Encoding

    Raises
    ------
    ValueError
        It does not fit: what the file has, what the quantizer wants, and what to do.
    """
    encoding, spec = entry.encoding, quantizer.spec
    if encoding is None:
        remedy = "switch it off with sim.disable" if entry.note == UNQUANTIZED else "calibrate it"
        raise ValueError(f"the file says {entry.note}: leave it out of the file, and {remedy}")
    found = _with_layout(entry, _with_grid(encoding, spec), quantizer, dims)
    return dataclasses.replace(found, **{name: spec.layout[name] for name in ("scale_levels", "super_block")})


def _with_grid(encoding: Encoding, spec: TensorSpec) -> Encoding:
    mine, theirs = (spec.quant_min, spec.quant_max), (encoding.quant_min, encoding.quant_max)
    same_kind = encoding.dtype.removeprefix("u") == spec.encoding_dtype.removeprefix("u")
    if not same_kind or mine[1] - mine[0] != theirs[1] - theirs[0]:
        raise ValueError(
            f"the file has {encoding.dtype} on [{theirs[0]}, {theirs[1]}], the quantizer {spec.encoding_dtype} on [{mine[0]}, {mine[1]}]: "
            "make the simulation with a config that has this grid (Config.override)"
        )
    zero_point = encoding.zero_point + (mine[0] - theirs[0])
    return dataclasses.replace(encoding, zero_point=zero_point, quant_min=mine[0], quant_max=mine[1], dtype=spec.encoding_dtype)


def _with_layout(entry: Entry, encoding: Encoding, quantizer: Quantizer, dims: int | None) -> Encoding:
    spec, shape = quantizer.spec, tuple(encoding.scale.shape)
    expected = quantizer.held_shape
    fits = expected in (None, shape) and encoding.block_size == spec.block_size and _same_axis(encoding.axis, spec.axis, dims)
    if not entry.layout_given and expected is not None and encoding.block_size == spec.block_size:
        fits = encoding.scale.numel() == quantizer.scale.numel()  # in the order of the tensor's own axes
        shape = expected
    if not fits:
        raise ValueError(
            f"the file has axis={encoding.axis}, block_size={encoding.block_size} and scales of shape {tuple(encoding.scale.shape)}, the "
            f"quantizer axis={spec.axis}, block_size={spec.block_size} and {'any shape' if expected is None else expected}: make the "
            "simulation with a config that has this granularity (Config.override)"
        )
    scale, zero_point = encoding.scale.reshape(shape), encoding.zero_point.reshape(shape)
    return dataclasses.replace(encoding, scale=scale, zero_point=zero_point, axis=spec.axis, block_size=spec.block_size)


def _same_axis(theirs: int | tuple[int, ...] | None, mine: int | tuple[int, ...] | None, dims: int | None) -> bool:
    if isinstance(theirs, int) and isinstance(mine, int) and dims is not None:
        return theirs % dims == mine % dims
    return theirs == mine
