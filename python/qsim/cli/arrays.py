"""Batches from .npz files: arrays of numbers, as data."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsim.files.file_place import FilePlace, shown

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MAX_ARRAY_BYTES = 1 << 33
MAX_ARRAYS = 1 << 10
_KINDS = "fiub"  # floats, integers, booleans


def read_npz(path: Path, max_bytes: int = MAX_ARRAY_BYTES) -> dict[str, Array]:
    """The arrays of a file that ``numpy.savez`` wrote, by name and in its order.

    Sizes are taken from the headers and compared with what the file holds before an array is made, and nothing is unpickled.

    Raises
    ------
    FileFormatError
        It is no such file, is damaged, holds something else than numbers, or more than `max_bytes`.
    OSError
        It cannot be read.
    """
    import numpy as np

    place = FilePlace(str(path))
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_bounds(members, place, max_bytes)
            for member in members:
                _check_header(archive, member, place.at(member.filename))
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: np.ascontiguousarray(arrays[name].astype(arrays[name].dtype.newbyteorder("="))) for name in arrays.files}
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError, SyntaxError) as error:
        if isinstance(error, type(place.error(""))):
            raise
        raise place.error(f"is no .npz file of arrays ({error}); expected what numpy.savez writes. Is the file complete?") from None
    if not found:
        raise place.error("holds no arrays; expected one for each input of the model")
    return found


def _check_bounds(members: list[zipfile.ZipInfo], place: FilePlace, max_bytes: int) -> None:
    total = sum(member.file_size for member in members)
    if len(members) > MAX_ARRAYS or total > max_bytes:
        raise place.error(f"holds {len(members)} arrays with {total} bytes; expected at most {MAX_ARRAYS} and {max_bytes}")
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        raise place.error("holds an array twice; expected names of their own")


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, place: FilePlace) -> None:
    """Refuse what is not numbers, and shapes that the file has no bytes for."""
    from numpy.lib import format

    with archive.open(member) as stream:
        version = format.read_magic(stream)
        read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
        shape, _, dtype = read(stream)
        rest = member.file_size - stream.tell()
    if dtype.kind not in _KINDS:
        raise place.error(f"holds elements of {shown(str(dtype))}; expected numbers")
    if (size := math.prod(shape) * dtype.itemsize) != rest:
        raise place.error(f"has the shape {shape} of {dtype}, {size} bytes, and holds {rest}. Is the file complete?")


def batches(arrays: Mapping[str, Array], size: int | None, place: FilePlace) -> Iterator[dict[str, Array]]:
    """The arrays cut along their first axes into batches of `size`; all of them in one without a size."""
    if size is None:
        yield dict(arrays)
        return
    if size < 1:
        raise place.error(f"cannot be cut into batches of {size}; expected at least 1")
    lengths = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        raise place.error(f"has arrays of the lengths {lengths}; expected the same, to be cut into batches")
    for start in range(0, next(iter(lengths.values())) or 0, size):
        yield {name: array[start : start + size] for name, array in arrays.items()}
