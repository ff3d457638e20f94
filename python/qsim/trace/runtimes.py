"""What the runtimes take, as data: which integers and float formats, with which scales and zero points."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qsim.config.config import Config
from qsim.config.profile import runtime_named
from qsim.numbers.encoding import Encoding
from qsim.numbers.float_format import FLOAT_FORMATS, HALF_FORMATS
from qsim.quantizers.quantizer import Quantizer

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Runtime:
    """What a runtime can load.

    Attributes
    ----------
    name : str
        That of its `qsim.Profile`.
    activations, weights : tuple of str
        Types that tensors are stored in: of integers the smallest that holds the grid is taken, so the order matters.
    zero_points : bool
        Whether a zero point may differ from 0.
    channels : bool
        Whether activations may have one scale per channel.
    blocks : bool
        Whether weights may have one scale per block.
    bias : bool
        Whether biases may be int32, with the scale of the products.
    marks_moves : bool
        Whether an operation runs on integers only if quantizers stand right beside it: then operations that only move values get one too.
        Other compilers carry quantizers over those.
    only8 : bool
        Whether its integer kernels take 8 bits alone, and are exact for int8 alone: see `storages`.
    tokens : bool
        Whether it is told to compute scales from each token: see `qsim.trace.token_scales`.
    channel_blocks : bool
        Whether its convolutions are fast for whole blocks of channels alone: see `qsim.onnx.channel_blocks`.
    whole8 : bool
        Whether its kernels clamp to the ends of int8, so that the grids of activations have to end there.
    one_gelu : bool
        Whether it fuses Gelu where that is one operation of the graph alone.
    reads_onnx : bool
        Whether it reads ONNX. ExecuTorch reads programs of its own, made for fixed sizes unless a caller leaves some open.
    """

    name: str
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    zero_points: bool = True
    channels: bool = False
    blocks: bool = True
    bias: bool = False
    marks_moves: bool = False
    only8: bool = False
    tokens: bool = False
    channel_blocks: bool = False
    whole8: bool = False
    one_gelu: bool = False
    reads_onnx: bool = True

    def storage(self, encoding: Encoding, constant: bool) -> str | None:
        """The type that holds the numbers of an encoding; None where the runtime takes none that does."""
        return next((dtype for dtype in (self.weights if constant else self.activations) if _holds(dtype, encoding.dtype)), None)

    def objections(self, quantizer: Quantizer, constant: bool) -> Iterator[str]:
        """Why the runtime cannot take what a quantizer makes, and what to change, a sentence each."""
        encoding, spec = quantizer.encoding, quantizer.spec
        if spec.is_dynamic:
            kinds = "those for a whole tensor or token, of integers of at most 8 bits" if self.tokens else "none for this target"
            yield (
                f"a scale from each tensor (method='dynamic'), of which the export writes {kinds}: use another method for it and calibrate "
                f"({self.name} then quantizes with a fixed scale), or leave it in float (activation=None)"
            )
            return
        if encoding is None:
            yield "no encoding: calibrate with data that reach it"
            return
        offered = self.weights if constant else self.activations
        role = "a constant" if constant else "an activation"
        if self.storage(encoding, constant) is None:
            yield f"{role} in {encoding.dtype}, which {self.name} does not take: use {', '.join(offered)}"
        if not spec.is_float and not self.zero_points and bool((encoding.zero_point != 0).any()):
            yield f"zero point {_shown(encoding.zero_point)}; {self.name} takes 0 alone: use symmetric=True, signed=True"
        if not constant and self.whole8 and not spec.is_float and encoding.quant_max - encoding.quant_min != 255:
            numbers = f"[{encoding.quant_min}, {encoding.quant_max}]"
            yield f"an activation on the integers {numbers}; {self.name} clamps to all that 8 bits hold: use bits=8, narrow=False"
        if not constant and encoding.axis is not None and not self.channels:
            yield f"{role} with one scale per channel or block; {self.name} takes one scale: use axis=None"
        if constant and encoding.block_size is not None and not self.blocks:
            yield f"one scale per block, which {self.name} does not take: use block_size=None"


def _holds(dtype: str, wanted: str) -> bool:
    """Whether every number of `wanted` ("int6") is one of `dtype` ("int8"), by their widths and signs."""
    if wanted in FLOAT_FORMATS or dtype in FLOAT_FORMATS:
        return dtype == wanted
    (sign, bits), (wanted_sign, wanted_bits) = (re.fullmatch(r"(u?)int(\d+)", name).groups() for name in (dtype, wanted))  # type: ignore[union-attr]
    return sign == wanted_sign and int(bits) >= int(wanted_bits)


def _shown(zero_point: torch.Tensor) -> str:
    values = sorted(set(zero_point.flatten().tolist()))
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def stored_as(encoding: Encoding, storage: str | None) -> Encoding:
    """A signed encoding in uint8, if that is how it is stored: everything 128 higher, the same values."""
    if storage != "uint8" or encoding.quant_min >= 0:
        return encoding
    low, high = encoding.quant_min + 128, encoding.quant_max + 128
    return dataclasses.replace(encoding, zero_point=encoding.zero_point + 128, quant_min=low, quant_max=high, dtype="uint8")


_INT8_16 = ("int8", "uint8", "int16", "uint16")

RUNTIMES = {
    target.name: target
    for target in (
        Runtime(
            "onnxruntime",
            activations=(*_INT8_16, *HALF_FORMATS),  # of float8, ONNX Runtime 1.31 makes operators that it cannot load
            weights=("int4", "uint4", *_INT8_16, *HALF_FORMATS),
            channels=True,
            bias=True,
            marks_moves=True,
            only8=True,
            tokens=True,
            channel_blocks=True,
            one_gelu=True,
        ),
        Runtime(
            "tensorrt",
            activations=("int8", *HALF_FORMATS, "float8_e4m3fn"),
            weights=("int4", "int8", *HALF_FORMATS, "float8_e4m3fn"),
            zero_points=False,
        ),
        Runtime(
            "openvino",
            activations=(*_INT8_16, *HALF_FORMATS, *_FLOAT8),
            weights=("int4", "uint4", *_INT8_16, *HALF_FORMATS, *_FLOAT8),
        ),
        Runtime(
            "executorch",
            activations=("int8", "uint8"),
            weights=("int8",),
            blocks=False,
            bias=True,
            marks_moves=True,
            whole8=True,
            reads_onnx=False,
        ),
        Runtime(
            "coreml",
            activations=("int8", "float16"),
            weights=("int4", "int8", "float16"),
            zero_points=False,
        ),
    )
}
ONNX_RUNTIMES = {name: target for name, target in RUNTIMES.items() if target.reads_onnx}


def target_of(name: str | None, config: Config) -> Runtime:
    """The target of this name; None takes that of the config that a simulation was made with, and ONNX Runtime where it has no runtime."""
    if name is None:
        return RUNTIMES.get(config.profile.name, RUNTIMES["onnxruntime"])
    return RUNTIMES[runtime_named(name, (config.weight, config.activation), "QuantSim.export", RUNTIMES)]
