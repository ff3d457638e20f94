"""Target profiles: what a runtime quantizes where, as data. Operations go by their ONNX types (`qsim.operations.onnx_types`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qsim.close_names import close_names
from qsim.config.override import Override
from qsim.numbers.spec import TensorSpec, check_keys, checked_field
from qsim.operations.onnxruntime import INTEGER_KERNELS
from qsim.options import check_flag, shown

Changes = tuple[tuple[str, Any], ...]
Range = tuple[str, float, float]


def selects(patterns: Iterable[str], op_type: str) -> bool:
    """Whether the last pattern that matches `op_type` is one without "!": ``("*", "!Softmax")`` is everything but Softmax."""
    matching = [pattern for pattern in patterns if fnmatchcase(op_type, pattern.removeprefix("!"))]
    return bool(matching) and not matching[-1].startswith("!")


@dataclass(frozen=True)
class Profile:
    """What a target quantizes where.

    Where grids lie says nothing of float16 and bfloat16: what runs in these rounds all that it reads and returns, on every target
    (`in_half`). Every tuple of operation types takes globs, and "!" in front of one takes types out again: ``("*", "!Softmax")``.

    Parameters
    ----------
    name : str
        What summaries and errors call it.
    chains : tuple of tuple of str
        Operations that run as one, so that nothing is quantized between them: ``("Conv|Gemm", "Relu|Clip")``, each with its
        alternatives. A chain is met where each result has no reader but the next operation; the longest one wins.
    half_chains : tuple of tuple of str
        The same in half precision: chains whose engine keeps what lies between in float32. As a rule there are none: every operation
        rounds what it returns.
    half_accumulator : str
        What sums inside operations are kept in where they run in half precision: "float32", as TensorRT and ONNX Runtime do (tensor
        cores; CPU kernels compute in float32), or "float16".
    outputs : tuple of str
        Operations whose results are quantized where they are made.
    inputs : tuple of str
        Operations whose operands are quantized where they are read, unless they were quantized where they were made.
    kernels : tuple of str
        Operations that the runtime computes on integers of 8 bits. What none of them makes or reads stays in float: a grid between two
        operations that are computed in float costs accuracy and gains nothing. Empty: nobody knows, and everything is quantized.
    weights : tuple of str
        Multiply-accumulates whose constant operands are quantized.
    residual : tuple of str
        Where an addition has a result of these as an operand that nothing else reads, their kernel adds: that result is not quantized,
        and the other operand is quantized where it is read.
    shared : tuple of str
        Operations whose operands share one scale, which is also that of the result.
    model_input : bool
        Quantize the inputs of the model. Otherwise they are tensors like others, for `inputs` to decide.
    model_output : bool, optional
        Quantize what the model returns; None leaves it to `outputs`.
    lone_norms : bool
        Make BatchNorms that fold into no layer layers of their own, depthwise convolutions, where weights and activations have 8 bits:
        the runtime has integer kernels for these alone.
    gates : tuple of str
        Activations ``x * gate(x)`` (Swish, HardSwish) whose gate is quantized too where operand and result have 8 bits: gate and product
        are integer kernels of the runtime.
    ranges : tuple of (str, float, float)
        Operations whose results get a fixed range, which no calibration changes. Where a runtime asks for none, leave it to calibration: of
        a softmax over 196 entries, or the tanh of a soft cap, a grid over all that they may return leaves little.
    bias : tuple of str
        Multiply-accumulates whose biases are int32, with the scale of the products.
    weight, activation : mapping
        Fields of `TensorSpec` that the target decides for integers: they replace those of `Config.weight` and `Config.activation`.
        `signed` is decided only where a spec leaves it open. An override may still say otherwise; the summary then has a note.
    rules : tuple of Override
        Applied before the overrides of the config.

    Examples
    --------
    >>> Profile("mine", outputs=("*", "!Softmax"), activation={"symmetric": True}).activation
    (('symmetric', True),)
    """

    name: str
    chains: tuple[tuple[str, ...], ...] = ()
    half_chains: tuple[tuple[str, ...], ...] = ()
    half_accumulator: str = "float32"
    outputs: tuple[str, ...] = ("*",)
    inputs: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    weights: tuple[str, ...] = ("*",)
    residual: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    model_input: bool = True
    model_output: bool | None = None
    lone_norms: bool = False
    gates: tuple[str, ...] = ()
    ranges: tuple[Range, ...] = ()
    bias: tuple[str, ...] = ("*",)
    weight: Mapping[str, Any] | Changes = ()
    activation: Mapping[str, Any] | Changes = ()
    rules: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Profile: got name={shown(self.name)}; expected a string")
        if self.half_accumulator not in ("float32", "float16"):
            raise ValueError(f"Profile: got half_accumulator={shown(self.half_accumulator)}; expected 'float32' or 'float16'")
        for name in ("model_input", "lone_norms", *(("model_output",) if self.model_output is not None else ())):
            check_flag("Profile", name, getattr(self, name))
        for name in ("chains", "half_chains", "ranges"):
            entries = getattr(self, name)
            if not isinstance(entries, Sequence) or not all(isinstance(entry, tuple | list) for entry in entries):
                raise TypeError(f"Profile: got {name}={entries!r}; expected a tuple of tuples")
            object.__setattr__(self, name, tuple(tuple(entry) for entry in getattr(self, name)))
        for name in ("outputs", "inputs", "kernels", "weights", "residual", "shared", "gates", "bias", "rules"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"Profile: got {name}={value!r}; expected a tuple: ({value!r},)")
            kind = Override if name == "rules" else str
            if not isinstance(value, Sequence) or not all(isinstance(entry, kind) for entry in value):
                raise TypeError(f"Profile: got {name}={value!r}; expected a tuple of {kind.__name__}")
            object.__setattr__(self, name, tuple(value))
        for name, low, high in self.ranges:
            if not low < high:
                raise ValueError(f"Profile: got the range [{low}, {high}] for {name}; expected its lower end below its upper end")
        for role in ("weight", "activation"):
            if not isinstance(getattr(self, role), Mapping | tuple | list):
                raise TypeError(
                    f"Profile: got {role}={getattr(self, role)!r}; expected fields of a TensorSpec, such as {{'symmetric': True}}"
                )
            decided = dict(getattr(self, role))
            object.__setattr__(self, role, tuple((field, checked_field(field, value)) for field, value in decided.items()))

    def in_half(self) -> Profile:
        """The same for operations that run in float16 or bfloat16, which know no pairs of quantizers and no kernels for integers.

        Examples
        --------
        >>> from qsim.config.profile import TENSORRT
        >>> TENSORRT.outputs, TENSORRT.in_half().outputs
        ((), ('*',))
        """
        return Profile(self.name, half_chains=self.half_chains, half_accumulator=self.half_accumulator)

    def decided(self, role: str) -> dict[str, Any]:
        """The fields of `TensorSpec` that the target decides for "weight" or "activation"."""
        return dict(getattr(self, role))

    def applied(self, spec: TensorSpec | None, role: str) -> TensorSpec | None:
        """`spec` with what the target decides for integers of this role."""
        if spec is None or spec.is_float:
            return spec
        fields = {name: value for name, value in self.decided(role).items() if name != "signed"}
        return self.signed(dataclasses.replace(spec, **fields), role)

    def signed(self, spec: TensorSpec | None, role: str) -> TensorSpec | None:
        """`spec` with the sign that the target gives to integers, where the spec leaves it open."""
        sign = self.decided(role).get("signed")
        if sign is None or spec is None or spec.is_float or spec.signed is not None:
            return spec
        return dataclasses.replace(spec, signed=sign)

    def known_range(self, op_type: str) -> tuple[float, float] | None:
        """The range of the results of an operation, if it is the same whatever the data."""
        return next(((low, high) for pattern, low, high in self.ranges if fnmatchcase(op_type, pattern)), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it.

        Examples
        --------
        >>> from qsim.config.profile import TENSORRT
        >>> Profile.from_dict(TENSORRT.to_dict()) == TENSORRT
        True
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        decided = {role: self.decided(role) for role in ("weight", "activation")}
        return {**fields, **decided, "rules": [rule.to_dict() for rule in self.rules]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Profile:
        """Inverse of `to_dict`. What is left out has its default; an unknown key is an error that names it."""
        check_keys(cls, fields)
        return cls(**{**fields, "rules": tuple(Override.from_dict(rule) for rule in fields.get("rules", ()))})


_CONVOLUTION = "Conv|ConvTranspose"
_PRODUCT = f"{_CONVOLUTION}|Gemm|MatMul|Einsum|Attention|Gather|bilinear|embedding_bag"
_RECTIFIER = "Relu|Clip"
_ACTIVATION = f"{_RECTIFIER}|LeakyRelu|PRelu|Elu|Selu|Celu|Gelu|Swish|HardSwish|Mish|Sigmoid|HardSigmoid|Tanh|Softplus"
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Attention")


def _chains(activation: str) -> tuple[tuple[str, ...], ...]:
    """A multiply-accumulate, its BatchNorm and its activation; an addition and its rectifier."""
    norm = "BatchNormalization"
    return ((_PRODUCT, norm), (_PRODUCT, activation), (_PRODUCT, norm, activation), (norm, activation), ("Add", _RECTIFIER))


_SYMMETRIC = {"symmetric": True, "signed": True}

# No runtime's own rules: every result and every weight once, at the end of the chains that inference engines fuse.
DEFAULT = Profile("default", _chains(_ACTIVATION))

# What has integer kernels (`qsim.operations.onnxruntime`), and what becomes one of these.
_BECOMING_KERNELS = ("Gather", "Einsum", "Sub", "Swish", "HardSwish", "HardSigmoid", "BatchNormalization", "ReduceMean")  # Sub of numbers
_ONNXRUNTIME_KERNELS = (*INTEGER_KERNELS, *_BECOMING_KERNELS)

# Integer kernels run where DequantizeLinear and QuantizeLinear stand on both sides. A rectifier goes into them if the zero point is the
# smallest integer, which an asymmetric range from 0 gives, or the range is that of the Clip; other activations need a quantizer before
# them. SiLU and HardSwish are two such kernels, gate and product, in 0.6 of the time that they take in float. A table that Gather reads
# has one scale. A hard sigmoid has an integer kernel on the grid of [0, 1] alone. A recurrent layer is one operation in float; on integers
# it is every step by itself, up to five times as long and 3 to 5 dB further from the float model. On x86 the fast kernels take uint8
# activations and int8 weights.
ONNXRUNTIME = Profile(
    "onnxruntime",
    _chains(_RECTIFIER),
    kernels=_ONNXRUNTIME_KERNELS,
    lone_norms=True,
    gates=("Swish", "HardSwish"),
    ranges=(("HardSigmoid", 0.0, 1.0),),
    weight=_SYMMETRIC,
    activation={"signed": False},
    rules=(
        Override(op_type="Gather", weight={"axis": None, "block_size": None, "symmetric": False}),
        *(Override(op_type=layer, weight=None, activation=None) for layer in ("LSTM", "GRU", "RNN")),
    ),
)

# Quantizers stand before weighted layers alone; the other branch of an addition is quantized where a convolution takes the addition over.
TENSORRT = Profile(
    "tensorrt",
    _chains(_ACTIVATION),
    outputs=(),
    inputs=_WEIGHTED,
    weights=_WEIGHTED,
    residual=("Conv", "ConvTranspose"),
    shared=("Concat",),
    model_input=False,
    bias=(),
    weight=_SYMMETRIC,
    activation=_SYMMETRIC,
)

OPENVINO = Profile(
    "openvino",
    _chains(_ACTIVATION),
    residual=("Conv", "ConvTranspose"),
    model_output=False,
    bias=(),
    weight=_SYMMETRIC,
    activation={"signed": False},
)

# The Neural Engine keeps sums in float16, as far as anybody outside can tell: coremltools' guide to typed execution.
COREML = Profile(
    "coreml",
    _chains(_ACTIVATION),
    half_accumulator="float16",
    shared=("Concat",),
    bias=(),
    weight=_SYMMETRIC,
    activation=_SYMMETRIC,
)

# XNNPACK's kernels, as ExecuTorch delegates to them: what has none runs in float between dequantized operands. Biases are int32 there,
# and a rectifier is part of the kernel before it.
_XNNPACK = ("Conv", "ConvTranspose", "Gemm", "Add", "Sub", "Mul", "GlobalAveragePool", "ReduceMean", "Concat")
EXECUTORCH = Profile(
    "executorch",
    _chains(_RECTIFIER),
    outputs=(*_XNNPACK, "Relu", "Clip"),
    inputs=_XNNPACK,
    weights=("Conv", "ConvTranspose", "Gemm"),
    shared=("Concat",),
    bias=("Conv", "ConvTranspose", "Gemm"),
    weight=_SYMMETRIC,
    activation={"signed": True},
)

# What servers of language models do: matrix products of linear layers, their operands quantized where they are read; attention,
# normalization, embeddings and additions stay in float. Of no single runtime: the presets for language models have it.
LINEAR_LAYERS = Profile("linear_layers", _chains(_ACTIVATION), outputs=(), inputs=("Gemm",), weights=("Gemm",), model_input=False, bias=())

PROFILES = {profile.name: profile for profile in (DEFAULT, ONNXRUNTIME, TENSORRT, OPENVINO, COREML, EXECUTORCH)}


def runtime_named(target: Any, specs: Iterable[TensorSpec | None], caller: str, runtimes: Collection[str], expected: str = "one of") -> str:
    """The one of `runtimes` that `target` names; with a precision, as `qsim.doctor` has them ("tensorrt-fp16"), if `specs` are of that.

    Examples
    --------
    >>> runtime_named("tensorrt-int8", [TensorSpec(bits=8), None], "Config", PROFILES)
    'tensorrt'
    """
    runtime, _, precision = target.rpartition("-") if isinstance(target, str) else ("", "", "")
    if isinstance(target, str) and target in runtimes:
        return target
    names = ", ".join(map(repr, runtimes))
    if runtime not in runtimes or precision not in ("int8", "fp16"):
        near = close_names(target, runtimes, 0.6) if isinstance(target, str) else []
        hint = f"; close to it: {near[0]!r}" if near else ""
        raise ValueError(f"{caller}: got target={shown(target)}; expected {expected} {names}{hint}")
    given = {spec.dtype if spec.is_float else f"int{spec.bits}" for spec in specs if spec is not None}
    if given != {{"fp16": "float16"}.get(precision, precision)}:
        raise ValueError(
            f"{caller}: got target={shown(target)} for a config of {' and '.join(sorted(given)) or 'float32'}; what is simulated is the "
            f"config's to say, as in qsim.{precision}(target={runtime!r})"
        )
    return runtime
