from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsim.call_fit import tells_construction
from qsim.numbers.block_formats import BLOCK_FORMATS, SCALE_FORMATS, SCALE_ROUNDINGS
from qsim.numbers.blocks import Axes, block_lengths, ranges_shape
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.numbers.range_methods import RANGE_METHODS
from qsim.numbers.two_levels import TwoLevels

DTYPES = ("int", *FLOAT_FORMATS)
ROUNDINGS = ("divide", "reciprocal")
NONFINITE = ("skip", "raise", "saturate")


@tells_construction("")
@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is quantized: its grid, its granularity and how its range is chosen.

    Parameters
    ----------
    bits : int, 2 to 16
        Width of the integers. A float format has its own width, which replaces what is given here.
    symmetric : bool
        Zero point in the middle of the grid (0 on ``[-128, 127]``, 128 on ``[0, 255]``).
    signed : bool, optional
        ``[-128, 127]`` or ``[0, 255]``; None leaves it to the deployment target, and is signed where none says otherwise.
    narrow : bool
        Drop the lowest integer of a signed grid: ``[-127, 127]``.
    axis : int or tuple of int, optional
        One scale per index along this axis; None for one scale per tensor. ``axis=0`` in ``Config.weight`` means the output
        channels, wherever an operation has them.
    block_size : int or tuple of int, optional
        One scale per block of so many elements along `axis`, and per index along every other axis. ``axis=(0, 1),
        block_size=(128, 128)`` gives one scale per tile.
    method : str
        How the range is chosen: "minmax", "percentile", "mse", "tf_enhanced" or "entropy" from what calibration observed; "ema" is a
        running range that follows the batches in training; "dynamic" is the range of each tensor itself, for activations: there is no
        encoding, and nothing to calibrate. With it ``axis=-1`` alone is one scale per token: for each line along the axis, for every
        index of all others.
    dtype : str
        "int", or a float format: "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "float6_e2m3fn",
        "float4_e2m1fn". float16 and bfloat16 round without a scale: `axis`, `block_size` (both become None) and all that concerns
        integers or ranges have no effect. The others have a scale, the largest magnitude of the range over the format's largest
        number, and are always symmetric. Their `method` is "percentile", "dynamic" or "minmax", which the others become: they weigh
        clipping against the step of an integer grid, and the relative step of a float format is the same at every scale.
        Block formats go by their names: "mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", and for weights
        "lpbq", "q4_k" and "q6_k" stand for a dtype with its `scale_format` and, unless they are given, `block_size` and ``axis=-1``.
    learnable : bool
        Train the scale (LSQ, Esser et al. 2020).
    percentile : float, 1 < percentile <= 100
        For "percentile": share of the mass inside the range, in percent. A share of 1 is an error: 0.999 would clip nearly everything.
    gamma : float, >= 0
        For "tf_enhanced": weight of the error of values that round off the grid.
    averaging : float, 0 < averaging <= 1
        For "ema": weight of a batch; how far the running range moves towards that of the batch.
    min_scale : float, >= 0
        Raises the smallest scale, which is otherwise the smallest normal float32.
    rounding : str
        "divide" (as ONNX) or "reciprocal" (as TensorRT: multiply by ``1 / scale``). Float formats always divide.
    nonfinite : str
        What calibration does about NaN and Inf in the data: "skip" (leave them out and count them), "raise", or "saturate"
        (Inf counts as the largest finite value seen, -Inf as the smallest). Weights are searched without them.
    scale_format : str, optional
        What scales are stored as: "float8_e8m0fnu", powers of two, as in the OCP MX formats; "float8_e4m3fn", beside one float32 a
        tensor, as in NVFP4; see `qsim.ops.choose_block_scale`. "int", of integer weights: integers beside one float32 for each
        `super_block`, as in AIMET's LPBQ and GGUF's k-quants. None is float32. Integers are symmetric with any of them, and ranges
        those that float formats have with the first two.
    scale_rounding : str
        Which power of two "float8_e8m0fnu" takes: "floor" (as the OCP specification says), "ceil", "even" or "rceil".
    scale_levels : int, 1 to 65535
        For ``scale_format="int"``: scales are 1 to so many times the float32.
    super_block : int, optional
        For ``scale_format="int"``: elements along `axis` that share the float32, a multiple of `block_size`. None: all of them, an output
        channel of a weight.
    saturate : bool, optional
        For a float format: whether an overflow becomes the largest finite number. None is the format's habit: float16 and bfloat16 go
        to Inf, all others saturate.

    Examples
    --------
    >>> spec = TensorSpec(bits=4, symmetric=True, narrow=True)
    >>> spec.quant_min, spec.quant_max
    (-7, 7)
    >>> spec = TensorSpec(dtype="mxfp4", method="dynamic")
    >>> spec.dtype, spec.block_size, spec.scale_format
    ('float4_e2m1fn', 32, 'float8_e8m0fnu')
    """

    bits: int = 8
    symmetric: bool = False
    signed: bool | None = None
    narrow: bool = False
    axis: int | tuple[int, ...] | None = None
    block_size: int | tuple[int, ...] | None = None
    method: str = "tf_enhanced"
    dtype: str = "int"
    learnable: bool = False
    percentile: float = 99.99
    gamma: float = 3.0
    averaging: float = 0.01
    min_scale: float = 0.0
    rounding: str = "divide"
    nonfinite: str = "skip"
    saturate: bool | None = None
    scale_format: str | None = None
    scale_rounding: str = "floor"
    scale_levels: int = 16
    super_block: int | None = None

    def __post_init__(self) -> None:
        self._set(block_format(self.dtype, self.axis, self.block_size))
        self._reject(self.super_block is not None and self.scale_format != "int", "super_block needs scale_format='int'")
        for name, value in vars(self).items():
            object.__setattr__(self, name, checked_field(name, value))
        if self.is_float:
            self._reject(self.learnable, f"learnable=True trains the scale of an integer grid; got dtype={self.dtype!r}: use dtype='int'")
            self._set({"bits": FLOAT_FORMATS[self.dtype].bits, **({} if self.has_scale else {"axis": None, "block_size": None})})
        if self.scale_format is not None:
            self._check_stored_scale()
        if self.has_scale and (self.is_float or self.scale_format not in (None, "int")):
            self._reject(self.method == "ema", f"method='ema' follows an integer grid; got dtype={self.dtype!r}: use method='minmax'")
            self._set({"symmetric": True, "method": "minmax" if RANGE_METHODS[self.method].weighs_clipping else self.method})
        unsigned = self.signed is False and not self.is_float
        self._reject(self.narrow and unsigned, "narrow=True drops the lowest integer of a signed grid; got signed=False")
        self._reject(self.block_size is not None and self.axis is None, "block_size needs the axis that blocks lie along; got axis=None")
        self._reject(self.learnable and self.method == "ema", "learnable=True trains the scale that method='ema' would overwrite; use one")
        axes, sizes = (len(value) if isinstance(value, tuple) else 0 for value in (self.axis, self.block_size))
        self._reject(
            axes != sizes,
            f"got axis={self.axis}, block_size={self.block_size}; expected one block size for each axis",
        )
        if self.is_float and self.scale_format is None and FLOAT_FORMATS[self.dtype].has_fraction:
            alike = "".join(f", or dtype={name!r}" for name, fields in BLOCK_FORMATS.items() if fields["dtype"] == self.dtype)
            raise ValueError(f"TensorSpec: {self.dtype} has no scale in float32: use scale_format='float8_e8m0fnu'{alike}")
        self._reject(axes > 0 and self.method == "ema", f"method='ema' follows no tiles; got axis={self.axis}: use one axis")
        self._reject(self.saturate is False and not self.is_float, "saturate=False needs a float format; integers always saturate")
        if self.is_dynamic:
            self._reject(self.learnable, "learnable=True trains a scale, and method='dynamic' takes it from each tensor; use one")
            self._reject(axes > 0, f"method='dynamic' knows lines and blocks along one axis; got axis={self.axis}: use one axis")
            skips = "method='dynamic' leaves NaN and Inf out of a range"
            self._reject(self.nonfinite != "skip", f"{skips}; got nonfinite={self.nonfinite!r}, which says what calibration does")

    def _set(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _check_stored_scale(self) -> None:
        given = f"scale_format={self.scale_format!r}"
        self._reject(not self.has_scale, f"got {given} for dtype={self.dtype!r}, which has no scale")
        self._reject(self.learnable, f"learnable=True trains a scale in float32; got {given}")
        self._reject(self.signed is False and not self.is_float, f"{given} needs a signed grid; got signed=False")
        if self.scale_format == "int":
            self._check_two_levels(given)

    def _check_two_levels(self, given: str) -> None:
        self._reject(self.is_float, f"{given} is of integers; got dtype={self.dtype!r}: use 'float8_e8m0fnu' or 'float8_e4m3fn'")
        self._reject(self.method in ("dynamic", "ema"), f"{given} is of weights, whose scales are chosen once; got method={self.method!r}")
        blocks = isinstance(self.axis, int) and isinstance(self.block_size, int)
        self._reject(not blocks, f"{given} is of blocks along one axis; got axis={self.axis}, block_size={self.block_size}")
        uneven = self.super_block is not None and self.super_block % self.block_size != 0  # type: ignore[operator]
        self._reject(uneven, f"got super_block={self.super_block}; expected a multiple of block_size={self.block_size}, or None")
        self._set({"symmetric": True})

    def _reject(self, wrong: bool, message: str) -> None:
        if wrong:
            raise ValueError(f"TensorSpec: {message}")

    @property
    def is_float(self) -> bool:
        """Whether the tensor is rounded to a float format instead of an integer grid.

        Examples
        --------
        >>> TensorSpec(dtype="float16").is_float, TensorSpec(bits=2).is_float
        (True, False)
        """
        return self.dtype != "int"

    @property
    def has_scale(self) -> bool:
        """Whether a scale is chosen from a range: for integers and float8, not for float16 and bfloat16.

        Examples
        --------
        >>> [TensorSpec(dtype=dtype).has_scale for dtype in ("int", "float8_e4m3fn", "float16")]
        [True, True, False]
        """
        return not self.is_float or FLOAT_FORMATS[self.dtype].scaled

    @property
    def is_running(self) -> bool:
        """Whether the range is a running one, which follows the batches in training.

        Examples
        --------
        >>> TensorSpec(method="ema").is_running
        True
        """
        return self.method == "ema" and not self.is_float

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale comes from each tensor itself: there is no encoding to choose.

        Examples
        --------
        >>> TensorSpec(method="dynamic", axis=-1).is_dynamic
        True
        """
        return self.method == "dynamic" and self.has_scale

    @property
    def two_levels(self) -> TwoLevels | None:
        """How scales are stored with ``scale_format="int"``; None with others.

        Examples
        --------
        >>> spec = TensorSpec(dtype="q4_k")
        >>> spec.two_levels.levels, spec.two_levels.count  # blocks of 32 in super-blocks of 256
        (63, 8)
        """
        if self.scale_format != "int":
            return None
        assert isinstance(self.axis, int)
        assert isinstance(self.block_size, int)
        return TwoLevels(self.scale_levels, self.axis, None if self.super_block is None else self.super_block // self.block_size)

    @property
    def quant_min(self) -> int:
        """Smallest number of the grid; of a float format, its smallest finite number."""
        if self.is_float:
            return -self.quant_max
        return 0 if self.signed is False else -(1 << (self.bits - 1)) + self.narrow

    @property
    def quant_max(self) -> int:
        """Largest number of the grid; of a float format, its largest finite number, of which float6_e2m3fn's 7.5 lacks the fraction."""
        if self.is_float:
            return int(FLOAT_FORMATS[self.dtype].largest)
        return (1 << self.bits) - 1 if self.signed is False else (1 << (self.bits - 1)) - 1

    @property
    def encoding_dtype(self) -> str:
        """Name of what the tensor is stored as: "int8", "uint4", "float16".

        Examples
        --------
        >>> TensorSpec(bits=4, signed=False).encoding_dtype, TensorSpec(dtype="float16").encoding_dtype
        ('uint4', 'float16')
        """
        if self.is_float:
            return self.dtype
        return f"{'u' if self.signed is False else ''}int{self.bits}"

    @property
    def layout(self) -> dict[str, Any]:
        """What an `Encoding` says besides numbers: which elements share a scale, how scales are stored, and what elements are stored as.

        Examples
        --------
        >>> TensorSpec(bits=4, axis=0).layout
        {'axis': 0, 'block_size': None, 'dtype': 'int4', 'scale_levels': None, 'super_block': None}
        """
        levels = self.scale_levels if self.scale_format == "int" else None
        elements = {"axis": self.axis, "block_size": self.block_size, "dtype": self.encoding_dtype}
        return {**elements, "scale_levels": levels, "super_block": self.super_block}

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON has them.

        Examples
        --------
        >>> spec = TensorSpec(bits=4)
        >>> TensorSpec.from_dict(spec.to_dict()) == spec
        True
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TensorSpec:
        """Inverse of `to_dict`; fields left out have their defaults, unknown ones are an error."""
        for name in fields:
            check_field_name(name)
        return cls(**fields)


def _one_of(*choices: str | None) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in choices, "one of " + ", ".join(repr(choice) for choice in choices)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _number(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: (_is_int(value) or isinstance(value, float)) and low <= value <= high and math.isfinite(value)


_BOOL: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), "True or False")
_BOOL_OR_NONE: tuple[Callable[[Any], bool], str] = (lambda value: value is None or isinstance(value, bool), "True, False or None")

# What each field of TensorSpec may be, alone: also what an override may set it to.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bits": (lambda value: _is_int(value) and 2 <= value <= 16, "an integer from 2 to 16"),
    "symmetric": _BOOL,
    "signed": _BOOL_OR_NONE,
    "narrow": _BOOL,
    "axis": (lambda value: value is None or (value != () and all(map(_is_int, _each(value)))), "an integer, a tuple of integers, or None"),
    "block_size": (
        lambda value: value is None or (value != () and all(_is_int(size) and size > 0 for size in _each(value))),
        "a positive integer, a tuple of them, or None",
    ),
    "method": _one_of(*RANGE_METHODS),
    "dtype": _one_of(*DTYPES, *BLOCK_FORMATS),
    "learnable": _BOOL,
    "percentile": (lambda value: _number(0, 100)(value) and value > 1, "percent of the values to keep, as 99.9: above 1, at most 100"),
    "gamma": (_number(0), "a finite number, at least 0"),
    "averaging": (lambda value: _number(0, 1)(value) and value > 0, "a number above 0, at most 1"),
    "min_scale": (_number(0), "a finite number, at least 0"),
    "rounding": _one_of(*ROUNDINGS),
    "nonfinite": _one_of(*NONFINITE),
    "saturate": _BOOL_OR_NONE,
    "scale_format": _one_of(*SCALE_FORMATS, None),
    "scale_rounding": _one_of(*SCALE_ROUNDINGS),
    "scale_levels": (lambda value: _is_int(value) and 1 <= value <= 65535, "an integer from 1 to 65535"),
    "super_block": (lambda value: value is None or (_is_int(value) and value > 0), "a positive integer, or None"),
}


def block_format(dtype: str, axis: Axes = None, block_size: Axes = None) -> dict[str, Any]:
    """What a name such as "mxfp4" stands for, as fields of TensorSpec, with the axis and block size if given; empty for other names."""
    named = BLOCK_FORMATS.get(dtype)
    if named is None:
        return {}
    layout = {"axis": -1 if axis is None else axis, "block_size": named["block_size"] if block_size is None else block_size}
    return {"super_block": None, **named, **layout}


def check_field_name(name: str) -> None:
    """Raise a ValueError that lists the fields of TensorSpec unless `name` is one."""
    if name not in _RULES:
        raise ValueError(f"TensorSpec: got unknown field {name!r}; expected one of {', '.join(_RULES)}")


def check_keys(cls: type, fields: Mapping[str, Any]) -> None:
    """Raise a ValueError that lists the fields of the dataclass `cls` unless `fields` has no other keys."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            raise ValueError(f"{cls.__name__}: got unknown key {name!r}; expected one of {', '.join(known)}")


def checked_field(name: str, value: Any) -> Any:
    """`value` if it is legal for the field `name` of TensorSpec, taken alone; a list, as JSON has it, as a tuple. ValueError otherwise."""
    check_field_name(name)
    value = tuple(value) if isinstance(value, list) else value
    legal, expected = _RULES[name]
    if not legal(value):
        raise ValueError(f"TensorSpec: got {name}={value!r}; expected {expected}")
    return value


def range_shape(shape: Sequence[int], axis: Axes, block_size: Axes) -> tuple[int, ...]:
    """Shape of the scales and ranges of a tensor: one element per tensor, channel or block.

    Parameters
    ----------
    shape : sequence of int
        Shape of the tensor; without `block_size` only its length along `axis` is used.
    axis, block_size : int or tuple of int, optional
        As in `TensorSpec`.

    Returns
    -------
    tuple of int
        ``()``, ``(shape[axis],)``, or `shape` with ``ceil(n / block_size)`` along `axis`.
    """
    if axis is None:
        return ()
    for a in [axis] if isinstance(axis, int) else axis:
        if not -len(shape) <= a < len(shape):
            raise ValueError(f"qsim: a tensor of shape {tuple(shape)} has no axis {a}")
    if isinstance(axis, int) and block_size is None:
        shape, blocks = [shape[axis]], {}
    else:
        blocks = block_lengths(len(shape), axis, block_size)
    if any(length < 0 for length in shape):
        raise ValueError(f"qsim: shape {tuple(shape)} does not tell the shape of the ranges; leave shape=None to adopt it later")
    return ranges_shape(shape, blocks)
