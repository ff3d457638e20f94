"""What a user measures by: a number for a simulation and data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from qsim.analysis.deviation import ZEROS, Deviation, kept_floats
from qsim.errors import CalibrationError
from qsim.options import shown
from qsim.runs.batches import Forward
from qsim.runs.snapshot import beginning_alike
from qsim.simulation.simulation import Simulation

Metric = Callable[[Any, Any], float]


class Ratio(float):
    """An SQNR in dB that knows how many results are NaN or Inf and finite in float, which make it -Inf.

    Examples
    --------
    >>> Ratio(float("-inf"), 3), Ratio(float("-inf"), 3).broken, broken_in(20.0)
    (-inf, 3, 0)
    """

    broken: int

    def __new__(cls, value: float, broken: int = 0) -> Ratio:
        found = super().__new__(cls, value)
        found.broken = broken
        return found


def broken_in(value: float) -> int:
    """How many results are NaN or Inf and finite in float; 0 where the metric does not say."""
    return value.broken if isinstance(value, Ratio) else 0


def told_of_broken(broken: int) -> str:
    """The sentence about so many of them; "" of none."""
    are = f"{broken} results are" if broken != 1 else "1 result is"
    return f"{are} NaN or Inf and finite in float (-inf dB)" if broken else ""


def metric_of(metric: Metric | None, forward: Forward | None, caller: str) -> Metric:
    """The metric that is meant: the user's, or by default `output_sqnr`, of what `forward` returns where that is given.

    Raises
    ------
    TypeError
        It cannot be called.
    ValueError
        A metric calls the simulation itself, so `forward` would never be used.
    """
    if metric is None:
        return output_sqnr if forward is None else _output_sqnr_of(forward)
    if not callable(metric):
        raise TypeError(
            f"{caller}: got metric={shown(metric)}; expected a function, metric(sim, data) -> float, where a sim is called as the model"
        )
    _check_arguments(metric, caller)
    if forward is not None:
        raise ValueError(f"{caller}: got a metric and forward=, which it would not use: the metric calls the sim; leave one of them out")
    return metric


def _check_arguments(metric: Metric, caller: str) -> None:
    """Raise a TypeError where a metric cannot be called with a simulation and data."""
    try:
        signature = inspect.signature(metric)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(metric, "__name__", type(metric).__name__)
        raise TypeError(
            f"{caller}: the metric {name}{signature} cannot be called as metric(sim, data): {error}; of a function of the sim alone make "
            f"lambda sim, data: {name if name.isidentifier() else 'metric'}(sim)"
        ) from None


def value_of(metric: Metric, network: Any, data: Any, caller: str) -> float:
    """The metric as a float, of a network in the state that it is in, which it keeps. A TypeError, which names the metric, where it is no
    number.

    Examples
    --------
    >>> value_of(lambda sim, data: torch.tensor(0.5), None, None, "QuantSim.sensitivity")
    0.5
    """
    with beginning_alike(network.model) if isinstance(network, Simulation) else contextlib.nullcontext():
        found = metric(network, data)
    if isinstance(found, Ratio):
        return found
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return float(found)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        name = getattr(metric, "__name__", type(metric).__name__)
        shape = f" of the shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
        cure = "does it end without `return`?" if found is None else "return one number"
        raise TypeError(f"{caller}: the metric {name!r} returned {_kind(found)}{shape}; expected a number: {cure}") from None


def _kind(found: Any) -> str:
    return "None" if found is None else f"a {type(found).__name__}"


def output_sqnr(sim: Simulation, data: Iterable[Any], forward: Forward | None = None) -> Ratio:
    """SQNR in dB of what the model returns beside what it returns in float, over all batches. Higher is better; +Inf in float, -Inf where a
    result is NaN or Inf that is finite in float. In every run it begins from the state that it is in, and draws the same random numbers."""
    if isinstance(data, (torch.Tensor, Mapping, str)) or not isinstance(data, Iterable):
        raise TypeError(f"QuantSim.sensitivity: got data of type {type(data).__name__}; expected an iterable of batches, or a metric")
    deviation, run = Deviation(), sim.runner(forward)
    for batch in data:
        with beginning_alike(sim.model), sim.in_float():
            returned = run(batch)
            expected = kept_floats(returned)
        with beginning_alike(sim.model):
            pair = expected, kept_floats(run(batch))
        if not pair[0] or [t.shape for t in pair[0]] != [t.shape for t in pair[1]]:
            shapes = " and ".join(str([tuple(t.shape) for t in tensors]) for tensors in pair)
            raise ValueError(
                f"QuantSim: what the model returns ({type(returned).__name__}) cannot be compared: in float and simulated it has "
                f"floating-point tensors of the shapes {shapes}; give a metric, or forward= that returns tensors"
            )
        for x, y in zip(*pair, strict=True):
            deviation.add(x, y)
    if not deviation.elements:
        raise CalibrationError("QuantSim: got no batch to compare what the model returns on. Is the data set empty?")
    if not deviation.signal and deviation.compared:
        raise ValueError(f"QuantSim: {ZEROS}, so that nothing shows what quantization costs: give weights that were trained, or a metric")
    return Ratio(deviation.sqnr, deviation.broken)


def _output_sqnr_of(forward: Forward) -> Metric:
    def output_sqnr_of_forward(sim: Simulation, data: Iterable[Any]) -> float:
        return output_sqnr(sim, data, forward)

    return output_sqnr_of_forward
