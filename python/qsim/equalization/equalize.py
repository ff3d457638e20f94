"""`qsim.equalize`: exact changes of a float model's weights after which it quantizes better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qsim.batch_norm.fold import folded_for
from qsim.batch_norm.fold_report import FoldReport
from qsim.batch_norm.recorded import recorded
from qsim.call_fit import tells_arguments
from qsim.equalization.absorption import BiasAbsorption
from qsim.equalization.candidates import find_candidates
from qsim.equalization.edge_finder import find_edges
from qsim.equalization.edges import Edge
from qsim.equalization.equalize_report import Change, EqualizeReport, spread
from qsim.equalization.input_statistics import InputStatistics, observe, results
from qsim.equalization.rotation import Rotation
from qsim.equalization.scale_methods import Awq, CrossLayer, SmoothQuant
from qsim.graph.execute.simulated import refuse_simulated
from qsim.graph.record.uses import Uses
from qsim.operations.layers import LAYERS
from qsim.options import check_function, shown
from qsim.runs.arguments import Arguments, example_calls, refuse_numbers
from qsim.runs.batches import Forward, arguments_of, calls_made, iterate, to_device
from qsim.runs.offloaded import settle_offloaded
from qsim.runs.report_subject import subject_of
from qsim.runs.runnable import check_module
from qsim.runs.sharding import refuse_wrapped
from qsim.runs.snapshot import Snapshot

Method = CrossLayer | BiasAbsorption | SmoothQuant | Awq | Rotation

EQUALIZE_METHODS: dict[str, type[Method]] = {method.name: method for method in (CrossLayer, BiasAbsorption, SmoothQuant, Awq, Rotation)}
TOLERANCE = 1e-5


@tells_arguments("qsim.equalize")
def equalize(
    model: nn.Module,
    example_inputs: Any,
    data: Iterable[Any] | None = None,
    *,
    methods: Sequence[str | Method] = ("cross_layer",),
    max_batches: int | None = None,
    forward: Forward | None = None,
) -> EqualizeReport:
    """Change the weights of a float model, in place, so that it computes the same and quantizes better.

    Parameters
    ----------
    model : nn.Module, any device, float32/float64
        Runs on the example inputs in eval and in training mode. What changes is the contents of weights and biases (and BatchNorms that
        "cross_layer" and "bias_absorption" fold first, as `fold_batch_norms` does); modules, names and training flags stay. A layer that
        had no bias may get one by "rotation" and "bias_absorption".
    example_inputs : Tensor, tuple of arguments, dict of keyword arguments, or list of such calls
    data : iterable of batches, optional
        What "bias_absorption", "smooth_quant" and "awq" look at, as `QuantSim.calibrate` takes it. It is kept, with what the model returns
        for it: a few batches are enough.
    methods : sequence of str or of CrossLayer, BiasAbsorption, SmoothQuant, Awq, Rotation
        In this order; a name stands for its class in `qsim.equalization` with its defaults: "cross_layer", "bias_absorption",
        "smooth_quant", "awq", "rotation".
    max_batches : int, optional
        Of `data`.
    forward : callable, optional
        ``forward(model, batch)`` for batches that are not the model's arguments, as in `QuantSim.calibrate`.

    Returns
    -------
    EqualizeReport
        What was changed, what was refused for which reason, and by how much outputs differ.

    Raises
    ------
    ValueError
        A method is unknown or lacks `data`; parameters are in half precision, which scaling would round, or have no values or shape yet;
        the model is a simulation, or wrapped for several devices.

    Notes
    -----
    Each change is exact but for the rounding of the weights; "bias_absorption" is so on `data`, and the report says what it is elsewhere.
    Afterwards the outputs on `example_inputs` and `data` are compared with those from before; where they differ by more than 1e-5 of the
    largest, everything is put back, and the report says so.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[3].mul_(100)
    >>> report = equalize(model, torch.randn(5, 4))
    >>> [(c.producer, c.readers) for c in report.changes], report.refused
    ([('0', ('2',))], {'2': 'what it returns is returned by the model, or read out as a mask or number'})
    """
    if isinstance(methods, str):
        raise TypeError(f"qsim.equalize: got methods={shown(methods)}; expected a list, such as [{methods!r}]")
    if not isinstance(methods, Sequence) or not methods:
        raise TypeError(f"qsim.equalize: got methods={shown(methods)}; expected a list, such as ['cross_layer']")
    chosen = [_method(method, data is not None) for method in methods]
    check_module(model, "qsim.equalize")
    settle_offloaded(model)
    _check(model)
    if forward is not None:
        check_function("qsim.equalize", "forward", forward, "forward(model, batch)")
    calls = example_calls(example_inputs)
    given = [] if data is None else list(iterate(data, max_batches, False, "qsim.equalize"))
    batches = [arguments_of(b, calls) for b in given] if forward is None else list(calls_made(model, given, forward))
    every = [*calls, *(to_device(batch, model) for batch in batches)]
    if data is not None and not batches:
        raise ValueError("qsim.equalize: got no batch. Is the iterator used up, or the data set empty?")
    try:
        before, expected = Snapshot(model), results(model, every, calls)
    except TypeError:
        for args, kwargs in calls:
            refuse_numbers((*args, *kwargs.values()), "qsim.equalize", "an example input")
        raise
    try:
        report = _equalized(model, example_inputs, calls, every, chosen)
        error = _difference(results(model, every), expected)
    except BaseException:
        before.restore()
        raise
    objection = ""
    if not error <= TOLERANCE:
        objection = f"outputs differed by {error:.2g} of the largest, more than {TOLERANCE:.0e}"
    elif report.changes and not any(bool(t.isfinite().any()) for t in expected):
        objection = "the model returns no finite number that could be compared"
    if objection:
        before.restore()
    return replace(report, error=error, put_back=objection)


def _method(method: str | Method, has_data: bool) -> Method:
    if isinstance(method, str):
        if method not in EQUALIZE_METHODS:
            raise ValueError(f"qsim.equalize: got the method {method!r}; expected {', '.join(map(repr, EQUALIZE_METHODS))}")
        method = EQUALIZE_METHODS[method]()
    if not isinstance(method, tuple(EQUALIZE_METHODS.values())):
        raise TypeError(
            f"qsim.equalize: got the method {method!r}; expected a name or an instance of "
            f"{', '.join(k.__name__ for k in EQUALIZE_METHODS.values())}"
        )
    if method.needs_data and not has_data:
        raise ValueError(f"qsim.equalize: {method.name!r} looks at what layers read: pass data, an iterable of batches")
    return method


def _check(model: nn.Module) -> None:
    refuse_wrapped(model)
    refuse_simulated(model, "qsim.equalize", "; equalize the float model, and simulate it then")
    for name, t in model.named_parameters():
        if is_lazy(t):
            raise ValueError(f"qsim.equalize: '{name}' has no shape yet: run the model once on the example inputs")
        if t.is_meta or t.dtype in (torch.float16, torch.bfloat16):
            what = "has no values (meta device)" if t.is_meta else f"is {t.dtype}, which scaling would round"
            raise ValueError(f"qsim.equalize: '{name}' {what}; equalize the model in float32, then convert it")


def _equalized(
    model: nn.Module, example_inputs: Any, calls: Sequence[Arguments], every: Sequence[Arguments], methods: Sequence[Method]
) -> EqualizeReport:
    folds = any(isinstance(method, CrossLayer | BiasAbsorption) for method in methods)
    folded = folded_for("qsim.equalize", model, example_inputs) if folds else FoldReport()
    tape, problems = recorded(model, example_inputs, "qsim.equalize")
    uses = Uses(model, tape)
    candidates, refused = find_candidates(model, tape, uses)
    edges, others = find_edges(model, candidates, calls)
    refused |= others
    changes: list[Change] = []
    notes: list[str] = []
    kept: dict[str, str] = {}
    for method in methods:
        if isinstance(method, Rotation):
            found, reasons = method.rotate(model, edges, tape, uses, every)
            changes += found
            refused |= reasons
        elif isinstance(method, BiasAbsorption):
            found, kept, told = method.absorb(model, [edge for edge in edges if isinstance(edge.source(model), LAYERS)], calls, every)
            changes += found
            notes += told
        else:
            changes += _scaled(model, method, [edge for edge in edges if method.takes(model, edge)], every, refused)
    changed = {change.producer for change in changes}
    notes += [f"no bias was absorbed: {why}" for path, why in kept.items() if path in changed]
    refused = {path: why for path, why in (refused | kept).items() if path not in changed}
    return EqualizeReport(tuple(changes), refused, folded=folded, warnings=tuple(problems), notes=tuple(notes), subject=subject_of(model))


def _scaled(
    model: nn.Module, method: CrossLayer | SmoothQuant | Awq, edges: Sequence[Edge], calls: Sequence[Arguments], refused: dict[str, str]
) -> list[Change]:
    readers = list(dict.fromkeys(path for edge in edges for path in edge.readers))
    inputs = observe(model, readers, calls) if method.needs_data else InputStatistics()
    before = {edge: method.size(model, edge, inputs) for edge in edges}
    scales, kept = method.apply(model, edges, inputs)
    refused |= {edge.producer: why for edge, why in kept.items()}
    return [
        Change(
            method.name,
            edge.producer,
            tuple(edge.readers),
            float(torch.maximum(factors, 1 / factors).max()),
            spread(before[edge]),
            spread(before[edge] / factors),
        )
        for edge, factors in scales.items()
    ]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference over the largest magnitude, of the worst tensor; infinite where NaN or Inf, or shapes, differ."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        a, b = a[a.isfinite()].double(), b[b.isfinite()].double()
        if b.numel() and not torch.equal(a, b):
            worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return worst
