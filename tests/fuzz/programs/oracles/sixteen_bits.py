"""At 16 bits the simulation is within 60 dB of float on every path that the example took."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import qsim

from ..case import Case, Failure, Undecided
from ..ir import Apply, Hold, Remember, all_statements
from ..loaded import Call
from ..operations import TABLE
from ..results import sqnr, tensors_of
from ..running import quietly, same_state

_WANTED, _MARGIN = 60.0, 8.0
_DRAWS = 16
_HARDLY, _FAR = 45.0, 30.0  # what noise nearly hides fails if the simulation is far from it
_SEVERAL = (nn.Sequential, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, nn.TransformerEncoderLayer)  # of several operations

_INSIDES = (F.multi_head_attention_forward, torch.lstm, torch.gru, torch.lstm_cell, torch.gru_cell, torch.rnn_tanh, torch.rnn_tanh_cell)
_HIDDEN = 8.0  # operations in one of these, whose quantizers all calls of a layer share


class _Rounding(TorchFunctionMode):
    """Does to every result what 16 bits may: how well the program is conditioned.

    Parameters
    ----------
    spans : dict
        The largest value that each operation ever returned, by where it stands: all its calls share a quantizer.
    disturb : callable, optional
        Changes a tensor that has such a largest value. None: only find these.
    """

    def __init__(self, spans: dict[Any, float], disturb: Callable[[Tensor, float], None] | None = None) -> None:
        self.spans, self.disturb = spans, disturb

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            out, at = func(*args, **(kwargs or {})), (*_place(sys._getframe(1)), func)
            hides = func in _INSIDES and max(self._span((*at, "operand", i), t)[1] for i, t in enumerate(tensors_of(args))) > 1.1
            for i, t in enumerate(tensors_of(out)):
                known = isinstance(t, nn.Parameter) or (t._base is not None and func not in _INSIDES)  # by another name
                if not (known or torch._C._functorch.is_functorch_wrapped_tensor(t)) and t.is_floating_point() and t.numel() > 1:
                    span, _ = self._span((*at, i), t)
                    if self.disturb is not None:
                        self.disturb(t, span * _HIDDEN if hides else span)
            return out

    def _span(self, at: Any, t: Tensor) -> tuple[float, float]:
        """The largest value that was ever there, and how much larger it is than those of this tensor."""
        largest = float(t.detach().abs().max()) if t.numel() else 0.0
        span = max(largest, self.spans.get(at, 0.0))
        if self.disturb is None:
            self.spans[at] = span
        return span, span / largest if largest else 1.0


def _place(frame: FrameType | None) -> tuple[Any, ...]:
    """Where a function is called: the lines up to the module's forward. A layer of several operations is one place wherever it stands."""
    found: list[Any] = []
    while frame is not None and not ("self" in frame.f_locals and isinstance(frame.f_locals["self"], nn.Module)):
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    if frame is None:
        return tuple(found)
    module = frame.f_locals["self"]
    is_single = type(module).__module__.startswith("torch.") and not isinstance(module, _SEVERAL)
    above = _place(frame.f_back) if is_single else ()
    return (id(module), frame.f_lineno, *found, *above)


def _noise(seed: int) -> Callable[[Tensor, float], None]:
    generator = torch.Generator().manual_seed(seed)

    def add(t: Tensor, span: float) -> None:
        with torch.no_grad():
            t.data += span * 2.0**-16 * (torch.rand(t.shape, dtype=t.dtype, generator=generator) * 2 - 1).to(t.device)

    return add


def _put_on_a_grid(t: Tensor, span: float) -> None:
    """What is nearer to 0 than half a step is 0, which no noise does."""
    step = span * 2.0**-15
    if step > 0:
        with torch.no_grad():
            t.data.copy_((t / step).round() * step)


def sixteen_bits_are_near(case: Case) -> Failure | None:
    return near_float(case, "16 bits", lambda sim: None, _WANTED)


def _is_far(found: float, conditioned: float, bar: float, less: float) -> bool:
    wanted = bar if conditioned > _WANTED + _MARGIN else min(bar, conditioned) - _FAR
    return found < min(wanted, conditioned - less) and conditioned > _HARDLY


def _drawn(case: Case, sequence: list[Call], spans: dict[Any, float], seed: int) -> list[list[Tensor]]:
    return _steps(case, _perturbed(case, seed), sequence, _Rounding(spans, _noise(seed)))


def near_float(
    case: Case, oracle: str, change: Callable[[qsim.QuantSim], None], bar: float, *, less: float = 0.0, format: torch.dtype | None = None
) -> Failure | None:
    """Whether a simulation at 16 bits, calibrated and then changed, is within `bar` dB of float, or by `less` than noise of 16 bits is.
    `format`: in which it computes some of it."""
    statements = list(all_statements(case.program))
    if any(isinstance(s, Apply) and TABLE[s.operation].rough for s in statements):
        raise Undecided("a program that jumps")
    has_state = any(isinstance(s, Remember) or (isinstance(s, Hold) and s.how == "attribute") for s in statements)
    calls = [call for call in case.calls if call.recorded][:2]
    sequence = calls * 2 if has_state else calls
    sim = case.simulation(qsim.int16(), data=sequence)
    change(sim)
    with same_state(sim.model):
        found = _steps(case, sim, sequence)
    expected, spans = _steps(case, case.float_model(), sequence), dict[Any, float]()
    model = _perturbed(case, 0)
    with same_state(model):
        _steps(case, model, sequence, _Rounding(spans))
    if format is not None and any(
        span > torch.finfo(format).max or 0.0 < span < torch.finfo(format).smallest_normal for span in spans.values()
    ):
        raise Undecided("numbers beyond the format, or where it has fewer digits")
    noisy = _steps(case, model, sequence, _Rounding(spans, _noise(0)))
    on_grids = _steps(case, case.float_model(), sequence, _Rounding(spans, _put_on_a_grid))
    lost = False  # what noise hides in one step, state hands on to the next
    for step, (theirs, ours, *both) in enumerate(zip(expected, found, noisy, on_grids, strict=True)):
        if lost:
            break
        for i, (a, b, *rough) in enumerate(zip(theirs, ours, *both, strict=True)):
            if a.shape != b.shape:
                return Failure(oracle, "shapes", f"step {step}: {tuple(b.shape)}, expected {tuple(a.shape)}")
            conditioned = min(sqnr(c, a) for c in rough)
            lost = lost or (has_state and conditioned <= _HARDLY)
            if not bool(a.any()):  # what cancels altogether in float
                continue
            if _is_far(sqnr(b, a), conditioned, bar, less):  # one draw may be a lucky one: few elements, say, that a clamp leaves
                conditioned = min(conditioned, *(sqnr(_drawn(case, sequence, spans, seed)[step][i], a) for seed in range(1, _DRAWS)))
            if _is_far(sqnr(b, a), conditioned, bar, less):
                numbers = f"result {i} of step {step} has {sqnr(b, a):.1f} dB; {conditioned:.1f} with noise of 16 bits"
                return Failure(oracle, "state" if has_state else "no state", numbers)
    return None


def _perturbed(case: Case, seed: int) -> nn.Module:
    model, add = case.float_model(), _noise(seed)
    for p in model.parameters():
        add(p, float(p.detach().abs().max()))
    return model


def _steps(case: Case, model: nn.Module, calls: list[Call], under: _Rounding | None = None) -> list[list[Tensor]]:
    """Results of several calls, of which each finds what the one before left."""
    found = []
    model.eval()
    torch.manual_seed(case.program.seed)
    with torch.no_grad(), quietly(), under or contextlib.nullcontext():
        for call in calls:
            args, kwargs = case.loaded.arguments(call, torch.float32)
            found.append([t.clone() for t in tensors_of(model(*args, **kwargs))])
    return found
