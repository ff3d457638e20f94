"""What a format asks of an entry before it can write it, with errors that say what to do."""

from __future__ import annotations

from qsim.files.encoding_file import Entry
from qsim.files.file_place import FilePlace
from qsim.numbers.encoding import Encoding, grid_of


def encoding_of(name: str, entry: Entry, place: FilePlace) -> Encoding:
    """The encoding of an entry that has to have one."""
    if entry.encoding is None:
        raise place.error(f"is {entry.note}, which this format cannot hold; {leave_out(name)}")
    return entry.encoding


def leave_out(name: str) -> str:
    return f"leave it out with file.without({name!r})"


def bits_of(encoding: Encoding) -> int:
    """Width of an integer type."""
    low, high = grid_of(encoding.dtype)
    return high.bit_length() + (low < 0)


def check_grid(encoding: Encoding, place: FilePlace, narrow: bool = False) -> None:
    """The grid is all that the type holds; with `narrow`, it may lack the lowest integer."""
    low, high = grid_of(encoding.dtype)
    grid = encoding.quant_min, encoding.quant_max
    if grid != (low, high) and not (narrow and low < 0 and grid == (low + 1, high)):
        raise place.error(
            f"has the grid [{grid[0]}, {grid[1]}] of {encoding.dtype}; this format holds [{low}, {high}]: make the simulation with "
            "narrow=False, or use format='qsim'"
        )


def check_one_axis(encoding: Encoding, place: FilePlace) -> None:
    """Scales lie along one axis at most."""
    if isinstance(encoding.axis, tuple):
        raise place.error(f"has tiles along the axes {encoding.axis}; this format has blocks along one axis at most: use format='qsim'")
