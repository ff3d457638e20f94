"""What happens at a site when work is saved there (`qsim.graph.plan.savings`): the same values and gradients, for less.

Each class asks, in each call, what the record could not know, and does the plain thing where the answer is no.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from qsim._library import Direct, KeptParameter, Settled, SettledDynamic, Unchanged
from qsim.graph.execute import ownership
from qsim.graph.execute.lowered import LiveMaker, Lowered, Quantize
from qsim.graph.execute.ownership import is_alone
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.scarcity import is_scarce

_TYPES = (Tensor, nn.Parameter)
_LARGE = 1 << 18  # of as many bytes, to quantize them again takes longer than to ask how much memory is free


def is_plain_eager() -> bool:
    """As `runs_at_once`, and no global hook looks at the tensors."""
    return runs_at_once() and not _has_any_global_hook()  # type: ignore[no-untyped-call]


def runs_at_once() -> bool:
    """Whether the operations called now run at once, on tensors with memory of their own: they are not traced, transformed or captured."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
    )


def is_watched(module: nn.Module) -> bool:
    """Whether hooks see what goes into the module and comes out of it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def hands_to_hooks(module: nn.Module, entered: bool) -> bool:
    """Whether hooks may make another tensor of what the module takes, where it is entered, or returns, where it is left."""
    forward = module._forward_pre_hooks if entered else module._forward_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


class Shortcut:
    """What stands where work is saved. `direct`: what may quantize without Python, and is asked first."""

    direct: Direct | None


class Kept(Shortcut):
    """Quantizes a parameter or buffer, and keeps the result until the tensor or the encoding changes, while no gradient is needed and
    memory is not scarce.

    Parameters
    ----------
    quantizer : Quantizer, Lowered or BiasQuantizer
    """

    def __init__(self, quantizer: Quantizer | Lowered | BiasQuantizer) -> None:
        self.quantizer = quantizer
        self._sources = _sources(quantizer)
        self._settled = _settled(quantizer)
        self.direct: KeptParameter = KeptParameter([vars(source) for source in self._sources])

    def __reduce__(self) -> tuple[type[Kept], tuple[Quantizer | Lowered | BiasQuantizer]]:
        return Kept, (self.quantizer,)

    def __call__(self, value: Tensor) -> Tensor:
        kept = self.direct(value)
        return self._anew(value, self.quantizer) if kept is None else kept

    def unobserved(self, value: Tensor) -> Tensor:
        """For a second reader of the same parameter: see `qsim.graph.plan.actions.Use`."""
        assert not isinstance(self.quantizer, BiasQuantizer)
        kept = self.direct(value)
        return self._anew(value, self.quantizer.quantize) if kept is None else kept

    def _anew(self, value: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        sources, kept = self._sources, self.direct
        if value.requires_grad and torch.is_grad_enabled() and kept.is_empty():  # training
            return self._at_once(value, quantize)
        if not value.is_cpu:
            kept.forget()
            return self._at_once(value, quantize)
        tensors = (value, *(t for source in sources for t in source.grid_tensors))
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if needs_gradient or any(is_watched(source) or not source.is_settled for source in sources):
            kept.forget()
            return self._at_once(value, quantize)
        with torch.inference_mode(False), torch.no_grad():
            quantized = quantize(value)
        if _have_versions(tensors) and not (_is_sharding() or (quantized.numel() * quantized.element_size() >= _LARGE and is_scarce())):
            kept.keep(value, quantized)
        return quantized

    def _at_once(self, value: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        if self._settled is not None:
            if (quantized := self._settled.quantize(value, False)) is not None:
                return quantized
            self._settled = _renewed(self._settled, self._sources[0])
        # `forward` is all there is to the call of an unwatched module where no global hook looks on
        return quantize.forward(value) if isinstance(quantize, Quantizer) and not is_watched(quantize) else quantize(value)


def _sources(quantizer: Quantizer | Lowered | BiasQuantizer) -> tuple[Quantizer, ...]:
    """The quantizers, one or two, whose encodings and switches decide on the result."""
    if isinstance(quantizer, BiasQuantizer):
        return quantizer.input, quantizer.weight
    return (quantizer.quantizer if isinstance(quantizer, Lowered) else quantizer,)


def _have_versions(tensors: Iterable[Tensor]) -> bool:
    return all(type(t) in _TYPES and not t.is_inference() for t in tensors)


def _is_sharding() -> bool:
    """Whether `fully_shard` is in use: it refills parameters in each forward without counting a version, and to keep what was gathered
    would undo it."""
    composable = sys.modules.get("torch.distributed._composable_state")
    return composable is not None and len(composable._module_state_mapping) > 0


class FrugalMaker(LiveMaker):
    """As `LiveMaker`; keeps the parameters whose quantizers have these keys."""

    def __init__(self, quantizers: Mapping[str, Quantizer], parameters: Container[str], kept: dict[tuple[str, ...], Kept]) -> None:
        super().__init__(quantizers)
        self.parameters, self.kept = parameters, kept

    def lowered(self, key: str, observes: bool, format: str, *, enters: bool) -> Quantize | None:
        if key not in self.parameters:
            return super().lowered(key, observes, format, enters=enters)
        kept = self.kept.setdefault((key, format), Kept(Lowered(self.quantizers[key], format)))
        return kept if observes else kept.unobserved


class DirectOperand(Shortcut):
    """Quantizes an operand: without Python where nothing but the quantizer's encoding, or its spec, decides on the result.

    Parameters
    ----------
    quantizer : Quantizer
    observes : bool
        False for a tensor that is read, and observed, elsewhere too.
    """

    def __init__(self, quantizer: Quantizer, observes: bool) -> None:
        self.quantizer, self.observes = quantizer, observes
        self.direct: Settled | SettledDynamic | None = _settled_operand(quantizer)

    def __reduce__(self) -> tuple[type[DirectOperand], tuple[Quantizer, bool]]:
        return DirectOperand, (self.quantizer, self.observes)

    def __call__(self, x: Tensor) -> Tensor:
        if (direct := self.direct) is not None:
            if (quantized := direct(x)) is not None:
                return quantized
            if not direct.is_its_spec():
                self.direct = _settled_operand(self.quantizer)
        return self.quantizer(x) if self.observes else self.quantizer.quantize(x)


def _settled_operand(quantizer: Quantizer) -> Settled | SettledDynamic | None:
    """As `_settled`, or what quantizes by each tensor itself."""
    if type(quantizer) is Quantizer and quantizer.spec.is_dynamic:
        return SettledDynamic(vars(quantizer), quantizer.spec)
    return _settled(quantizer)


class InPlace(Shortcut):
    """Quantizes an output in the memory that it was computed in.

    Parameters
    ----------
    quantizer : Quantizer
    """

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.direct: Settled | None = _settled(quantizer, ownership.SMALLEST)

    def __reduce__(self) -> tuple[type[InPlace], tuple[Quantizer]]:
        return InPlace, (self.quantizer,)

    def __call__(self, y: Tensor) -> Tensor:
        q, settled = self.quantizer, self.direct
        if settled is not None:
            if (quantized := settled(y)) is not None:
                return quantized
            if (quantized := settled.quantize(y, is_alone(y))) is not None:
                return quantized
            self.direct = _renewed(settled, q, ownership.SMALLEST)
        return q(y) if is_watched(q) else q.forward(y, in_place=is_alone(y))  # unwatched, `forward` is all there is to a call


def _settled(quantizer: Quantizer | Lowered | BiasQuantizer, few: int = sys.maxsize) -> Settled | None:
    """What quantizes without Python, where the encoding that the quantizer holds may be all there is to it. `few`: of `Settled`."""
    if type(quantizer) is not Quantizer or not quantizer.is_plain:
        return None
    return Settled(vars(quantizer), quantizer.spec, few)


def _renewed(settled: Settled, quantizer: Quantizer, few: int = sys.maxsize) -> Settled | None:
    """The same, or another one where the quantizer has another spec now."""
    return settled if settled.is_its_spec() else _settled(quantizer, few)


class Rectifier:
    """Quantizes the operand of a rectifier instead of its result, where the grid ends no later than the rectifier clamps.

    Parameters
    ----------
    quantizer : Quantizer
    function : str
        "relu", "relu6" or "hardtanh".
    changes : bool
        It changes its operand, whatever its arguments say: ``x.relu_()``.
    """

    def __init__(self, quantizer: Quantizer, function: str, changes: bool) -> None:
        self.quantizer, self.function, self.changes = quantizer, function, changes
        self._settled = _settled(quantizer)
        self._clamping: tuple[Unchanged, tuple[Any, ...], bool] | None = None  # replaced as a whole: threads share it

    def __reduce__(self) -> tuple[type[Rectifier], tuple[Quantizer, str, bool]]:
        return Rectifier, (self.quantizer, self.function, self.changes)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], dies: bool) -> Tensor | None:
        """The quantized result; None where the rectifier has to run. `dies`: whether nothing reads the operand again."""
        q, settled = self.quantizer, self._settled
        if q.axis is not None or not (_is_fixed(q) if settled is None else settled.is_fixed()):
            self._settled = None if settled is None else _renewed(settled, q)
            return None
        x, low, high, overwrites = _CALLS[self.function](*args, **kwargs)
        if type(x) is not Tensor or ((overwrites or self.changes) and not dies):
            return None
        if x.requires_grad or torch.is_grad_enabled():
            if q.grid_tensors[0].requires_grad:
                return None
            if x.requires_grad:
                return self._with_gradient(x) if dies and torch.is_grad_enabled() else None
        return self._quantized(x, dies) if self._is_clamped(x, low, high) else None

    def overwriting(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """A call that computes the same in the memory of the operand, which nothing reads again: of ReLU, where no gradient is asked for.
        While ranges are observed there is no grid to quantize to instead."""
        x = args[0]
        if self.function != "relu" or type(x) is not Tensor or x.requires_grad or not x.is_contiguous():
            return func, args, kwargs
        return torch.relu_, (x,), {}

    def _quantized(self, x: Tensor, in_place: bool) -> Tensor:
        quantized = None if self._settled is None else self._settled.quantize(x, in_place)
        return self.quantizer.forward(x, in_place=in_place) if quantized is None else quantized

    def _with_gradient(self, x: Tensor) -> Tensor | None:
        q = self.quantizer
        if self.function != "relu" or q.spec.is_float:  # ReLU leaves -0.0, and so do float formats
            return None
        if x.is_leaf or x.retains_grad or not self._is_clamped(x, 0.0, math.inf):
            return None
        # What ReLU passes no gradient to is made to lie out of range, so that the range's mask does for both.
        torch.threshold_(x.detach(), 0.0, -math.inf)
        return self._quantized(x, True)

    def _is_clamped(self, x: Tensor, low: float, high: float) -> bool:
        """Whether quantizing alone gives, below `low` and above `high`, what it gives at these. Asks the quantizer once per encoding."""
        known, asked = self._clamping, (x.dtype, low, high)
        if known is None or known[1] != asked or not known[0]():
            q = self.quantizer
            if not _have_versions(q.grid_tensors):
                return False
            with torch.inference_mode(False), torch.no_grad():
                ends = q.quantize(torch.tensor([low, -math.inf, high, math.inf], dtype=x.dtype, device=x.device))
                known = self._clamping = Unchanged(vars(q)), asked, bool((ends[::2] == ends[1::2]).all())
        return known[2]


def _is_fixed(quantizer: Quantizer) -> bool:
    """Whether the encoding decides on the result, and may be looked at: for one on a device one would have to wait."""
    return quantizer.is_settled and not is_watched(quantizer) and quantizer.grid_tensors[0].is_cpu


def _relu(input: Any, inplace: bool = False) -> tuple[Any, float, float, bool]:
    return input, 0.0, math.inf, inplace


def _relu6(input: Any, inplace: bool = False) -> tuple[Any, float, float, bool]:
    return input, 0.0, 6.0, inplace


def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> tuple[Any, float, float, bool]:
    return input, min_val, max_val, inplace


# What the rectifiers are called with, as they declare it: operand, ends of the range, whether they overwrite the operand.
_CALLS: dict[str, Callable[..., tuple[Any, float, float, bool]]] = {"relu": _relu, "relu6": _relu6, "hardtanh": _hardtanh}
