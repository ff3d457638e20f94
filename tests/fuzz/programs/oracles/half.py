"""What half precision destroys, the simulation of half precision destroys, and what it keeps is kept."""

from __future__ import annotations

import torch
from torch import Tensor

import qsim

from ..case import Case, Failure, Undecided
from ..loaded import Call
from ..results import sqnr, tensors_of
from ..running import quietly

_SCALES = (1.0, 400.0)  # ordinary values, and some whose squares leave the range of the format
_LOST, _KEPT = 15.0, 40.0  # dB
# Of the fuzzer's operations, those that files have as several, which store what is between.
_STORED = ("standardized", "rms_norm", "logsigmoid", "baddbmm", "addcmul", "addcdiv", "log1p")


def half_precision_loses_the_same(case: Case) -> Failure | None:
    text = str(case.program)
    if "BatchNorm" in text:
        raise Undecided("folding decides on what overflows before a BatchNorm")
    if any(name in text for name in ("Attention", "Transformer", "operation='attention", "operation='causal attention")):
        raise Undecided("kernels for attention keep their scores in float32, but torch's own for the CPU")
    if "Remember(" in text:
        raise Undecided("state of one call reaches the next")
    if case.program.returns.endswith("with loss"):
        raise Undecided("losses stay in float")
    sim = case.simulation(qsim.fp16())
    if any("by its older name" in note for note in sim.summary().notes):
        raise Undecided("what is returned by an older name stays in float, as the simulation says")
    example = case.calls[0]
    for scale in _SCALES:
        call = Call(example.name, {name: _scaled(t, scale) for name, t in example.tensors.items()}, example.flags, True)
        with quietly() as noted:
            exact = _results(case, case.float_model(), call, torch.float32)
            found = _results(case, sim, call, torch.float32)
        if any("the example inputs did not show" in str(w.message) for w in noted):
            raise Undecided("larger values decide for another path than the example's, which stays in float, as the simulation says")
        try:
            with quietly():
                half = _results(case, case.float_model(torch.float16), call, torch.float16)
        except Exception as error:
            raise Undecided(f"the model does not run in half precision: {error}") from error
        if len({len(half), len(found), len(exact)}) > 1:
            raise Undecided("half precision takes another branch")
        for i, (a, b, c) in enumerate(zip(half, found, exact, strict=True)):
            if not bool(c.isfinite().all()):
                continue
            lost, ours = _quality(a, c), _quality(b, c)
            if lost < _LOST and ours > _KEPT and bool(b.isfinite().all()):  # who sees Inf knows
                return Failure("half", "hides a loss", f"times {scale:g}: result {i} has {ours:.0f} dB, in half precision {lost:.0f}")
            if lost > _KEPT and ours < _LOST and bool(a.isfinite().all()):
                if any(name in text for name in _STORED):
                    raise Undecided("files have several operations for one of torch, whose kernel keeps what is between in float32")
                return Failure("half", "loses what half precision keeps", f"times {scale:g}: {ours:.0f} dB, in half precision {lost:.0f}")
    return None


def _scaled(t: Tensor | None, scale: float) -> Tensor | None:
    return t * scale if t is not None and t.is_floating_point() else t


def _results(case: Case, model: torch.nn.Module, call: Call, dtype: torch.dtype) -> list[Tensor]:
    args, kwargs = case.loaded.arguments(call, dtype)
    torch.manual_seed(case.program.seed)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):  # whose GELU in float32 makes NaN of Inf
        return [t.float() for t in tensors_of(model(*args, **kwargs))]


def _quality(t: Tensor, exact: Tensor) -> float:
    """dB; none at all where most of it is not finite."""
    finite = t.isfinite()
    if float(finite.double().mean()) < 0.5:
        return -1.0
    return sqnr(t[finite], exact[finite])
