"""What becomes of one weight, once it is known what reads it: candidates, and the one that is best on data that was held back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from qsim.graph.execute.tapped import WeightedCall
from qsim.numbers.encoding import Encoding
from qsim.numbers.sqnr import sqnr
from qsim.ops.fake_quantize_bias import fake_quantize_bias
from qsim.restoration.grids import Grid
from qsim.restoration.moments import Moments
from qsim.restoration.operands import WeightProduct, argument, product_of, with_arguments
from qsim.restoration.ranks import Group, total
from qsim.restoration.restore_report import Restored
from qsim.restoration.rounding import learned
from qsim.restoration.solvers import SOLVERS, Problem, gptq_refined
from qsim.runs.arguments import Arguments
from qsim.simulation.simulation import Simulation

LEARNED = "learned rounding"


@dataclass(frozen=True)
class Steps:
    """What is done to each weight: `QuantSim.restore` documents them. `method` None: weights stay."""

    method: str | None = "gptq"
    ranges: bool = True
    biases: bool = True
    follows_inputs: bool = True
    damping: float = 0.01
    rounding_steps: int = 0


@dataclass(frozen=True)
class Solved:
    """What was found for one weight: its scales, what is read of it, whether that is to replace it, and the bias.

    Attributes
    ----------
    encoding : Encoding
    weight : Tensor
        On its grid, as it is read.
    solves : bool
        False: the weight stays, and is rounded to this as ever.
    bias : str, optional
        The name of the bias, where its value changes.
    value : Tensor, optional
        Its new value.
    read : Tensor, optional
        What the operation reads of it, rounded to int32 where it is.
    """

    encoding: Encoding
    weight: Tensor
    solves: bool
    bias: str | None
    value: Tensor | None
    read: Tensor | None

    def applied(self, call: WeightedCall) -> Arguments:
        """The arguments that the call runs with."""
        values = {call.slot: self.weight.to(argument(call, call.slot).dtype)}
        product = product_of(call)
        if self.read is not None and isinstance(product, WeightProduct) and product.bias is not None:
            values[product.bias] = self.read
        return with_arguments(call, values)


@dataclass(frozen=True)
class WeightOutcome:
    """The row of the report, and what is to be done; None: nothing."""

    row: Restored
    solved: Solved | None


@dataclass(frozen=True)
class _Candidate:
    """As `Solved`, with the weight as rows of a product."""

    grid: Grid
    rows: Tensor
    solves: bool = False
    bias: str | None = None
    value: Tensor | None = None
    read: Tensor | None = None

    def solved(self, like: Tensor) -> Solved:
        """For a weight of the dtype of `like`."""
        weight = self.grid.product.from_rows(self.rows).to(like.dtype).contiguous()
        return Solved(self.grid.encoding, weight, self.solves, self.bias, self.value, self.read)


def choose(
    sim: Simulation,
    key: str,
    steps: Steps,
    product: WeightProduct,
    bias: str | None,
    moments: Moments,
    measured: Sequence[tuple[Tensor, Tensor]],
    group: Group,
) -> WeightOutcome | str:
    """Solve for a weight, or say why not.

    Parameters
    ----------
    sim : Simulation
    key : str
        Of the weight's quantizer.
    steps : Steps
    product : WeightProduct
    bias : str, optional
        The name of the bias.
    moments : Moments
        Taken over, and changed.
    measured : sequence of (Tensor, Tensor)
        Columns in float, as `moments` reduces them, and simulated, ``[groups, K, N]``, that gains are measured on.
    group : ProcessGroup or None
        The ranks that see other data of the same model.
    """
    moments.merge(group)
    if not moments.count:
        return "only batches that were held back read it"
    quantizer, parameter = sim.quantizers()[key], sim.weights()[key]
    wanted = None if bias is None else attrgetter(bias)(sim.model)
    shifts = steps.biases and wanted is not None
    if not (steps.method or steps.ranges or shifts):
        return "it has no bias"
    weight = product.to_rows(parameter.detach().to(moments.own.dtype))
    encoding = quantizer.encoding
    assert encoding is not None
    grid = Grid.of(quantizer.spec, encoding, product, weight.dtype)
    means = moments.averaged()
    kept = _with_bias(sim, key, _Candidate(grid, grid.rounded(weight)), bias, None)
    candidates = {"kept": kept}
    if shifts:
        candidates["bias"] = _with_bias(sim, key, kept, bias, _shift(kept, weight, *means))
        moments.centre()
    if (done := _solved(weight, grid, moments, steps)) is not None:
        parts = [*(["ranges"] if steps.ranges else []), *([steps.method] if steps.method else []), *(["bias"] if shifts else [])]
        shift = _shift(done, weight, *means) if shifts else None
        candidates[" + ".join(parts)] = _with_bias(sim, key, done, bias, shift)
    elif not shifts:
        return "nothing that reached it was ever other than zero"
    expand = weight if moments.weight is None else None
    levels = {how: _level(each, expand, wanted, measured, group) for how, each in candidates.items()}
    best = max(levels, key=lambda how: (levels[how], how == "kept"))
    row = Restored(key, levels["kept"], levels[best], best)
    return WeightOutcome(row, None if best == "kept" else candidates[best].solved(parameter))


def _solved(weight: Tensor, grid: Grid, moments: Moments, steps: Steps) -> _Candidate | None:
    """Scales and integers, None where there is nothing to solve or to solve with."""
    if not (steps.method or steps.ranges):
        return None
    problem = Problem.of(weight, moments, steps.damping, keeps_moments=steps.method == "gpfq")
    if problem is None:
        return None
    found = grid.cheapest(problem.target if steps.method else weight, problem.root()) if steps.ranges else grid
    if steps.method == LEARNED and not grid.spec.is_float:
        rows = learned(problem, found, steps.rounding_steps)
    else:
        rows = SOLVERS.get(steps.method, gptq_refined)(problem, found) if steps.method else found.rounded(weight)
    return _Candidate(found, rows, steps.method is not None)


def _with_bias(sim: Simulation, key: str, found: _Candidate, name: str | None, shift: Tensor | None) -> _Candidate:
    """With the bias of this name and what is added to it, and as it is read beside the scales that were found."""
    if name is None:
        return found
    value: Tensor = attrgetter(name)(sim.model).detach()
    value = value if shift is None else value + shift.to(value)
    read, quantizers = value, sim.quantizers()
    for bias in sim.decisions.biases:
        if bias.parameter == name and bias.weight == key and quantizers[bias.input].enabled:
            read = fake_quantize_bias(value, quantizers[bias.input].grid_scale.detach(), found.grid.encoding.scale)
    return dataclasses.replace(found, bias=None if shift is None else name, value=value, read=read)


def _shift(found: _Candidate, weight: Tensor, float_mean: Tensor, own_mean: Tensor) -> Tensor:
    """What makes the mean of the result that of the float model's: Nagel et al. 2019, section 4.2."""
    return (weight @ float_mean[..., None] - found.rows @ own_mean[..., None]).flatten()


def _level(found: _Candidate, weight: Tensor | None, bias: Tensor | None, measured: Sequence[tuple[Tensor, Tensor]], group: Group) -> float:
    """SQNR in dB of the operation's result; `weight`: the float model's, where what was kept in float is not its product."""
    signal = noise = 0.0
    for x, y in measured:
        wanted, got = x if weight is None else weight.to(x) @ x, found.rows.to(y) @ y
        if bias is not None and found.read is not None:
            shape = (*found.rows.shape[:2], 1)
            wanted, got = wanted + bias.reshape(shape).to(wanted), got + found.read.reshape(shape).to(got)
        signal += float(wanted.double().square().sum())
        noise += float((wanted - got).double().square().sum())
    return sqnr(*total([signal, noise], group, found.rows.device))
