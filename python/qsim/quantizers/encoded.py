"""The state of a quantizer: its grid, and the switches that say what is done with it."""

from __future__ import annotations

import ast
import functools
import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qsim.errors import NoEncodingError
from qsim.numbers.blocks import is_tiled
from qsim.numbers.encoding import Encoding
from qsim.numbers.float_format import are_powers_of_two
from qsim.numbers.spec import TensorSpec
from qsim.options import shown
from qsim.quantizers.state import UNKNOWN_SHAPE, RangeState
from qsim.runs.sharding import is_sharded, sharded_as, whole

_NOBODY = 0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def positive(learned: Tensor) -> Tensor:
    return learned.abs().clamp_min(_SMALLEST_SCALE)


@functools.cache
def _number_of(process: int) -> int:
    """What tells a process from all others, whatever machine they are on."""
    return secrets.randbits(62)


@functools.cache
def _read(fixed: str) -> tuple[Any, ...]:
    found: tuple[Any, ...] = ast.literal_eval(fixed)
    return found


def fixed_constants(fixed: str) -> tuple[Any, ...]:
    """Ends of the grid, axis, block size and rounding, of what `Encoded._note_fixed` noted; constants while Dynamo traces."""
    return _read(fixed)


fixed_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `qsim.graph.execute.answers`


class Planned:
    """A field of a quantizer's spec as an attribute of the quantizer: to be read. What was planned is not set.

    Examples
    --------
    >>> quantizer = qsim.Quantizer(TensorSpec(bits=4), name="fc.output")
    >>> quantizer.bits
    4
    >>> quantizer.bits = 8
    Traceback (most recent call last):
        ...
    AttributeError: qsim: 'fc.output': its bits is what was planned; expected another simulation: config.override('fc', bits=8)
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Encoded | None, owner: type) -> Any:
        return self if holder is None else getattr(holder.spec, self._name)

    def __set__(self, holder: Encoded, value: Any) -> None:
        operation = holder.name.rpartition(".")[0] or holder.name
        cure = f"config.override({operation!r}, {self._name}={shown(value)})"
        raise AttributeError(f"qsim: {holder.name!r}: its {self._name} is what was planned; expected another simulation: {cure}")


class Encoded(RangeState):
    """The part of `qsim.Quantizer` that holds an encoding, switches and a spec, and gives account of them; it computes nothing."""

    _shape_key = "scale"
    scale: Tensor
    zero_point: Tensor
    observed_by: Tensor
    bits, symmetric, signed, narrow, method, percentile, gamma, averaging, dtype, learnable = (Planned() for _ in range(10))

    def __init__(self, spec: TensorSpec, shape: Sequence[int] | None, name: str) -> None:
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{type(self).__name__}: got spec={shown(spec)}; expected a qsim.TensorSpec")
        super().__init__(*(None, None) if spec.is_dynamic else (spec.axis, spec.block_size), shape)
        self.name = name
        self._spec = spec
        self._dynamic = spec.is_dynamic
        self._running = spec.is_running
        self._enabled, self._observing = True, self._running
        self._turns = 0  # how often `train` was called
        if self._running:
            # No buffers: nothing that averages or broadcasts these has to do with switches.
            self._observing_here, self._enabled_here = torch.tensor(True), torch.tensor(True)
        self._grid = (spec.quant_min, spec.quant_max)
        self._tiled = is_tiled(spec.axis, spec.block_size)
        self.register_buffer("grid", torch.tensor(self._identity))
        # A buffer beside an attribute: only the first is overwritten by those who give this process the buffers of another one.
        self._observed_by = _NOBODY
        self.merged: list[Tensor] | None = None  # what observing adds to, as the last QuantSim.synchronize gave it to all ranks
        self.register_buffer("observed_by", torch.tensor(_NOBODY), persistent=False)
        self._allocate(UNKNOWN_SHAPE if self.held_shape is None else self.held_shape)

    def _allocate(self, shape: tuple[int, ...], on: torch.device | None = None) -> None:
        scale = torch.full(shape, torch.nan if self._spec.has_scale else 1.0, dtype=torch.float32, device=on)
        learned = self._parameters.get("scale")
        if learned is not None and not is_sharded(learned):
            learned.data, learned.grad = scale, None  # the same Parameter: an optimizer may have it
        elif self._spec.learnable:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)
        self.register_buffer("zero_point", torch.zeros(shape, dtype=torch.int32, device=on))
        self._has_encoding = not self._spec.has_scale
        self._note_fixed()

    def _note_fixed(self) -> None:
        """Note what fixes the result, after each change of the switches, the encoding or the spec: see `fixed_scale`."""
        spec, quantizes = self._spec, self._enabled and self._has_encoding and not self._observing
        self._fixed = repr((*self._grid, spec.axis, spec.block_size, spec.rounding)) if quantizes and self.is_plain else ""

    @property
    def fixed_scale(self) -> Tensor | None:
        """`scale` if all that is done is `ops.fake_quantize` by it: nothing is observed or learned. None otherwise.

        What decides on that, and the grid, is one constant: Dynamo guards every attribute that it reads, which takes time when it traces
        and again in each call.

        Examples
        --------
        >>> quantizer = qsim.Quantizer(TensorSpec(bits=4, symmetric=True, method="minmax"))
        >>> quantizer.fixed_scale is None  # no encoding yet
        True
        >>> _ = quantizer.compute_encoding_from(torch.tensor([-7.0, 3.5]))
        >>> quantizer.fixed_scale is None
        False
        """
        return self._buffers["scale"] if self._fixed else None

    @property
    def is_plain(self) -> bool:
        """Whether all that it may do is `ops.fake_quantize` by a scale that it holds: not learned, not running, not each tensor's own.

        Examples
        --------
        >>> qsim.Quantizer(TensorSpec(bits=4)).is_plain, qsim.Quantizer(TensorSpec(bits=4, learnable=True)).is_plain
        (True, False)
        """
        spec = self._spec
        return not (spec.learnable or spec.is_float or self._dynamic or self._running or self._tiled)

    @property
    def spec(self) -> TensorSpec:
        """How the tensor is quantized, with the range method last used.

        Examples
        --------
        >>> qsim.Quantizer(TensorSpec(bits=4)).spec.bits
        4
        """
        return self._spec

    @property
    def enabled(self) -> bool:
        """Whether `forward` quantizes."""
        return self._enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self._enabled = on
        self._note_fixed()
        self._switch_device()

    @property
    def observing(self) -> bool:
        """Whether `forward` observes; a running range: whether it does in training mode."""
        return self._observing

    @observing.setter
    def observing(self, on: bool) -> None:
        self._observing = on
        self._note_fixed()
        self._switch_device()
        if on:
            self._observe_here()

    def _switch_device(self) -> None:
        if self._running:
            self._observing_here.fill_(self._observing)
            self._enabled_here.fill_(self._enabled)

    @property
    def is_own(self) -> bool:
        """Whether what it holds was observed in this process, or by all ranks together; not whether DistributedDataParallel put another
        rank's there. Running ranges, which that is to broadcast, are anybody's. Waits for the device.

        Examples
        --------
        >>> quantizer = qsim.Quantizer(TensorSpec(bits=4))
        >>> quantizer.observing = True
        >>> quantizer.is_own
        True
        """
        return self._running or int(self.observed_by) == self._observed_by

    def _observe_here(self) -> None:
        """This process observes from now on; what is another's stays so."""
        if (here := _number_of(os.getpid())) != self._observed_by:
            self.observed_by = self.observed_by + (here - self._observed_by)
            self._observed_by = here

    def _forget_merged(self) -> None:
        """What it is about to hold is not what a `QuantSim.synchronize` gave to all ranks, nor what any process observed."""
        self.merged, self._observed_by = None, _NOBODY
        self.observed_by = torch.tensor(_NOBODY, device=self.zero_point.device)

    def note_merged(self, additive: list[Tensor]) -> None:
        """A `QuantSim.synchronize` gave these counters, and ranges, to all ranks.

        Examples
        --------
        >>> quantizer = qsim.Quantizer(TensorSpec(bits=4))
        >>> quantizer.note_merged(quantizer.additive)
        >>> quantizer.is_own, len(quantizer.merged)
        (True, 2)
        """
        self._forget_merged()
        self.merged = [t.clone() for t in additive]

    def _apply(self, fn: Any, recurse: bool = True) -> Encoded:
        super()._apply(fn, recurse)
        if self._running:
            self._observing_here, self._enabled_here = (fn(t).to(torch.bool) for t in (self._observing_here, self._enabled_here))
            self._switch_device()  # memory may be fresh
        return self

    @property
    def is_settled(self) -> bool:
        """Whether `forward` quantizes, and neither observes nor follows a running range: with an encoding that it does not change."""
        return self._enabled and not self._dynamic and not (self.training if self._running else self._observing)

    @property
    def grid_tensors(self) -> tuple[Tensor, Tensor]:
        """`scale` and `zero_point`, without the detour of `nn.Module` attributes."""
        scale = self._buffers.get("scale")
        return self.scale if scale is None else scale, self._buffers["zero_point"]

    @property
    def settings(self) -> tuple[TensorSpec, bool, bool, bool, int]:
        """What besides the encoding decides on the result, and on whether it is settled; other ones after `train` and `eval` too."""
        return self._spec, self._enabled, self._observing, self.training, self._turns

    def train(self, mode: bool = True) -> Encoded:
        super().train(mode)
        self.turn()
        if not mode:
            self._look_for_encoding()
        return self

    def turn(self) -> None:
        """Have those who keep what the quantizer made of a parameter forget it: see `settings`."""
        self._turns += 1

    def _look_for_encoding(self) -> bool:
        """Whether there is an encoding. That of a running range appears on the device, unnoticed by the host, and any may be copied here
        with the buffers of another simulation (`torch.optim.swa_utils.AveragedModel`)."""
        if (
            not (self._has_encoding or self._dynamic)
            and (self._running or type(self.scale) in (Tensor, nn.Parameter))
            and not self.scale.is_meta
        ):
            self._has_encoding = self.scale.numel() > 0 and not bool(self.scale.isnan().any())
            self._note_fixed()
        return self._has_encoding

    def _without_encoding(self, x: Tensor) -> Tensor:
        """What becomes of a tensor that wants an encoding where there is none."""
        if x.numel() == 0:
            return x
        raise NoEncodingError(
            f"{self._title} has no encoding. Calibrate first (observing = True, run data, compute_encoding()), "
            "load a calibrated state dict, or set enabled = False."
        )

    @property
    def has_encoding(self) -> bool:
        """Whether there is an encoding, chosen, set or loaded.

        Examples
        --------
        >>> quantizer = qsim.Quantizer(TensorSpec(bits=8, method="minmax"))
        >>> quantizer.has_encoding
        False
        >>> _ = quantizer.compute_encoding_from(torch.tensor([-1.0, 2.0]))
        >>> quantizer.has_encoding
        True
        """
        return self._look_for_encoding()

    @property
    def lacks_encoding(self) -> bool:
        """Whether it needs an encoding to quantize with, and has none yet. A dynamic one takes its scale from each tensor."""
        return not self._dynamic and self.encoding is None

    @property
    def grid_scale(self) -> Tensor:
        """The positive scale that quantizes, of `scale`'s shape: `scale` itself unless it is learned."""
        scale = self.grid_tensors[0]
        return positive(scale) if self._spec.learnable else scale

    @property
    def encoding(self) -> Encoding | None:
        """The encoding in use, as new tensors; None while there is none, and where the scale comes from each tensor (dynamic).

        Examples
        --------
        >>> qsim.Quantizer(TensorSpec()).encoding is None
        True
        """
        if not self._look_for_encoding():
            return None
        spec = self._spec
        scale = whole(self.grid_scale.detach()).clone()
        return Encoding(scale, self.zero_point.clone(), *self._grid, **spec.layout)

    def _hold(self, encoding: Encoding) -> None:
        if self.held_shape is None:
            self.adopt(tuple(encoding.scale.shape))
        with torch.no_grad():  # in place: optimizers and compiled graphs keep their references
            self.scale.copy_(sharded_as(self.scale, encoding.scale))
            self.zero_point.copy_(encoding.zero_point)
        self._has_encoding = True
        self._note_fixed()

    def _format_problem(self, scale: Tensor) -> str | None:
        """What scales are, if not what the spec's format stores."""
        spec = self._spec
        if spec.scale_format == "float8_e8m0fnu" and not are_powers_of_two(scale):
            return f"no powers of two, as {spec.scale_format} stores them"
        if spec.two_levels is not None:
            try:
                spec.two_levels.split(scale)
            except ValueError as error:
                return f"no integers beside floats: {error}"
        return None

    def _problem_of_state(self, scale: Tensor | None) -> str | None:
        if self._spec.scale_format != "int" or scale is None or scale.is_meta or scale.numel() == 0 or bool(scale.isnan().any()):
            return None
        return self._format_problem(whole(scale))

    @property
    def _identity(self) -> list[float]:
        """What `grid` holds. Every grid, of integers or of a float format, has ends that no other has."""
        spec = self._spec
        axes, blocks = (() if value is None else (value,) if isinstance(value, int) else value for value in (spec.axis, spec.block_size))
        return [float(number) for number in (*self._grid, *axes, *blocks)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        grid = state_dict.get(prefix + "grid")
        if grid is not None and not grid.is_meta and (found := grid.tolist()) != self._identity:
            error_messages: list[str] = args[-1]
            error_messages.append(
                f"{self._title}: the state is of another spec: its {prefix}grid (smallest, largest, axes, block sizes) is {found}, "
                f"and this quantizer's is {self._identity}."
            )
            return
        if problem := self._problem_of_state(state_dict.get(prefix + "scale")):
            args[-1].append(f"{self._title}: the state is of another spec: its {prefix}scale holds scales that are {problem}.")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._forget_merged()
        self._observe_here()
        self._switch_device()  # they are in no state dict, and memory that a state is loaded into may be fresh
        if prefix + "scale" not in state_dict or self.scale.is_meta:
            return
        self._has_encoding = not self._dynamic and self.scale.numel() > 0 and not bool(self.scale.isnan().any())
        self._note_fixed()

    @property
    def _title(self) -> str:
        return f"qsim: {self.name!r}" if self.name else "qsim: the quantizer"

    def extra_repr(self) -> str:
        state = "" if self._has_encoding or self._dynamic else ", no encoding"
        return f"{self._spec.encoding_dtype}, axis={self._spec.axis}, method={self._spec.method!r}{state}"
