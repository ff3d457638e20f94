"""GGUF files: the tensors of llama.cpp's models, those of the commonest quantized types as integers.

Source: github.com/ggml-org/ggml, docs/gguf.md (the file) and src/ggml-common.h, ggml-quants.c (the blocks). The package gguf of llama.cpp
reads them too, but takes what a damaged file says at its word.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.checkpoints.checkpoint import Checkpoint
from qsim.checkpoints.packed_weight import PackedWeight
from qsim.files.file_place import FilePlace

FORMAT = "gguf"
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS, _MAX_NAME, _MAX_NESTING = 4, 4096, 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_SUPER = 256  # elements of a super-block


class _BlockType(NamedTuple):
    """A type of tensor: its name, elements and bytes of a block, and what makes a weight of ``[blocks, bytes]`` (None: it is a float)."""

    name: str
    elements: int
    bytes: int
    dtype: torch.dtype | None
    read: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None, int]] | None


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """All low halves of the bytes, then all high ones, along the last axis."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    return _nibbles(blocks[:, 2:]).to(torch.int8) - 8, _half(blocks, 0), None, 4


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2).float(), 4


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None, 8


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Eight groups of 32 with scales and minima of 6 bits; those of the last four groups lie in the spare bits of the first."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    minimum = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1)
    integers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return integers, _half(blocks, 0).float() * scale.float(), _half(blocks, 2).float() * minimum.float(), 4


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Sixteen groups of 16 with scales of int8; the upper two bits of the integers lie apart from the lower four."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    packed = blocks[:, 128:192].reshape(-1, 2, 32)
    high = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    scale = blocks[:, 192:208].contiguous().view(torch.int8)
    return (low | (high << 4)).flatten(1).to(torch.int8) - 32, _half(blocks, 208).float() * scale.float(), None, 6


_TYPES = {
    0: _BlockType("F32", 1, 4, torch.float32, None),
    1: _BlockType("F16", 1, 2, torch.float16, None),
    2: _BlockType("Q4_0", 32, 18, None, _q4_0),
    3: _BlockType("Q4_1", 32, 20, None, _q4_1),
    8: _BlockType("Q8_0", 32, 34, None, _q8_0),
    12: _BlockType("Q4_K", _SUPER, 144, None, _q4_k),
    14: _BlockType("Q6_K", _SUPER, 210, None, _q6_k),
    30: _BlockType("BF16", 1, 2, torch.bfloat16, None),
}


def read(path: Path) -> Checkpoint:
    """`load_checkpoint` documents it."""
    place = FilePlace(str(path))
    size = path.stat().st_size
    if size == 0:
        raise place.error("is empty; expected a GGUF file")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        metadata, infos, start = _Header(mapped, place).read()
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    if sum(info.bytes for info in infos) > size:
        raise place.error("tensors lie upon each other; expected each in bytes of its own")
    weights, tensors = {}, {}
    for info in infos:
        begin = start + info.offset
        if begin + info.bytes > size:
            raise place.at(info.name).error(f"ends at byte {begin + info.bytes} of a file of {size}: it is not complete")
        raw = data[begin : begin + info.bytes]
        if info.type.dtype is not None:
            tensors[info.name] = raw.clone().view(info.type.dtype).reshape(info.shape)
        else:
            weights[info.name] = _weight(raw.reshape(-1, info.type.bytes), info)
    return Checkpoint(weights, tensors, FORMAT, metadata)


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: _BlockType
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) // self.type.elements * self.type.bytes


def _weight(blocks: Tensor, info: _Info) -> PackedWeight:
    assert info.type.read is not None
    integers, scale, minimum, bits = info.type.read(blocks)
    size = integers.shape[1] // scale.shape[1]
    groups = (*info.shape[:-1], info.shape[-1] // size)
    zero_point = torch.zeros(groups, dtype=torch.int32)
    middle = 1 << (bits - 1)
    if minimum is not None and torch.equal(minimum, middle * scale.float()):  # a symmetric grid, as `gguf_write` stores it
        zero_point, minimum = zero_point + middle, None
    least = None if minimum is None else minimum.reshape(groups)
    return PackedWeight(integers.reshape(info.shape).contiguous(), scale.reshape(groups), zero_point, bits, size, minimum=least)


class _Header:
    """What stands before the tensors' bytes, read from front to end."""

    def __init__(self, data: mmap.mmap, place: FilePlace) -> None:
        self.data, self.place, self.at = data, place, 0

    def read(self) -> tuple[dict[str, Any], list[_Info], int]:
        """Metadata without its arrays, the tensors, and where their bytes begin."""
        if self._bytes(4) != MAGIC:
            raise self.place.wanted("the beginning", self.data[:4], "'GGUF'")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise self.place.wanted("the version", version, f"{_VERSIONS[0]} or {_VERSIONS[1]}, little-endian")
        tensors, entries = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self._text()
            value = self._value(self._number("<I"), 0)
            if value is not None:
                metadata[name] = value
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment % 8:
            raise self.place.wanted("general.alignment", alignment, "a multiple of 8")
        infos: dict[str, _Info] = {}
        for _ in range(tensors):
            info = self._info(alignment)
            if infos.setdefault(info.name, info) is not info:
                raise self.place.at(info.name).error("occurs twice")
        return metadata, list(infos.values()), -(-self.at // alignment) * alignment

    def _info(self, alignment: int) -> _Info:
        name = self._text()
        place, dims = self.place.at(name), self._number("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise place.wanted("the number of dimensions", dims, f"1 to {_MAX_DIMS}")
        shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in _TYPES:
            raise place.wanted("the type", kind, ", ".join(f"{number} ({blocks.name})" for number, blocks in _TYPES.items()))
        blocks = _TYPES[kind]
        if min(shape) < 1 or shape[-1] % blocks.elements or offset % alignment:
            raise place.error(
                f"has shape {shape}, type {blocks.name}, offset {offset}; expected rows of whole blocks of {blocks.elements}, and a "
                f"multiple of {alignment}"
            )
        return _Info(name, shape, blocks, offset)

    def _step(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise self.place.error(f"ends at byte {len(self.data)}, within its header: it is not complete")
        self.at += count

    def _bytes(self, count: int) -> bytes:
        self._step(count)
        return self.data[self.at - count : self.at]

    def _number(self, format: str) -> Any:
        return struct.unpack(format, self._bytes(struct.calcsize(format)))[0]

    def _text(self) -> str:
        length = self._number("<Q")
        if length > _MAX_NAME:
            raise self.place.error(f"a name has {length} bytes; expected at most {_MAX_NAME}")
        return self._decoded(length)

    def _decoded(self, length: int) -> str:
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            raise self.place.error(f"the text before byte {self.at} is not UTF-8") from None

    def _value(self, kind: int, depth: int) -> Any:
        """A value of the metadata; None of an array, which is stepped over."""
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._decoded(self._number("<Q"))
        if kind != _ARRAY or depth == _MAX_NESTING:
            raise self.place.wanted("the type of a value", kind, f"0 to 12, arrays at most {_MAX_NESTING} deep")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in _SCALARS:
            self._step(count * struct.calcsize(_SCALARS[inner]))
        else:
            for _ in range(count):
                self._step(self._number("<Q")) if inner == _STRING else self._value(inner, depth + 1)
        return None
