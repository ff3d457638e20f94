"""An observer: what it has seen of a tensor, and the encoding that a spec chooses from that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from qsim import ops
from qsim.call_fit import tells_construction
from qsim.errors import CalibrationError
from qsim.numbers.blocks import Axes
from qsim.numbers.encoding import Encoding
from qsim.numbers.range_methods import RANGE_METHODS
from qsim.numbers.spec import TensorSpec, range_shape
from qsim.options import check_whole
from qsim.quantizers.sketch import SKETCH_BINS, SketchedRange, histogram, search_sketches
from qsim.quantizers.state import UNKNOWN_SHAPE, RangeState


@dataclass(frozen=True)
class Counts:
    """How many elements were observed, and how many of them were not finite.

    ``print`` gives a sentence part: "4096 values, of which 12 NaN, 1 +Inf, 0 -Inf".
    """

    elements: int = 0
    nans: int = 0
    positive_infs: int = 0
    negative_infs: int = 0

    @property
    def nonfinite(self) -> int:
        """NaN, +Inf and -Inf together."""
        return self.nans + self.positive_infs + self.negative_infs

    def __str__(self) -> str:
        return f"{self.elements} values, of which {self.nans} NaN, {self.positive_infs} +Inf, {self.negative_infs} -Inf"


@tells_construction("")
class Observer(RangeState):
    """Sees tensors pass and keeps what every range method needs, exactly, in one pass over each.

    What it keeps is additive: the same data cut into other batches, seen in another order, or by several observers that are
    merged, gives the same state bit for bit. NaN and Inf are counted and never reach a range.

    Parameters
    ----------
    axis : int or tuple of int, optional
        Keep one range per index along this axis; None keeps one range, and a sketch of the distribution.
    block_size : int or tuple of int, optional
        Keep one range per block of so many elements along `axis`, or per tile.
    shape : sequence of int, optional
        Shape of the tensors to come: makes the state's shape known from construction. Without `block_size` only its length
        along `axis` is used.
    name : str
        What errors call it.

    Attributes
    ----------
    lowest, highest : Tensor, float32, shape ``()``, ``[C]`` or one per block
        Smallest and largest finite value; +Inf and -Inf while there is none.
    counters : Tensor, int64 [4]
        Elements, NaN, +Inf, -Inf of whole tensors.
    sketch : Tensor, int64 [16384], per tensor only
        Elements by sign, exponent and 5 mantissa bits; NaN and Inf are not in it.
    met_empty : bool
        Whether a tensor without elements came.
    low_bits : Tensor, int32 [], per tensor only
        OR of the mantissa bits that the sketch leaves out: 0x30000 where all values were bfloat16.

    Examples
    --------
    >>> observer = Observer()
    >>> _ = observer(torch.tensor([-1.0, 3.0, torch.nan]))
    >>> observer.min.item(), observer.max.item(), observer.counts.nans
    (-1.0, 3.0, 1)
    >>> encoding = observer.encoding(TensorSpec(), method="minmax")
    >>> encoding.zero_point.item()
    -64

    Notes
    -----
    The sketch takes 128 KB and is part of the state dict: a model that was loaded can change its range method, go on calibrating and
    merge with others, as the one that was saved. Counters have 64 bits because one bin may hold all values of a calibration.
    """

    _shape_key = "lowest"
    lowest: Tensor
    highest: Tensor
    counters: Tensor
    sketch: Tensor
    low_bits: Tensor

    def __init__(self, axis: Axes = None, block_size: Axes = None, shape: Sequence[int] | None = None, name: str = "") -> None:
        if block_size is not None and axis is None:
            raise ValueError("Observer: block_size needs the axis that blocks lie along; got axis=None")
        super().__init__(axis, block_size, shape)
        self.name = name
        self.met_empty = False
        self._allocate(UNKNOWN_SHAPE if self.held_shape is None else self.held_shape)

    def _allocate(self, shape: tuple[int, ...], on: torch.device | None = None) -> None:
        self.register_buffer("lowest", torch.full(shape, torch.inf, dtype=torch.float32, device=on))
        self.register_buffer("highest", torch.full(shape, -torch.inf, dtype=torch.float32, device=on))
        self.register_buffer("counters", torch.zeros(4, dtype=torch.int64, device=on))
        if self.sketched:
            self.register_buffer("sketch", torch.zeros(SKETCH_BINS, dtype=torch.int64, device=on))
            self.register_buffer("low_bits", torch.zeros((), dtype=torch.int32, device=on))

    def forward(self, x: Tensor) -> Tensor:
        """Observe a tensor and return it, unchanged.

        Parameters
        ----------
        x : Tensor, float16/bfloat16/float32/float64, on the observer's device
        """
        if x.numel() == 0 and not is_dynamo_compiling():
            self.met_empty = True
        if self.held_shape is None:
            self.adopt(range_shape(x.shape, self.axis, self.block_size))
        state = self._buffers
        ranges = state["lowest"], state["highest"], state["counters"]
        if self.axis is None:
            ops.observe_(x, *ranges, state["sketch"], state["low_bits"])
        else:
            ops.observe_range_(x, *ranges, axis=self.axis, block_size=self.block_size)
        return x

    @property
    def sketched(self) -> bool:
        """Whether there is a sketch of the distribution.

        Examples
        --------
        >>> Observer().sketched, Observer(axis=0).sketched
        (True, False)
        """
        return self.axis is None

    @property
    def counts(self) -> Counts:
        """What was observed, in numbers. Waits for the device."""
        return Counts(*self.counters.tolist())

    @property
    def min(self) -> Tensor:
        """Smallest finite value observed, of shape ``()``, ``[C]`` or one per block; +Inf where there was none."""
        return self.lowest.clone()

    @property
    def max(self) -> Tensor:
        """Largest finite value observed, of `min`'s shape; -Inf where there was none."""
        return self.highest.clone()

    def reset(self) -> None:
        """Forget what was observed.

        Examples
        --------
        >>> observer = Observer()
        >>> _ = observer(torch.ones(3))
        >>> observer.reset()
        >>> observer.counts.elements
        0
        """
        self.lowest.fill_(torch.inf)
        self.highest.fill_(-torch.inf)
        self.counters.zero_()
        if self.sketched:
            self.sketch.zero_()
            self.low_bits.zero_()

    def spans(self, x: Tensor) -> bool:
        """Whether all of `x` lies in the range that was observed, but for what rounding to its dtype may have changed; True where nothing
        was observed, and of nothing. Waits for the device.

        Examples
        --------
        >>> observer = Observer()
        >>> _ = observer(torch.tensor([-1.0, 3.0]))
        >>> observer.spans(torch.tensor([0.0, 3.0])), observer.spans(torch.tensor([4.0]))
        (True, False)
        """
        if x.numel() == 0 or self.lowest.numel() == 0 or self.counts.elements == 0:
            return True
        low, high = (t.float() for t in x.detach().aminmax())
        lowest, highest = self.lowest.min(), self.highest.max()
        slack = 4 * max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) * torch.maximum(lowest.abs(), highest.abs())
        return bool((low >= lowest - slack) & (high <= highest + slack))

    def merge(self, other: Observer) -> None:
        """Add what another observer saw, as if this one had seen it too: exact, in any order.

        Parameters
        ----------
        other : Observer
            Of the same axis, block size and shape; on any device. Not changed.

        Examples
        --------
        >>> one, other = Observer(), Observer()
        >>> _ = one(torch.tensor([1.0])), other(torch.tensor([-2.0]))
        >>> one.merge(other)
        >>> one.min.item(), one.max.item()
        (-2.0, 1.0)
        """
        if (self.axis, self.block_size) != (other.axis, other.block_size):
            raise ValueError(
                f"{self._title}: cannot merge an observer with axis={other.axis}, block_size={other.block_size} "
                f"into one with axis={self.axis}, block_size={self.block_size}"
            )
        if other.held_shape is None:
            return
        if self.held_shape is None:
            self.adopt(other.held_shape)
        if self.held_shape != other.held_shape:
            raise ValueError(f"{self._title}: cannot merge ranges of shape {other.held_shape} into ranges of shape {self.held_shape}")
        device = self.lowest.device
        self.lowest.copy_(torch.minimum(self.lowest, other.lowest.to(device)))
        self.highest.copy_(torch.maximum(self.highest, other.highest.to(device)))
        self.counters.add_(other.counters.to(device))
        if self.axis is None:
            self.sketch.add_(other.sketch.to(device))
            self.low_bits.bitwise_or_(other.low_bits.to(device))

    def encoding(
        self, spec: TensorSpec, method: str | None = None, *, percentile: float | None = None, gamma: float | None = None
    ) -> Encoding:
        """The encoding that a range method chooses for what was observed.

        Parameters
        ----------
        spec : TensorSpec
            Grid and options. Its axis and block size must be the observer's.
        method, percentile, gamma : optional
            In place of the spec's. Per channel and per block only "minmax" is possible: there is no sketch.

        Returns
        -------
        Encoding
            New tensors on the observer's device.

        Raises
        ------
        CalibrationError
            No finite value was observed, or a non-finite one and ``spec.nonfinite == "raise"``.
        """
        spec = with_method(spec, method, percentile=percentile, gamma=gamma)
        self.check_choice(spec)
        if RANGE_METHODS[spec.method].takes_range:
            return encoding_of_range(self.lowest, self.highest, spec)
        ((low, high),) = search_sketches([self.seen(spec)], spec)
        return encoding_of_range(low, high, spec)

    def check_choice(self, spec: TensorSpec) -> None:
        """Raise unless the spec's method can choose a range from what was observed, as `encoding` does.

        Examples
        --------
        >>> observer = Observer()
        >>> _ = observer(torch.tensor([0.5, 2.0]))
        >>> observer.check_choice(TensorSpec(method="mse"))
        """
        if (spec.axis, spec.block_size) != (self.axis, self.block_size):
            raise ValueError(
                f"{self._title}: observed with axis={self.axis}, block_size={self.block_size}; it cannot give an encoding "
                f"with axis={spec.axis}, block_size={spec.block_size}"
            )
        self.check_method(spec)
        if self.axis is not None and not RANGE_METHODS[spec.method].takes_range:
            raise ValueError(
                f"{self._title}: method {spec.method!r} needs the sketch that only a per-tensor observer keeps; use "
                "method='minmax' per channel or block (weights: Quantizer.compute_encoding_from searches the data itself)"
            )
        self.check(spec)

    def seen(self, spec: TensorSpec) -> SketchedRange:
        """What a search of the spec's method reads; per tensor only.

        Examples
        --------
        >>> observer = Observer()
        >>> _ = observer(torch.tensor([0.5, 2.0]))
        >>> observer.seen(TensorSpec(method="mse")).highest.item()
        2.0
        """
        sketch = self._sketch_with_infs() if spec.nonfinite == "saturate" else self.sketch
        return SketchedRange(self.lowest, self.highest, sketch, self.low_bits)

    def histogram(self, bins: int = 128) -> tuple[Tensor, Tensor]:
        """How the finite values are distributed, for plots and reports; per tensor only.

        Parameters
        ----------
        bins : int
            Intervals of equal width between `min` and `max`.

        Returns
        -------
        edges : Tensor, float64 [bins + 1]
        counts : Tensor, float64 [bins]

        Raises
        ------
        ValueError
            Fewer than two different finite values were observed, or there is no sketch.

        Examples
        --------
        >>> observer = Observer()
        >>> _ = observer(torch.randn(1000))
        >>> edges, masses = observer.histogram(bins=16)
        >>> edges.numel(), masses.sum().item()
        (17, 1000.0)
        """
        if not self.sketched:
            raise ValueError(
                f"{self._title}: a histogram needs the sketch, which is kept per tensor and not for method='ema'; this one has "
                f"axis={self.axis}"
            )
        if not bool(self.lowest < self.highest):
            raise ValueError(f"{self._title}: no histogram: fewer than two different finite values were observed ({self.counts})")
        check_whole(f"{self._title}: histogram", "bins", bins, least=1)
        return histogram(self.sketch, self.lowest, self.highest, bins)

    def check_method(self, spec: TensorSpec) -> None:
        """Raise a ValueError unless the spec's method reads what is kept here: "ema" a running range, all others the whole data."""
        if spec.is_running:
            raise ValueError(
                f"{self._title}: method='ema' follows the batches in training; make the quantizer with it: TensorSpec(method='ema')"
            )

    def check(self, spec: TensorSpec) -> None:
        """Raise a CalibrationError unless what was observed has a range, and is finite where the spec demands it."""
        counts = self.counts
        if spec.nonfinite == "raise" and counts.nonfinite:
            raise CalibrationError(
                f"{self._title} observed {counts}, and nonfinite='raise'. Mend the data or the operation they come from, "
                "or use nonfinite='skip'."
            )
        if counts.elements == 0:
            raise CalibrationError(f"{self._title} has no range: no batch reached it. Run data through it first, or switch it off.")
        if counts.nonfinite == counts.elements:
            raise CalibrationError(f"{self._title} has no range: none of what it observed is finite ({counts}).")
        empty = (self.lowest > self.highest).nonzero()
        if len(empty):
            what = "block" if self.block_size is not None else "channel"
            raise CalibrationError(
                f"{self._title} has no range for {len(empty)} of {self.lowest.numel()} {what}s: nothing finite reached them, "
                f"the first being {empty[0].tolist()} (in all: {counts})."
            )

    def _sketch_with_infs(self) -> Tensor:
        """The sketch with +Inf counted as the largest finite value observed, and -Inf as the smallest."""
        ends = torch.stack([self.highest, self.lowest]) + 0.0  # -0.0 shares the bin of 0.0
        bins = ((ends.view(torch.int32) >> 18) & (SKETCH_BINS - 1)).long()
        return self.sketch.index_add(0, bins, self.counters[2:])

    @property
    def _title(self) -> str:
        return f"qsim: {self.name!r}" if self.name else "qsim: the observer"

    def extra_repr(self) -> str:
        return f"axis={self.axis}, block_size={self.block_size}"


def with_method(spec: TensorSpec, method: str | None, *, percentile: float | None, gamma: float | None) -> TensorSpec:
    """The spec with another range method and options; None keeps what it has."""
    if method == "dynamic" and not spec.is_dynamic:
        raise ValueError("qsim: method='dynamic' chooses no encoding; make the quantizer with it: TensorSpec(method='dynamic')")
    given = {"method": method, "percentile": percentile, "gamma": gamma}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(spec, **changes) if changes else spec


def encoding_of_range(low: Tensor, high: Tensor, spec: TensorSpec) -> Encoding:
    """The encoding whose grid spans the range."""
    if spec.scale_format in (None, "int"):
        grid = spec.quant_min, spec.quant_max
        scale, zero_point = ops.choose_qparams(low, high, *grid, symmetric=spec.symmetric, min_scale=spec.min_scale)
    else:
        options = {"scale_rounding": spec.scale_rounding}
        scale = ops.choose_block_scale(low.float(), high.float(), spec.encoding_dtype, spec.scale_format, **options)
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    if spec.two_levels is not None:
        scale = spec.two_levels.nearest(scale)
    return Encoding(scale, zero_point, spec.quant_min, spec.quant_max, **spec.layout)
