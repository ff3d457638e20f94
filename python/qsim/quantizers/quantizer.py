"""A quantizer: what is done with a tensor by its encoding and its switches; the factor of LSQ's gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim import ops
from qsim._library import eager
from qsim.call_fit import tells_construction
from qsim.errors import CalibrationError
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec, range_shape
from qsim.quantizers.dynamic import quantize_dynamically
from qsim.quantizers.encoded import Encoded, fixed_constants, positive
from qsim.quantizers.format_counts import FormatCounter, FormatCounts
from qsim.quantizers.observed import encode_observed
from qsim.quantizers.observer import Counts, Observer, with_method
from qsim.quantizers.running_observer import RunningObserver
from qsim.quantizers.weights import encode_weights


def _gradient_factor(x: Tensor, scales: int, spec: TensorSpec, batched: bool) -> float:
    features = x.numel() // max(x.shape[0], 1) if batched and x.dim() > 1 else x.numel()
    return 1.0 / math.sqrt(max(features, 1) / scales * spec.quant_max)


@tells_construction("How it quantizes is a spec: qsim.Quantizer(qsim.TensorSpec(bits=4))")
class Quantizer(Encoded):
    """Simulates the quantization of one tensor, and observes what its encoding is chosen from.

    Parameters
    ----------
    spec : TensorSpec
        How to quantize.
    shape : sequence of int, optional
        Shape of the tensors to come: makes the state's shape known from construction, as `Observer` explains.
    name : str
        What errors call it.

    Attributes
    ----------
    batched : bool
        Whether the first axis of the tensor counts samples, as that of an activation does; False from the start. It matters to the
        gradient of a learned scale alone.
    enabled : bool
        Quantize in ``forward``; True from the start.
    observing : bool
        Observe in ``forward``, before quantizing; False from the start. With ``method="ema"`` True from the start: the running
        range follows the batches, and the encoding the range, in training mode alone, as the statistics of BatchNorm do.
    observer : Observer
    format_counter : FormatCounter or None
        Counts, while observing, what rounding to float16 or bfloat16 does; None for what has a scale, which is not known then.
    scale : Tensor, float32, shape ``()``, ``[C]`` or one per block
        NaN: no encoding yet. A Parameter where the spec says learnable; float16 and bfloat16 have none to choose and hold 1.
    zero_point : Tensor, int32, shape of `scale`
    grid : Tensor, float32
        Smallest and largest number of the grid, then its axes and block sizes: so that a state dict loads where it fits alone.

    Examples
    --------
    >>> quantizer = Quantizer(TensorSpec(bits=4, method="minmax"), name="fc.output")
    >>> quantizer.observing, quantizer.enabled = True, False
    >>> _ = quantizer(torch.linspace(-1, 2, 100))
    >>> encoding = quantizer.compute_encoding()
    >>> quantizer.observing, quantizer.enabled = False, True
    >>> quantizer(torch.tensor([0.33, 5.0]))
    tensor([0.4000, 2.0000])
    >>> quantizer.min.item(), quantizer.max.item(), quantizer.counts.elements
    (-1.0, 2.0, 100)
    >>> quantizer.reset()  # the encoding stays
    >>> quantizer.observe(torch.tensor([7.0]))
    >>> quantizer.max.item(), quantizer.encoding == encoding
    (7.0, True)

    Notes
    -----
    A learned scale and its negative are the same grid: what quantizes is ``|scale|`` (at least the smallest normal float32), so
    an optimizer step across zero is harmless and the gradient is that of the function computed. It is scaled as in Esser et al.
    2020, "Learned Step Size Quantization", section 2.2: by ``1 / sqrt(n * quant_max)`` for n weights, or features of one sample, to
    a scale: how many samples are in a batch does not change how fast a scale learns.

    With ``method="dynamic"`` there is no encoding: the scale comes from each tensor. What it observes, per tensor, is for counts and
    reports alone.

    With ``method="ema"`` both switches also live on the device, where one operator reads them in training mode: turning them
    neither waits for the device nor recompiles, and holds for CUDA graphs that were captured before.
    """

    def __init__(self, spec: TensorSpec, shape: Sequence[int] | None = None, name: str = "") -> None:
        super().__init__(spec, shape, name)
        granularity = (self.axis, self.block_size, shape, name)
        self.observer = RunningObserver(spec.averaging, *granularity) if self._running else Observer(*granularity)
        self.format_counter = None if spec.has_scale else FormatCounter(spec.dtype)
        self.batched = False

    def forward(self, x: Tensor, *, in_place: bool = False, fallback: str | None = None) -> Tensor:
        """Observe and quantize as the switches say.

        Parameters
        ----------
        x : Tensor, float16/bfloat16/float32/float64, on the quantizer's device
        in_place : bool
            Whether `x` may be overwritten: half of the memory traffic where that is possible. Not with a running range in training
            mode, nor with a scale that is being learned, whose gradient needs `x`.
        fallback : str, optional
            "float16" or "bfloat16": round to this format instead of the grid, which needs no encoding; "float32": do not round either.

        Returns
        -------
        Tensor, shape and dtype of `x`
            `x` itself when overwritten, or not enabled (then with a running range in training mode a copy). Differentiable in `x`
            (straight-through), and in a learnable scale.

        Raises
        ------
        NoEncodingError
            Enabled, but nothing has chosen an encoding yet; an empty tensor needs none. A running range in training mode gives NaN
            instead, until a batch has a finite value.
        """
        if is_dynamo_compiling() and self._fixed:  # which neither observes nor follows a range
            return self._traced(x) if fallback is None and not in_place else self.quantize(x, in_place=in_place, fallback=fallback)
        if self._running:
            if self.training:
                y = self._follow(x)
                return y if fallback is None else self.quantize(x, fallback=fallback)
        elif self._observing:
            self.observe(x)
        return self.quantize(x, in_place=in_place, fallback=fallback)

    def _follow(self, x: Tensor) -> Tensor:
        """Observe and quantize with a running range."""
        spec, mine, seen = self._spec, self._buffers, self.observer
        if self.held_shape is None:
            self.adopt(range_shape(x.shape, spec.axis, spec.block_size))
        if seen.held_shape is None:
            seen.adopt(range_shape(x.shape, spec.axis, spec.block_size))
        ranges = seen._buffers["lowest"], seen._buffers["highest"], seen._buffers["counters"]
        arguments = x, self._observing_here, self._enabled_here, *ranges, mine["scale"], mine["zero_point"], *self._grid
        if not is_dynamo_compiling():
            options = spec.averaging, spec.axis, spec.block_size, spec.symmetric, spec.min_scale, spec.rounding
            return eager.observe_fake_quantize(*arguments, *options)  # type: ignore[arg-type]  # nobody follows tiles
        return ops.observe_fake_quantize(
            *arguments,
            averaging=spec.averaging,
            axis=spec.axis,  # type: ignore[arg-type]
            block_size=spec.block_size,  # type: ignore[arg-type]
            symmetric=spec.symmetric,
            min_scale=spec.min_scale,
            rounding=spec.rounding,
        )

    def quantize(self, x: Tensor, *, in_place: bool = False, fallback: str | None = None) -> Tensor:
        """Quantize as `forward` does, without observing: for a tensor that is read, and observed, elsewhere too.

        Examples
        --------
        >>> quantizer = Quantizer(TensorSpec(bits=4, dtype="float16"))
        >>> quantizer.quantize(torch.tensor([2049.0])).item()
        2048.0
        """
        if fallback is None and not in_place and is_dynamo_compiling() and self._fixed:
            return self._traced(x)
        if not self._enabled:
            return x
        if fallback is not None:
            return x if fallback == "float32" else (ops.round_to_format_ if in_place else ops.round_to_format)(x, fallback)
        if self._dynamic:
            return quantize_dynamically(x, self._spec)
        if not self._has_encoding and not (self._running and self.training) and not self._look_for_encoding():
            return self._without_encoding(x)
        spec, state, factor = self._spec, self._buffers, 1.0
        if spec.is_float:
            return self._round(x, in_place)
        if spec.learnable:
            learned = self.scale
            in_place = in_place and not (learned.requires_grad and torch.is_grad_enabled())
            scale, factor = positive(learned), _gradient_factor(x, learned.numel(), spec, self.batched)
        else:
            scale = state["scale"]  # type: ignore[assignment]
        if x.dtype is torch.float64:
            scale = scale.double()
        arguments = x, scale, state["zero_point"], *self._grid
        if self._tiled or is_dynamo_compiling():
            quantize = ops.fake_quantize_ if in_place else ops.fake_quantize
            return quantize(*arguments, axis=spec.axis, block_size=spec.block_size, rounding=spec.rounding, grad_factor=factor)
        directly = eager.fake_quantize_ if in_place else eager.fake_quantize
        return directly(*arguments, spec.axis, spec.block_size, spec.rounding, factor)  # type: ignore[arg-type]  # no tiles

    def _traced(self, x: Tensor) -> Tensor:
        """Quantize with what is fixed, while Dynamo traces."""
        low, high, axis, block_size, rounding = fixed_constants(self._fixed)
        scale, zero_point = self._buffers["scale"], self._buffers["zero_point"]
        if x.dtype is torch.float64:
            scale = scale.double()
        y: Tensor = torch.ops.qsim.fake_quantize(x, scale, zero_point, low, high, axis=axis, block_size=block_size, rounding=rounding)
        return y

    def _round(self, x: Tensor, in_place: bool) -> Tensor:
        """Quantize to a float format."""
        spec, rounded = self._spec, ops.round_to_format_ if in_place else ops.round_to_format
        if not spec.has_scale:
            return rounded(x, spec.dtype, saturate=spec.saturate)
        scale = self.scale.double() if x.dtype is torch.float64 else self.scale
        return rounded(x, spec.dtype, saturate=spec.saturate, scale=scale, axis=spec.axis, block_size=spec.block_size)

    def observe(self, x: Tensor) -> None:
        """Observe as `forward` does, without quantizing."""
        for sample in _samples(x):
            self.observer.forward(sample)
            if self.format_counter is not None:
                self.format_counter.forward(sample)

    def set_encoding(self, encoding: Encoding) -> None:
        """Quantize with this encoding from now on. A running range goes on from what it spans.

        Parameters
        ----------
        encoding : Encoding
            With the grid, axis, block size and dtype of the spec; on any device.

        Examples
        --------
        >>> quantizer = Quantizer(TensorSpec(bits=4))
        >>> quantizer.set_encoding(Encoding(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -8, 7, dtype="int4"))
        >>> quantizer(torch.tensor([0.6])).item()
        0.5
        """
        spec = self._spec
        if self._dynamic:
            raise ValueError(
                f"{self._title} takes its scale from each tensor (method='dynamic'): it holds no encoding. Use another method."
            )
        expected = {"quant_min": self._grid[0], "quant_max": self._grid[1], **spec.layout}
        wrong = [name for name in expected if getattr(encoding, name) != expected[name]]
        if wrong:
            got, wanted = (
                ", ".join(f"{name}={value!r}" for name, value in found)
                for found in ([(name, getattr(encoding, name)) for name in wrong], [(name, expected[name]) for name in wrong])
            )
            raise ValueError(f"{self._title}: the encoding has {got}; its spec wants {wanted}. Make the quantizer with a spec that fits.")
        if problem := self._format_problem(encoding.scale):
            raise ValueError(f"{self._title}: the encoding has scales that are {problem}")
        shape = tuple(encoding.scale.shape)
        if self.held_shape not in (None, shape):
            raise ValueError(f"{self._title}: the encoding has scales of shape {shape}; expected {self.held_shape}")
        self._hold(encoding)
        if isinstance(self.observer, RunningObserver):
            self.observer.start_from(encoding)

    def compute_encoding(self, method: str | None = None, *, percentile: float | None = None, gamma: float | None = None) -> Encoding:
        """Choose the encoding from what was observed, and use it from now on.

        Parameters
        ----------
        method, percentile, gamma : optional
            In place of the spec's, and kept in it.

        Returns
        -------
        Encoding

        Raises
        ------
        CalibrationError
            As `Observer.encoding`. The encoding in use before stays.
        """
        if self._dynamic:
            raise ValueError(f"{self._title} takes its scale from each tensor (method='dynamic'): there is no encoding to choose.")
        spec = with_method(self._spec, method, percentile=percentile, gamma=gamma)
        return _found(*encode_observed([self], [spec]))

    def compute_encoding_from(
        self, weight: Tensor, method: str | None = None, *, percentile: float | None = None, gamma: float | None = None
    ) -> Encoding:
        """Choose the encoding from a tensor that is at hand, such as a weight, and use it from now on.

        The range is searched on the data itself, per tensor, channel or block, so every method is possible. The observer is
        reset and sees the tensor, so that `counts`, `min` and `max` describe it.

        Parameters
        ----------
        weight : Tensor, float16/bfloat16/float32/float64, on the quantizer's device
            NaN and Inf are left out, or raise if ``spec.nonfinite == "raise"``.
        method, percentile, gamma : optional
            In place of the spec's, and kept in it.

        Returns
        -------
        Encoding

        Raises
        ------
        CalibrationError
            The tensor, or a channel or block of it, has no finite value. The encoding in use before stays.

        Examples
        --------
        >>> quantizer = Quantizer(TensorSpec(bits=4, symmetric=True, method="minmax", axis=0), shape=(2, 2))
        >>> quantizer.compute_encoding_from(torch.tensor([[7.0, 1.0], [0.7, 0.1]])).scale.shape
        torch.Size([2])
        """
        spec = with_method(self._spec, method, percentile=percentile, gamma=gamma)
        return _found(*encode_weights([self], [weight], [spec]))

    def use(self, spec: TensorSpec, chosen: Encoding | None) -> Encoding:
        """Take over a spec that differs in its range method only, and the encoding that it chose (None: there is none to choose)."""
        if chosen is not None:
            self._hold(chosen)
        self._spec = spec
        self._note_fixed()
        encoding = self.encoding
        assert encoding is not None
        return encoding

    @property
    def counts(self) -> Counts:
        """What was observed, in numbers. Waits for the device."""
        return self.observer.counts

    @property
    def format_counts(self) -> FormatCounts | None:
        """What rounding to float16 or bfloat16 does to what was observed; None for other formats. Waits for the device.

        Examples
        --------
        >>> quantizer = Quantizer(TensorSpec(dtype="float16"))
        >>> quantizer.observing = True
        >>> _ = quantizer(torch.tensor([1.0, 70000.0]))
        >>> quantizer.format_counts.overflows
        1
        """
        return None if self.format_counter is None else self.format_counter.counts

    @property
    def min(self) -> Tensor:
        """Smallest finite value observed: see `Observer.min`."""
        return self.observer.min

    @property
    def max(self) -> Tensor:
        """Largest finite value observed: see `Observer.max`."""
        return self.observer.max

    @property
    def additive(self) -> list[Tensor]:
        """The counters that observing adds to, int64: what was observed together is their sum."""
        counters = [self.observer.counters, *([self.observer.sketch] if self.observer.sketched else [])]
        return counters if self.format_counter is None else [*counters, self.format_counter.counters]

    def reset(self) -> None:
        """Forget what was observed. The encoding in use stays."""
        self._forget_merged()
        self.observer.reset()
        if self.format_counter is not None:
            self.format_counter.reset()

    def merge(self, other: Quantizer) -> None:
        """Add what another quantizer observed: see `Observer.merge`. The encoding in use stays.

        Examples
        --------
        >>> one, other = Quantizer(TensorSpec(method="minmax")), Quantizer(TensorSpec(method="minmax"))
        >>> for quantizer, value in ((one, 1.0), (other, 3.0)):
        ...     quantizer.observing, quantizer.enabled = True, False
        ...     _ = quantizer(torch.tensor([value]))
        >>> one.merge(other)
        >>> one.max.item()
        3.0
        """
        self._observe_here()
        self.observer.merge(other.observer)
        if self.format_counter is not None and other.format_counter is not None:
            self.format_counter.merge(other.format_counter)


def _found(encoding: Encoding | CalibrationError) -> Encoding:
    if isinstance(encoding, CalibrationError):
        raise encoding
    return encoding


def _samples(x: Tensor) -> Iterator[Tensor]:
    """`x`, or what it stands for inside `torch.vmap` and `torch.func.grad`, where it is a wrapper: each sample of a batch."""
    if torch.compiler.is_compiling() or not torch._C._functorch.is_functorch_wrapped_tensor(x):
        yield x
        return
    inner = torch._C._functorch.get_unwrapped(x)
    for sample in inner.unbind(torch._C._functorch.maybe_get_bdim(x)) if torch._C._functorch.is_batchedtensor(x) else (inner,):
        yield from _samples(sample)
