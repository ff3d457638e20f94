"""What happens at a site when work is saved there (`qsim.graph.savings`): the same values and gradients, for less.

Each class asks, in each call, what the record could not know, and does the plain thing where the answer is no.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _has_any_global_hook

from qsim.graph.lowered import LiveMaker, Lowered, Quantize
from qsim.graph.savings import Saving
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.quantizer import Quantizer

_TYPES = (Tensor, nn.Parameter)
_CUDA = torch.version.cuda is not None or torch.version.hip is not None


def is_plain_eager() -> bool:
    """Whether the operations called now run at once, on tensors with memory of their own that no global hook looks at: they are not
    traced, transformed or captured."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
        or (_CUDA and torch.cuda.is_current_stream_capturing())
    )


def is_watched(module: nn.Module) -> bool:
    """Whether hooks see what goes into the module and comes out of it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


class Stamp:
    """Recognizes tensors that were not written to since: the same objects, versions and memory.

    It holds no tensor alive, and keeps nothing when it is copied or pickled. What is written through `Tensor.data` or NumPy counts
    no version and is not noticed.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]  # type: ignore[no-untyped-call]  # keep their addresses
        self._seen = [(weakref.ref(t), t._version, t.data_ptr(), s.cdata) for t, s in zip(tensors, self._storages, strict=True)]

    def matches(self, *tensors: Tensor) -> bool:
        if len(tensors) != len(self._seen):
            return False
        for t, (ref, version, at, storage) in zip(tensors, self._seen, strict=True):
            if ref() is not t or t._version != version or t.data_ptr() != at or t.untyped_storage()._cdata != storage:
                return False
        return True

    def __reduce__(self) -> tuple[type[Stamp], tuple[()]]:
        return Stamp, ()


class Kept:
    """Quantizes a parameter or buffer, and keeps the result until the tensor or the encoding changes, while no gradient is needed.

    Parameters
    ----------
    quantizer : Quantizer, Lowered or BiasQuantizer
    """

    def __init__(self, quantizer: Quantizer | Lowered | BiasQuantizer) -> None:
        self.quantizer = quantizer
        self._sources = _sources(quantizer)
        self._kept: tuple[Stamp, list[Any], Tensor] | None = None  # replaced as a whole: threads share it

    def __reduce__(self) -> tuple[type[Kept], tuple[Quantizer | Lowered | BiasQuantizer]]:
        return Kept, (self.quantizer,)

    def __call__(self, value: Tensor) -> Tensor:
        return self._of(value, self.quantizer)

    def unobserved(self, value: Tensor) -> Tensor:
        """For a second reader of the same parameter: see `qsim.graph.plan.Use`."""
        assert not isinstance(self.quantizer, BiasQuantizer)
        return self._of(value, self.quantizer.quantize)

    def _of(self, value: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        tensors, settings, settled = [value], [], True
        for source in self._sources:
            tensors += source.grid_tensors
            settings.append(source.settings)
            settled = settled and source.is_settled and not is_watched(source)
        if not settled or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            self._kept = None
            return quantize(value)
        kept = self._kept
        if kept is not None and kept[1] == settings and kept[0].matches(*tensors, kept[2]):
            return kept[2]
        with torch.inference_mode(False), torch.no_grad():
            quantized = quantize(value)
        if _have_versions(tensors) and not _is_sharding():
            self._kept = Stamp(*tensors, quantized), settings, quantized
        return quantized


def _sources(quantizer: Quantizer | Lowered | BiasQuantizer) -> tuple[Quantizer, ...]:
    """The quantizers whose encodings and switches decide on the result."""
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


class InPlace:
    """Quantizes an output in the memory that it was computed in.

    Parameters
    ----------
    quantizer : Quantizer
    unread : bool
        As in `qsim.graph.savings.Saving`.
    """

    def __init__(self, quantizer: Quantizer, unread: bool) -> None:
        self.quantizer, self.unread = quantizer, unread

    def __call__(self, y: Tensor) -> Tensor:
        q = self.quantizer
        # autograd rebuilds the history of a view that is written to, and its base's
        possible = type(y) is Tensor and (not y.requires_grad or (self.unread and not y._is_view())) and not is_watched(q)
        return q.forward(y, in_place=True) if possible else q(y)  # unwatched, `forward` is all there is to a call


class Rectifier:
    """Quantizes the operand of a rectifier instead of its result, where the grid ends no later than the rectifier clamps.

    Parameters
    ----------
    quantizer : Quantizer
    saving : Saving
        With a rectifier.
    """

    def __init__(self, quantizer: Quantizer, saving: Saving) -> None:
        self.quantizer, self.saving = quantizer, saving
        self._clamping: tuple[Stamp, tuple[Any, ...], bool] | None = None  # replaced as a whole: threads share it

    def __reduce__(self) -> tuple[type[Rectifier], tuple[Quantizer, Saving]]:
        return Rectifier, (self.quantizer, self.saving)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The quantized result; None where the rectifier has to run."""
        q, consumes = self.quantizer, self.saving.consumes
        if not q.is_settled or q.axis is not None or is_watched(q):
            return None
        x, low, high, overwrites = _CALLS[str(self.saving.rectifier)](*args, **kwargs)
        if type(x) is not Tensor or (overwrites and not consumes):
            return None
        if x.requires_grad or torch.is_grad_enabled():
            if q.grid_tensors[0].requires_grad:
                return None
            if x.requires_grad:
                return self._with_gradient(x, overwrites)
        return q.forward(x, in_place=consumes) if self._is_clamped(x, low, high) else None

    def _with_gradient(self, x: Tensor, overwrites: bool) -> Tensor | None:
        q, saving = self.quantizer, self.saving
        if saving.rectifier != "relu" or q.spec.is_float:  # ReLU leaves -0.0, and so do float formats
            return None
        if saving.consumes_unread and not (x.is_leaf or x._is_view() or x.retains_grad) and self._is_clamped(x, 0.0, math.inf):
            # What ReLU passes no gradient to is made to lie out of range, so that the range's mask does for both.
            torch.threshold_(x.detach(), 0.0, -math.inf)
            return q.forward(x, in_place=True)
        # ReLU's twin keeps its operand for the backward pass, not its result: that may be overwritten.
        return None if overwrites else q.forward(F.threshold(x, 0.0, 0.0), in_place=True)

    def _is_clamped(self, x: Tensor, low: float, high: float) -> bool:
        """Whether quantizing alone gives, below `low` and above `high`, what it gives at these. Asks the device once per encoding."""
        q = self.quantizer
        encoding, settings = q.grid_tensors, (*q.settings, x.dtype, low, high)
        known = self._clamping
        if known is None or known[1] != settings or not known[0].matches(*encoding):
            if not _have_versions(encoding):
                return False
            with torch.inference_mode(False), torch.no_grad():
                ends = q.quantize(torch.tensor([low, -math.inf, high, math.inf], dtype=x.dtype, device=x.device))
                known = self._clamping = Stamp(*encoding), settings, bool((ends[::2] == ends[1::2]).all())
        return known[2]


def _relu(input: Any, inplace: bool = False) -> tuple[Any, float, float, bool]:
    return input, 0.0, math.inf, inplace


def _relu6(input: Any, inplace: bool = False) -> tuple[Any, float, float, bool]:
    return input, 0.0, 6.0, inplace


def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> tuple[Any, float, float, bool]:
    return input, min_val, max_val, inplace


# What the rectifiers are called with, as they declare it: operand, ends of the range, whether they overwrite the operand.
_CALLS: dict[str, Callable[..., tuple[Any, float, float, bool]]] = {"relu": _relu, "relu6": _relu6, "hardtanh": _hardtanh}
