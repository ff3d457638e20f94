"""Parameters that lie in files: read where something reads them, and no memory's in between.

Such a parameter is a private memory map. It has its values at all times, as any parameter; what is written to it is in memory from then
on, and never in the file.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PAGE = mmap.PAGESIZE
_DONTNEED = 4  # of madvise(2), for private maps: the next look reads the file again
_PRESENT, _SWAPPED, _OF_FILE = (1 << bit for bit in (63, 62, 61))  # of an entry of /proc/self/pagemap (Linux, admin-guide/mm/pagemap)


class Stored(NamedTuple):
    """Where the elements of a tensor lie, in order and without gaps.

    Attributes
    ----------
    path : Path
    begin : int
        In bytes.
    shape : torch.Size
    dtype : torch.dtype
    """

    path: Path
    begin: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def mapped(self) -> Tensor:
        """The tensor, of which nothing has been read yet. OSError or ValueError if the file is not that long, or lies otherwise."""
        before = self.begin % mmap.ALLOCATIONGRANULARITY
        if self.begin % self.dtype.itemsize or not self.bytes:
            raise ValueError(f"{self.path}: {self.bytes} bytes at {self.begin} cannot be mapped as {self.dtype}")
        with self.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), before + self.bytes, access=mmap.ACCESS_COPY, offset=self.begin - before)
        return torch.frombuffer(pages, dtype=self.dtype, count=self.shape.numel(), offset=before).reshape(self.shape)


class MappedParameter(nn.Parameter):
    """A parameter that is mapped from a file. Copies that are made of it are mapped too, as long as nobody has written to it.

    Attributes
    ----------
    stored : Stored
    address : int
        Of what is mapped: assigning `.data` leaves it.
    """

    stored: Stored
    address: int

    def __new__(cls, stored: Stored, requires_grad: bool = True) -> MappedParameter:
        values = stored.mapped()
        made: MappedParameter = torch.Tensor._make_subclass(cls, values, requires_grad)  # type: ignore[assignment]
        made.stored, made.address = stored, values.data_ptr()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = _as_parameter(self.contents(), self)
        found: nn.Parameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def is_mapped(self) -> bool:
        """Whether it still lies in the map."""
        return self.data_ptr() == self.address

    def is_written(self) -> bool:
        """Whether its values may be others than those of the file."""
        if not self.is_mapped:
            return True
        private = _has_private_pages(self.address, self.stored.bytes)
        return not same_bytes(self, self.stored.mapped()) if private is None else private

    def contents(self) -> Tensor:
        """Its values, in memory of their own: mapped again where nobody has written to them."""
        if not self.is_written():
            try:
                return MappedParameter(self.stored, self.requires_grad)
            except (OSError, ValueError):  # the file is gone; the map is not
                pass
        return self.detach().clone()

    def put_back(self, contents: Tensor) -> None:
        """Have the values that `contents` returned."""
        if not isinstance(contents, MappedParameter):
            self.data.copy_(contents)
        elif self.is_written():
            self.data, self.address = contents.detach(), contents.address

    def release(self) -> None:
        """Give back the memory of what was read. What was written stays, and so does all where the system does not tell which is which."""
        if sys.platform == "linux" and self.is_mapped and _has_private_pages(self.address, self.stored.bytes) is False:
            begin = self.address // _PAGE * _PAGE
            advise = ctypes.CDLL(None).madvise
            advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            advise(begin, self.address + self.stored.bytes - begin, _DONTNEED)


def release(t: object) -> bool:
    """Give back the memory of what was read of a tensor, if it is mapped from a file: whether it is."""
    if not isinstance(t, MappedParameter):
        return False
    t.release()
    return True


def _as_parameter(values: Tensor, like: nn.Parameter) -> nn.Parameter:
    return values if isinstance(values, nn.Parameter) else nn.Parameter(values, like.requires_grad)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors hold the same bits, NaN included."""
    return torch.equal(one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8))


def _has_private_pages(address: int, count: int) -> bool | None:
    """Whether any page of a private map of a file was written to; None where the system does not tell."""
    first = address // _PAGE
    pages = (address + count - 1) // _PAGE + 1 - first
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            entries = file.read(8 * pages)
    except OSError:
        return None
    if len(entries) != 8 * pages:
        return None
    flags = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    there = (flags & _signed(_PRESENT | _SWAPPED)) != 0
    return bool((there & ((flags & _OF_FILE) == 0)).any())


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
