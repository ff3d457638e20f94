"""The ranges of a simulation: chosen from what was observed, and from the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from torch import Tensor

from qsim.errors import CalibrationError
from qsim.graph.plan.actions import PlannedBias
from qsim.graph.plan.rules import weight_axes
from qsim.numbers.spec import TensorSpec
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.observed import WithObserver, encode_observed
from qsim.quantizers.observer import with_method
from qsim.quantizers.quantizer import Quantizer
from qsim.quantizers.weights import encode_weights, look_at
from qsim.runs.mapped import MappedParameter, release
from qsim.runs.memory import give_back
from qsim.runs.sharding import whole
from qsim.simulation.lent_ranges import Borrower, lent
from qsim.simulation.simulation import Simulation

_FALLEN = "not needed: all that use it fall back"
_OTHER = "where it stands was something else than in the example inputs: that stays in float"


def choose_encodings(
    sim: Simulation,
    method: str | None = None,
    *,
    percentile: float | None = None,
    gamma: float | None = None,
    specs: Mapping[str, TensorSpec] | None = None,
    quantizers: Mapping[str, Quantizer] | None = None,
) -> list[str]:
    """Give every quantizer its encoding, but for `Simulation.bound_scales`, which keep theirs. Returns a sentence for each that had to be
    changed afterwards.

    Parameters
    ----------
    method, percentile, gamma : optional
        In place of what the specs have.
    specs : mapping of str to TensorSpec, optional
        In place of the quantizers' own, which have the method last used.
    quantizers : mapping of str to Quantizer, optional
        Who is given encodings, in place of the simulation's own: all of them.
    """
    bound = set(sim.bound_scales()) if quantizers is None else set()
    quantizers = sim.quantizers() if quantizers is None else quantizers
    given = {key: q.spec for key, q in quantizers.items()} if specs is None else specs
    problems: dict[str, CalibrationError] = {}
    parameters = {key: whole(weight) for key, weight in sim.weights().items() if not given[key].is_dynamic}
    for keys in _together(parameters):
        for key in bound.intersection(keys):
            if (problem := look_at(quantizers[key], parameters[key], quantizers[key].spec)) is not None:
                problems[key] = problem
            release(parameters[key])
        keys = [key for key in keys if key not in bound]
        of_weights, weights = [quantizers[key] for key in keys], [parameters[key] for key in keys]
        wanted = [with_method(given[key], None if given[key].is_running else method, percentile=percentile, gamma=gamma) for key in keys]
        for key, found in zip(keys, encode_weights(of_weights, weights, wanted), strict=True):
            if isinstance(found, CalibrationError):
                problems[key] = found
        if any(map(release, weights)):
            give_back()
    observed: dict[str, WithObserver] = {}
    wanted, borrowed = [], lent(sim)
    for key, quantizer in quantizers.items():
        spec = given[key]
        if key in parameters or key in bound or sim.decisions.quantizers[key].range is not None or spec.is_dynamic:
            continue
        chosen = None if spec.is_running or spec.axis is not None else method
        observed[key] = Borrower(quantizer, borrowed[key].observer) if key in borrowed else quantizer
        wanted.append(with_method(spec, chosen, percentile=percentile, gamma=gamma))
    for key, found in zip(observed, encode_observed([*observed.values()], wanted), strict=True):
        if isinstance(found, CalibrationError):
            problems[key] = found
    needed, refused = sim.needed(), sim.switch.refused
    unmet = [key for key, q in quantizers.items() if key in problems and q.enabled and key in needed - refused]
    idle = [key for key in unmet if sim.is_idle(key)]
    unmet = [key for key in unmet if key not in idle]
    fitted = fit_biases(sim, sim.decisions.biases, quantizers)  # of those that have ranges, whatever the others are told
    if unmet:
        raise _failure([str(problems[key]) for key in unmet])
    reasons = {**dict.fromkeys(refused, _OTHER), **dict.fromkeys(problems.keys() - needed, _FALLEN)}
    unneeded = [f"{problems[key]} ({reasons[key]})" for key in quantizers if key in problems and key in reasons]
    later = "values that come later are an error. Calibrate with data that reach it"
    empty = [f"'{key}' met empty tensors alone and has no range: {later}" for key in idle]
    return [*unneeded, *empty, *(found.sentence for found in borrowed.values()), *fitted]


def fit_biases(sim: Simulation, biases: Iterable[PlannedBias], quantizers: Mapping[str, Quantizer] | None = None) -> list[str]:
    """Raise weight scales where sums with a bias would not fit into int32: the simulation's, or those of other quantizers by the same keys.
    Returns a sentence for each weight."""
    quantizers = sim.quantizers() if quantizers is None else quantizers
    weights, raised = sim.weights(), dict[PlannedBias, int]()
    for b in biases:
        bias = whole(attrgetter(b.parameter)(sim.model))
        weight, axis = weights.get(b.weight), quantizers[b.weight].spec.axis
        if axis is None and (axes := weight_axes(b.op, "weight")) is not None:
            axis = axes.output
        products = None
        if weight is not None and isinstance(axis, int) and bias.numel() % weight.shape[axis] == 0:
            products = whole(weight).movedim(axis, 0)
        raised[b] = BiasQuantizer(quantizers[b.input], quantizers[b.weight]).fit(bias, products)
        release(weight)
    return [f"'{b.weight}': {n} scales raised so that sums with the bias '{b.parameter}' fit into int32" for b, n in raised.items() if n]


def _together(weights: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Which weights are searched together: all, but for those that lie in files, of which one is in memory at a time."""
    alone = dict.fromkeys(key for key, weight in weights.items() if isinstance(weight, MappedParameter))
    yield [key for key in weights if key not in alone]
    for key in alone:
        yield [key]


def _failure(problems: list[str]) -> CalibrationError:
    """The error that lists every quantizer without a range."""
    lines = "\n  ".join(problems)
    return CalibrationError(
        f"QuantSim: {len(problems)} quantizers got no range; all others have theirs, and what was observed is kept.\n  {lines}"
    )
