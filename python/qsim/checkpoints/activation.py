"""What weights are multiplied with, in the files that quantize it: 8 bits, with a scale from each token, from each block of a token's
values, or one from calibration."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qsim.checkpoints.folder import SCALE_TYPES, Parts
from qsim.checkpoints.packed_weight import PackedWeight, Scheme
from qsim.config.presets import fp8_block, fp8_dynamic, fp8_static, w8a8_dynamic, w8a8_static
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.observer import encoding_of_range

NO_ACTIVATIONS = "is multiplied with quantized activations, and the format has no place for that"
POWERS = "float8_e8m0fnu"  # scales that are powers of two


class Activation(NamedTuple):
    """What a weight is multiplied with: how it is quantized, and with which encoding where that is no question of the tensor itself."""

    spec: TensorSpec
    encoding: Encoding | None


@functools.cache
def by_token(kind: str) -> TensorSpec:
    """Of "int" or "float", as vLLM's kernels do it: the largest magnitude of a token is the end of the grid."""
    config = w8a8_dynamic() if kind == "int" else fp8_dynamic()
    assert config.activation is not None
    return config.activation


@functools.cache
def by_block(size: int, powers: bool = False) -> TensorSpec:
    """Of "float": a scale for each `size` values of a token. `powers`: the least power of two with which nothing is clipped."""
    config = fp8_block(size)
    assert config.activation is not None
    if not powers:
        return config.activation
    return dataclasses.replace(config.activation, scale_format=POWERS, scale_rounding="rceil")


@functools.cache
def one_scale(kind: str, symmetric: bool = True) -> TensorSpec:
    """Of "int" or "float", with one scale; a file does not say how it was chosen."""
    config = w8a8_static() if kind == "int" else fp8_static()
    assert config.activation is not None
    return dataclasses.replace(config.activation, symmetric=symmetric, method="minmax")


def kind_of(activation: TensorSpec) -> str | None:
    """Whether a file has activations of "int" or "float" that are quantized so; None if no file has."""
    for kind in ("int", "float"):
        static = one_scale(kind, activation.symmetric)
        same = (activation.encoding_dtype, activation.quant_min, activation.quant_max, activation.layout)
        fits = same == (static.encoding_dtype, static.quant_min, static.quant_max, static.layout) and activation.rounding == static.rounding
        if activation == by_token(kind) or (fits and not activation.is_dynamic):
            return kind
    size = activation.block_size
    return "float" if isinstance(size, int) and activation == by_block(size, activation.scale_format == POWERS) else None


def with_activation(scheme: Scheme, activation: Activation | None) -> Scheme:
    """The scheme, with what a file says of activations: not how their ranges were chosen."""
    if activation is None:
        return scheme
    spec = activation.spec if activation.encoding is None else dataclasses.replace(activation.spec, method="minmax")
    return dataclasses.replace(scheme, activation=spec)


def missing_scale(activation: Activation | None) -> str | None:
    """What is wrong if one scale is wanted and there is none; None if that is right."""
    if activation is None or activation.spec.is_dynamic or activation.encoding is not None:
        return None
    return "is multiplied with activations of one scale, and Checkpoint.encodings has none for it"


def blocks_problem(weight: PackedWeight, activation: Activation | None) -> str | None:
    """Why no file has such tiles beside such activations; None if one has."""
    size = weight.block_size[1] if isinstance(weight.block_size, tuple) else None
    if activation is None or activation.spec.block_size == size:
        return None
    found = f"tiles of {weight.block_size}" if weight.is_tiled else "no tiles"
    each = activation.spec.block_size
    return (
        f"has {found} beside activations with {'no blocks' if each is None else f'blocks of {each}'}; expected tiles as wide as the blocks "
        "of a token, as qsim.fp8_block() has them, or neither"
    )


def packed_activation(activation: Activation | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of what a weight is multiplied with, beside those of the weight, whose scales are of `dtype`."""
    if activation is None or activation.encoding is None:
        return {}
    found = {"input_scale": as_read(activation.encoding.scale, dtype)}
    if not activation.spec.symmetric:
        found["input_zero_point"] = activation.encoding.zero_point.reshape(1).to(torch.int8, copy=True)
    return found


def as_read(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a single scale, in the type that others of the file have if it is one of its numbers: a file has each memory once."""
    own = scale.reshape(1).clone()
    narrow = own.to(dtype)
    return narrow if torch.equal(narrow.to(own.dtype), own) else own


def calibrated(spec: TensorSpec, scale: Tensor, zero_point: Tensor | None, parts: Parts) -> Activation:
    """Activations with one scale, as a file has it."""
    parts.check("the number of input scales", scale.numel(), 1)
    shift = torch.zeros((), dtype=torch.int32) if zero_point is None else zero_point.reshape(()).to(torch.int32)
    scale = positive(scale.reshape(()).float(), "input_scale", parts)
    return Activation(spec, Encoding(scale, shift, spec.quant_min, spec.quant_max, **spec.layout))


def positive(scale: Tensor, name: str, parts: Parts) -> Tensor:
    """The scale; an error where it is none."""
    values = scale.float()
    if not bool((values.isfinite() & (values > 0)).all()):
        raise parts.place.error(f"{name} has numbers that are not positive and finite")
    return scale


def weight_scale(parts: Parts, name: str, dims: int | tuple[int, ...], *more: torch.dtype) -> Tensor:
    """The scales of a weight, checked."""
    return positive(parts.take(name, dims, *SCALE_TYPES, *more), name, parts)


def finite(values: Tensor, parts: Parts) -> Tensor:
    """The elements of a weight; an error where one is NaN."""
    if not bool(values.float().isfinite().all()):
        raise parts.place.error("weight has NaN in it; expected finite numbers")
    return values


def widest(every: Sequence[Encoding], spec: TensorSpec) -> Encoding:
    """The encoding that spans all ranges of one tensor."""
    first = every[0]
    if all(encoding == first for encoding in every):
        return first
    if all(encoding.symmetric for encoding in every):
        return max(every, key=lambda encoding: float(encoding.scale))
    low, high = torch.stack([encoding.min for encoding in every]), torch.stack([encoding.max for encoding in every])
    return encoding_of_range(low.min(), high.max(), spec)
