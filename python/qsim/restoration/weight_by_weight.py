"""One pass over the data in which each weight is solved for as all runs reach it, and every run goes on with what was found."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qsim.analysis.deviation import kept_floats
from qsim.restoration.choice import Solved, Steps, WeightOutcome, choose
from qsim.restoration.kept_weights import KeptWeights
from qsim.restoration.lockstep import Run, lockstep
from qsim.restoration.moments import Moments
from qsim.restoration.operands import WeightProduct, argument, product_of
from qsim.restoration.ranks import Group, agree
from qsim.restoration.restore_report import Restored
from qsim.runs.arguments import Arguments
from qsim.runs.memory import give_back
from qsim.runs.snapshot import Snapshot
from qsim.simulation.simulation import Simulation
from qsim.stages import Stages

_COLUMNS = 1 << 16  # of an operation's input that are looked at, at most
_PRODUCTS = 1 << 33  # and so many multiplications go into one of its moments, but two columns for each unknown there are at least
_MEASURED = 1 << 10  # columns that gains are measured on


@dataclass
class Pass:
    """What one pass found; see `RestoreReport`."""

    solved: dict[str, Solved] = field(default_factory=dict)
    weights: list[Restored] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    results: dict[int, list[Tensor]] = field(default_factory=dict)  # by batch, of those that are measured on: in float
    references: dict[int, list[Tensor]] = field(default_factory=dict)  # by batch, of all: in float


@dataclass
class _Pair:
    """The runs of one batch: in float and simulated."""

    batch: int
    in_float: Run
    simulated: Run
    measures: bool
    uses: Counter[str] = field(default_factory=Counter)


@dataclass
class _Site:
    """What is known of a weight until it is solved for."""

    product: WeightProduct | None = None
    bias: str | None = None
    moments: Moments | None = None
    measured: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Layers:
    """The pass: a class because its steps share what was found so far.

    Parameters
    ----------
    sim : Simulation
        Calibrated, in eval mode.
    steps : Steps
    wanted : collection of str
        Keys of the weights to look at.
    uses : mapping of str to int
        How often one run reads each.
    stateful : bool
        Whether a run changes the state of the model.
    seconds : Stages
        Where time is counted.
    keeps_results : bool
        Whether `Pass.references` is wanted.
    group : ProcessGroup or None
        The ranks that see other data.
    kept : KeptWeights, optional
        Where what is found is kept, and what was found before comes from.
    """

    def __init__(
        self,
        sim: Simulation,
        steps: Steps,
        wanted: Sequence[str],
        uses: Counter[str],
        seconds: Stages,
        *,
        stateful: bool,
        keeps_results: bool,
        group: Group,
        kept: KeptWeights | None,
    ) -> None:
        self.group, self.kept, self.stateful = group, kept, stateful
        self.sim, self.steps, self.uses, self.seconds, self.keeps_results = sim, steps, uses, seconds, keeps_results
        self.found = Pass()
        self._wanted = {key for key in wanted if uses[key]}
        for key, outcome in () if kept is None else kept.found(sorted(self._wanted)):
            self._wanted.discard(key)
            self._take_in(key, outcome)
        self._sites: dict[str, _Site] = {}
        self._order = {key: i for i, key in enumerate(sim.quantizers())}
        self._names = {id(p): name for name, p in sim.model.named_parameters()}
        self._runs: Counter[bool] = Counter()  # how many are held back, and how many are not

    def run(self, calls: Sequence[Callable[[], Any]], measures: Sequence[bool]) -> Iterator[str]:
        """Go through the model with all `calls`; those that `measures` says are held back. Yields each key when it is done with."""
        with lockstep(self.sim, [partial(_results, call) for call in calls], stateful=self.stateful) as runs:
            pairs = [_Pair(i, *pair, held) for i, (pair, held) in enumerate(zip(runs, measures, strict=True))]
            self._runs = Counter(pair.measures for pair in pairs)
            for pair in pairs:
                self._begin(pair)
            while alive := [pair for pair in pairs if pair.simulated.reached is not None]:
                key = min({_key(pair.simulated) for pair in alive}, key=self._order.__getitem__)
                there = [pair for pair in alive if _key(pair.simulated) == key]
                with self.seconds.stage("moments"):
                    there = self._look(key, there)
                if key in self._wanted and all(pair.uses[key] >= self.uses[key] for pair in there):
                    yield from self._solve(key)
                with self.seconds.stage("forward"):
                    for pair in there:
                        self._go_on(pair)
                    give_back()
            for pair in pairs:
                self._end(pair)
        for key in [key for key in self._sites if key in self._wanted]:  # read less often by every batch than by the first
            yield from self._solve(key)
        agree(None, "which weight comes next", self.group)

    # Runs.

    def _begin(self, pair: _Pair) -> None:
        with self.seconds.stage("forward"):
            for run in (pair.in_float, pair.simulated):
                self._advance(run)
            self._align(pair)

    def _go_on(self, pair: _Pair) -> None:
        call = pair.simulated.reached
        assert call is not None
        solved = self.found.solved.get(call.key)
        if pair.in_float.reached is not None and pair.in_float.reached.key == call.key:
            self._advance(pair.in_float)
        self._advance(pair.simulated, None if solved is None else solved.applied(call))
        self._align(pair)

    def _advance(self, run: Run, answer: Arguments | None = None) -> None:
        run.advance(answer)
        while run.reached is not None and run.reached.key not in self._wanted:
            solved = self.found.solved.get(run.reached.key) if run.simulates else None
            run.advance(None if solved is None else solved.applied(run.reached))
        if run.error is not None:
            raise run.error

    def _align(self, pair: _Pair) -> None:
        """Have the float run stand where the simulated one does, if its way leads there."""
        while (there := pair.simulated.reached) is not None and (here := pair.in_float.reached) is not None and here.key != there.key:
            self._advance(pair.in_float)

    def _end(self, pair: _Pair) -> None:
        while pair.in_float.reached is not None:
            self._advance(pair.in_float)
        if pair.batch in self.found.left_out:
            return
        if self.keeps_results:
            self.found.references[pair.batch] = pair.in_float.result
        if pair.measures or not self._runs[True]:
            self.found.results[pair.batch] = pair.in_float.result

    # Moments.

    def _look(self, key: str, pairs: list[_Pair]) -> list[_Pair]:
        """Take in what these runs read; returns the pairs that go on."""
        staying = []
        for pair in pairs:
            pair.uses[key] += 1
            if key in self._wanted and (why := self._take(key, pair)) is not None:
                self.found.left_out[pair.batch] = why
                pair.in_float.abandon()
                pair.simulated.abandon()
            else:
                staying.append(pair)
        return staying

    def _take(self, key: str, pair: _Pair) -> str | None:
        """Why the batch cannot be used, if so."""
        call, twin = pair.simulated.reached, pair.in_float.reached
        assert call is not None
        site = self._sites.setdefault(key, _Site())
        product, reference = product_of(call), product_of(call if twin is None else twin)
        if isinstance(product, str) or isinstance(reference, str):
            self._skip(key, product if isinstance(product, str) else str(reference))
            return None
        rows = product.to_rows(torch.empty(product.shape, device="meta"))
        size = rows.shape[-1]
        if site.product is None:
            weight = None if self.steps.method == "gpfq" else product.to_rows(self.sim.weights()[key].detach())
            site.moments = Moments.empty(product.groups, size, product.input.device, weight)
            site.product = dataclasses.replace(product, input=product.input.new_empty(0), columns=_none)  # what it read may go
            if twin is not None and product.bias is not None and reference.bias is not None:
                site.bias = self._names.get(id(argument(twin, reference.bias)))
        count = _MEASURED if pair.measures else max(2 * size, min(_COLUMNS, _PRODUCTS // (size * size * product.groups)))
        each = -(-count // (self._runs[pair.measures] * self.uses[key]))
        x, y = (side.columns(each, self._generator(key, pair)) for side in (reference, product))
        if any(side.shape[:2] != (product.groups, size) for side in (x, y)):
            return None  # the operation itself refuses such a batch, in a moment and in words of its own
        if not bool(x.isfinite().all() & y.isfinite().all()):
            return f"'{self.sim.decisions.quantizers[key].operation}' read NaN or Inf"
        if self.uses[key] > 1:  # its own errors are in what it reads: what makes up for them there is fed back once more
            x = y
        assert site.moments is not None
        if pair.measures or not self._runs[True]:
            site.measured.append((site.moments.reduced(x[..., :_MEASURED]), y[..., :_MEASURED]))
        if pair.measures:
            return None
        site.moments.add(x if self.steps.follows_inputs else y, y)
        return None

    def _generator(self, key: str, pair: _Pair) -> torch.Generator:
        """The same for the float run and the simulated one: they look at the same places."""
        return torch.Generator().manual_seed((self._order[key] * 65_537 + pair.batch) * 257 + pair.uses[key])

    def _skip(self, key: str, why: str) -> None:
        self.found.skipped[key] = why
        self._wanted.discard(key)
        self._sites.pop(key, None)

    # Solutions.

    def _solve(self, key: str) -> Iterator[str]:
        site = self._sites.pop(key)
        self._wanted.discard(key)
        agree(key, "which weight comes next", self.group)
        if site.product is not None and site.moments is not None:
            with self.seconds.stage("solving"), torch.no_grad():
                outcome = choose(self.sim, key, self.steps, site.product, site.bias, site.moments, site.measured, self.group)
            if self.kept is not None:
                self.kept.keep(key, outcome)
            self._take_in(key, outcome)
        yield key

    def _take_in(self, key: str, outcome: WeightOutcome | str) -> None:
        if isinstance(outcome, str):
            self.found.skipped[key] = outcome
            return
        self.found.weights.append(outcome.row)
        if outcome.solved is not None:
            self.found.solved[key] = outcome.solved


def _results(call: Callable[[], Any]) -> list[Tensor]:
    """What a call returns, which may be the model's own, as no other run changes it."""
    return kept_floats(call())


def _key(run: Run) -> str:
    assert run.reached is not None
    return run.reached.key


def _none(count: int, generator: torch.Generator) -> Tensor:
    raise AssertionError("a product that outlived its call")


def uses_of(sim: Simulation, call: Callable[[], Any]) -> tuple[Counter[str], int, bool]:
    """How often a run in float reads each weight, the bytes of the most that one of these operations reads and writes, and whether the run
    changes the state of the model, which is afterwards as it was.

    Raises what the model raises.
    """
    uses: Counter[str] = Counter()
    widest = 0
    before = Snapshot(sim.model, parameters=False)
    with lockstep(sim, [call], stateful=False) as ((run, _),):
        run.advance()
        while run.reached is not None:
            uses[run.reached.key] += 1
            widest = max(widest, sum(t.nbytes for t in run.reached.args if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)))
            run.advance()
        if run.error is not None:
            raise run.error
    stateful = before.is_changed()
    before.restore()
    return uses, widest, stateful
