"""GGUF files written: weights on symmetric grids as blocks of Q4_0, Q8_0, Q4_K and Q6_K, all else in float.

What a reader computes in float32 is the weight that was written, bit for bit. Q4_K takes a minimum off each group; here it is eight times
the group's scale, beside a float16 that is eight times the other, so that 15 steps from it are the symmetric grid.

Source: github.com/ggml-org/ggml, docs/gguf.md, src/ggml-common.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.atomic import write_atomically
from qsim.checkpoints.checkpoint import Checkpoint
from qsim.checkpoints.packed_weight import PackedWeight
from qsim.numbers.two_levels import TwoLevels

_ALIGNMENT, _VERSION, _MAX_DIMS = 32, 3, 4
_SUPER = 256  # elements of a super-block
_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_LARGEST = torch.finfo(torch.float16).max
_CURE = "call sim.round_scales(torch.float16) first, or simulate TensorSpec(dtype='q4_k') or 'q6_k' for scales of two levels"


class _Stored(NamedTuple):
    """A tensor of the file: its type's number, its shape with the rows first, its size, and what makes its bytes."""

    kind: int
    shape: tuple[int, ...]
    size: int
    data: Callable[[], Tensor]


class _Unfit(Exception):
    """Why the format cannot hold a tensor."""


def write(path: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """Write the file, tensor by tensor. Returns what it cannot hold, by name; nothing is written then."""
    stored: dict[str, _Stored] = {}
    problems: dict[str, str] = {}
    for name in (*checkpoint.weights, *checkpoint.tensors):
        try:
            weight = checkpoint.weights.get(name)
            stored[name] = _float(checkpoint.tensors[name]) if weight is None else _packed(weight)
        except _Unfit as problem:
            problems[name] = str(problem)
    if not problems:
        metadata = checkpoint.model_config if checkpoint.format == "gguf" else {}
        write_atomically(path, _parts(stored, {name: _value(v) for name, v in metadata.items() if name != "general.alignment"}))
    return problems


def _parts(tensors: dict[str, _Stored], metadata: dict[str, bytes]) -> Iterator[bytes]:
    header = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    header += [_text(name) + value for name, value in metadata.items()]
    offset = 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        header += [_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.kind, offset)]
        offset += -(-tensor.size // _ALIGNMENT) * _ALIGNMENT
    before = b"".join(header)
    yield before + bytes(-len(before) % _ALIGNMENT)
    for tensor in tensors.values():
        yield tensor.data().numpy().tobytes()
        yield bytes(-tensor.size % _ALIGNMENT)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    """A value of the metadata, with its type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 1 << 32 else struct.pack("<Iq", 11, value)
    return struct.pack("<Id", 12, value)


def _float(t: Tensor) -> _Stored:
    if t.dtype not in _FLOATS or not 1 <= t.dim() <= _MAX_DIMS or t.numel() == 0:
        raise _Unfit(f"is {str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}; expected float32, float16 or bfloat16")
    return _Stored(_FLOATS[t.dtype], tuple(t.shape), t.nbytes, lambda: t.detach().cpu().contiguous().view(torch.uint8))


def _packed(weight: PackedWeight) -> _Stored:
    if weight.is_per_tensor or weight.is_tiled or weight.is_float:
        raise _Unfit(f"has {'float8 elements' if weight.is_float else 'one scale for several rows'}; expected integers, one scale a group")
    middle = 2 ** (weight.bits - 1) if weight.integers.dtype == torch.uint8 else 0
    if weight.minimum is not None or weight.order is not None or bool((weight.zero_point != middle).any()):
        raise _Unfit("has zero points or minima; expected a symmetric grid")
    integers = weight.integers.to(torch.int16) - middle
    found = _halves(weight, integers) or _super_blocks(weight, integers)
    if found is None:
        raise _Unfit(
            f"has {weight.bits} bits in groups of {weight.group_size}, {weight.integers.shape[-1]} columns; expected 4 or 8 bits in groups "
            f"of 32, or rows of whole super-blocks of {_SUPER} with 4 bits in groups of 32 or 6 in groups of 16; and scales of float16, or "
            f"of integers beside them: {_CURE}"
        )
    kind, size, data = found
    return _Stored(kind, tuple(integers.shape), size, data)


_Blocks = tuple[int, int, Callable[[], Tensor]] | None


def _halves(weight: PackedWeight, integers: Tensor) -> _Blocks:
    """Q4_0 or Q8_0, where each group has a scale of float16."""
    scale = weight.scale.half()
    if (
        weight.bits not in (4, 8)
        or weight.group_size != 32
        or integers.shape[-1] % 32
        or not torch.equal(scale.float(), weight.scale.float())
    ):
        return None
    first = scale.reshape(-1, 1).view(torch.uint8)
    blocks = integers.reshape(-1, 32)
    if weight.bits == 8:
        return 8, 34 * len(blocks), lambda: torch.cat([first, blocks.to(torch.int8).view(torch.uint8)], 1)
    return 2, 18 * len(blocks), lambda: torch.cat([first, _nibbles((blocks + 8).to(torch.uint8))], 1)


def _super_blocks(weight: PackedWeight, integers: Tensor) -> _Blocks:
    """Q4_K or Q6_K, where each super-block has a float16 that the scales of its groups are integers of."""
    known = {(4, 32): (63, _q4_k, 12, 144), (6, 16): (127, _q6_k, 14, 210)}.get((weight.bits, weight.group_size))
    if known is None or integers.shape[-1] % _SUPER or not bool((weight.scale > 0).all()):
        return None
    levels, pack, kind, size = known
    groups = weight.scale.float().reshape(-1, _SUPER // weight.group_size)
    try:
        steps, super_scale = TwoLevels(levels, 1).split(groups, torch.float16)
    except ValueError:
        return None
    half = super_scale.half()
    if float(half.max()) * 8 > _LARGEST:
        return None
    blocks = integers.reshape(-1, _SUPER)
    return kind, size * len(blocks), lambda: pack(blocks, steps.to(torch.uint8), half)


def _nibbles(values: Tensor) -> Tensor:
    """Two numbers in a byte along the last axis: the first half in low halves."""
    low, high = values.chunk(2, -1)
    return low | (high << 4)


def _q4_k(blocks: Tensor, steps: Tensor, half: Tensor) -> Tensor:
    """Scales of the last four groups lie in the spare bits of the first, minima as the scales."""
    first, last = steps.chunk(2, 1)
    low = first | ((last >> 4) << 6)
    scales = torch.cat([low, low, (last & 15) | ((last & 15) << 4)], 1)
    packed = _nibbles((blocks + 8).to(torch.uint8).reshape(-1, 4, 64)).flatten(1)
    return torch.cat([half.view(torch.uint8), (half * 8).view(torch.uint8), scales, packed], 1)


def _q6_k(blocks: Tensor, steps: Tensor, half: Tensor) -> Tensor:
    """The lower four bits of the integers, the upper two, the scales."""
    parts = (blocks + 32).to(torch.uint8).reshape(-1, 2, 128)
    low = _nibbles(parts & 15).flatten(1)
    quarters = (parts >> 4).chunk(4, -1)
    high = (quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6).flatten(1)
    return torch.cat([low, high, steps, half.view(torch.uint8)], 1)
