"""What each target does to numbers: the float format of its tensors, the width of its accumulators, the integers of its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from qsim.config.profile import COREML, DEFAULT, ONNXRUNTIME, PROFILES, TENSORRT
from qsim.numbers.float_format import FLOAT_FORMATS, FloatFormat
from qsim.options import shown


@dataclass(frozen=True)
class Target:
    """Where the model is to run.

    Attributes
    ----------
    name : str
    format : str or None
        What tensors, weights and constants are stored in; None: float32.
    accumulator : "float16" or "float32"
        As `Profile.half_accumulator`. Sums of float16 numbers overflow in float16 although their mean would fit.
    folds : bool
        Whether BatchNorms become part of the layers beside them before anything runs.
    integers : bool
        Whether weights and activations become int8: what is not quantized stays in float32.
    per_channel : bool
        Whether integer weights have one scale per output channel, not one for the whole tensor.
    int32_bias : bool
        Whether biases are int32 with the scale of the products that they are added to; else they stay in float32.
    sqnr : float
        dB that the output keeps at least when nothing is wrong: what several dozen roundings to the format cost, and a margin.
    """

    name: str
    format: str | None = None
    accumulator: str = "float32"
    folds: bool = True
    integers: bool = False
    per_channel: bool = True
    int32_bias: bool = False
    sqnr: float = 20.0

    @property
    def numbers(self) -> FloatFormat | None:
        """The numbers of the format; None for float32."""
        return None if self.format is None else FLOAT_FORMATS[self.format]


TARGETS = {
    target.name: target
    for target in (
        Target("float32", folds=False),
        Target("bf16", "bfloat16", folds=False),
        *(
            Target(f"{profile.name}-fp16", "float16", accumulator=profile.half_accumulator, sqnr=30.0)
            for profile in (TENSORRT, ONNXRUNTIME, COREML)
        ),
        *(Target(f"{name}-int8", integers=True, int32_bias=bool(profile.bias)) for name, profile in PROFILES.items() if profile != DEFAULT),
    )
}
TARGETS |= {
    name.removesuffix("-int8"): target for name, target in TARGETS.items() if target.integers
}  # as `qsim.int8(target=...)` has them


def target_named(name: str | Target) -> Target:
    """The target of a name; a Target of one's own is handed through."""
    if isinstance(name, Target):
        return name
    if not isinstance(name, str) or name not in TARGETS:
        raise ValueError(f"doctor: got target={shown(name)}; expected one of {', '.join(map(repr, TARGETS))}")
    return TARGETS[name]
