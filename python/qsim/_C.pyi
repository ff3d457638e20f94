"""Operators of `torch.ops.qsim` with less to do before their kernel (csrc/python/module.cpp). Not for Dynamo, which cannot look inside."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    axis: int | None = None,
    block_size: int | None = None,
    rounding: str = "divide",
    grad_factor: float = 1.0,
) -> Tensor: ...
def fake_quantize_out(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    axis: int | None,
    block_size: int | None,
    rounding: str,
    grad_factor: float,
    out: Tensor,
) -> Tensor: ...
def fake_quantize_(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    axis: int | None = None,
    block_size: int | None = None,
    rounding: str = "divide",
    grad_factor: float = 1.0,
) -> Tensor: ...
def observe_(x: Tensor, lowest: Tensor, highest: Tensor, counts: Tensor, sketch: Tensor, low_bits: Tensor) -> None: ...
def observe_range_(
    x: Tensor, lowest: Tensor, highest: Tensor, counts: Tensor, axis: int | None = None, block_size: int | None = None
) -> None: ...
def observe_fake_quantize(
    x: Tensor,
    observing: Tensor,
    quantizing: Tensor,
    lowest: Tensor,
    highest: Tensor,
    counts: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    averaging: float = 0.01,
    axis: int | None = None,
    block_size: int | None = None,
    symmetric: bool = False,
    min_scale: float = 0.0,
    rounding: str = "divide",
) -> Tensor: ...
def round_to_format(
    x: Tensor,
    format: str,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: int | None = None,
    block_size: int | None = None,
) -> Tensor: ...
def round_to_format_out(
    x: Tensor,
    format: str,
    saturate: bool | None,
    scale: Tensor | None,
    axis: int | None,
    block_size: int | None,
    out: Tensor,
) -> Tensor: ...
def round_to_format_(
    x: Tensor,
    format: str,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: int | None = None,
    block_size: int | None = None,
) -> Tensor: ...
def round_to_format_counted(
    x: Tensor,
    format: str,
    counts: Tensor,
    squares: Tensor | None = None,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: int | None = None,
    block_size: int | None = None,
) -> Tensor: ...
def count_format_(
    x: Tensor,
    format: str,
    counts: Tensor,
    squares: Tensor | None = None,
    saturate: bool | None = None,
    scale: Tensor | None = None,
    axis: int | None = None,
    block_size: int | None = None,
) -> None: ...
def fake_quantize_dynamic(
    x: Tensor,
    quant_min: int,
    quant_max: int,
    axis: int | None = None,
    block_size: int | None = None,
    symmetric: bool = False,
    rounding: str = "divide",
    min_scale: float = 0.0,
    scale_format: str | None = None,
    scale_rounding: str = "floor",
) -> Tensor: ...
def round_to_format_dynamic(
    x: Tensor,
    format: str,
    axis: int | None = None,
    block_size: int | None = None,
    saturate: bool | None = None,
    min_scale: float = 0.0,
    scale_format: str | None = None,
    scale_rounding: str = "floor",
) -> Tensor: ...
def clip_grad_(grads: Sequence[Tensor], max_norm: float, norm_type: float = 2.0, nonfinite: str = "skip") -> tuple[Tensor, Tensor]: ...

class Stamp:
    """Recognizes tensors that were not written to since: the same objects, versions, memory, and the same numbers at sampled places
    (csrc/python/stamp.h). It refers to no tensor, and keeps nothing when it is copied or pickled."""

    def __init__(self, *tensors: Tensor) -> None: ...
    def matches(self, *tensors: Tensor) -> bool: ...

class Direct:
    """What may quantize a tensor without Python; None where Python has to decide."""

    def __call__(self, x: Tensor) -> Tensor | None: ...

class Settled(Direct):
    """Quantizes by the encoding of a quantizer that `is_plain` and has these attributes; as a call fewer than `few` elements alone."""

    def __init__(self, vars: dict[str, Any], spec: object, few: int) -> None: ...
    def quantize(self, x: Tensor, in_place: bool) -> Tensor | None: ...
    def is_its_spec(self) -> bool: ...
    def is_fixed(self) -> bool: ...

class SettledDynamic(Direct):
    """Quantizes as the spec of a quantizer that `is_dynamic` and has these attributes says."""

    def __init__(self, vars: dict[str, Any], spec: object) -> None: ...
    def is_its_spec(self) -> bool: ...

class Unchanged:
    """Whether the encoding and the settings of a quantizer with these attributes are what they were."""

    def __init__(self, vars: dict[str, Any]) -> None: ...
    def __call__(self) -> bool: ...

class KeptParameter(Direct):
    """What quantizers with these attributes made of a parameter, for as long as none of it changes."""

    def __init__(self, quantizers: list[dict[str, Any]]) -> None: ...
    def keep(self, parameter: Tensor, quantized: Tensor) -> None: ...
    def forget(self) -> None: ...
    def is_empty(self) -> bool: ...

LEFT_TO_PYTHON: object

class KnownCalls:
    """Follows the calls of a container that a hint recognizes and that are as recorded; `LEFT_TO_PYTHON` for others: nothing ran then."""

    def __init__(
        self,
        names: dict[Any, str],
        asked: set[str],
        quiet: set[Any],
        nodes_of: list[list[int | None]],
        width: int,
        floats: list[Any],
        weights: list[Any],
        conditional: set[int],
        with_outputs: Callable[..., Any],
        shortcut: type,
    ) -> None: ...
    @staticmethod
    def key(hints: tuple[Any, ...], name: str) -> int | None: ...
    def __call__(
        self,
        mode: object,
        hints: tuple[Any, ...],
        counts: list[int],
        nodes: list[Any],
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any: ...
