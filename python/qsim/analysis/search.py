"""The smallest set of operations to keep in float: a search that asks an oracle about sets of them, one probe at a time.

A set is *irreducible* when it cures and no single operation can be taken out of it: found here by taking out, never by adding up, so
that what is held is right at every moment and an exhausted budget still leaves an answer.

Units that are surely needed (a chain whose values leave the range) are tried one by one, which costs a probe each. Among those nothing
is known of, the less suspicious half is taken out at once; where that fails, bisection finds the one operation that is needed and
drops all behind it, and the run that was dropped tells how many to try next. ``k`` needed of ``n`` cost about ``k log2(n / k)`` probes.

The idea of dividing the constraints is that of QuickXplain (Junker, "QuickXplain: Preferred Explanations and Relaxations for
Over-Constrained Problems", AAAI 2004); groups that grow with the runs between needed members are those of adaptive group testing
(Hwang, "A Method for Detecting All Defective Members in a Population by Group Testing", JASA 67, 1972).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from qsim.analysis.evidence import Evidence
from qsim.options import check_number, check_whole


class Verdict(Protocol):
    """What a probe has to say of a set: `qsim.clinic.shadow.Outcome` is one.

    Attributes
    ----------
    ok : bool
        Whether the model is right with this set kept.
    sqnr : float
        Of its results beside float32, in dB; or the metric that the target is about. Higher is better.
    nonfinite : int
        Elements of its results that are NaN or Inf where float32 is finite.
    """

    @property
    def ok(self) -> bool: ...
    @property
    def sqnr(self) -> float: ...
    @property
    def nonfinite(self) -> int: ...


V = TypeVar("V", bound=Verdict)


@dataclass(frozen=True)
class Effort:
    """When a search ends at the latest: after so many probes, or so many seconds. None: no limit."""

    probes: int | None = None
    seconds: float | None = None
    caller: str = "QuantSim.float_plan"

    def __post_init__(self) -> None:
        if self.probes is not None:
            check_whole(self.caller, "probes", self.probes, least=1, otherwise="None for no limit")
        if self.seconds is not None:
            check_number(self.caller, "seconds", self.seconds, least=0, otherwise="None for no limit")
            if self.seconds == 0:
                raise ValueError(f"{self.caller}: got seconds=0; expected a positive number, or None for no limit")


@dataclass(frozen=True)
class Found(Generic[V]):
    """What `search` returns.

    Attributes
    ----------
    keep : tuple of str
        In the order of the model.
    outcome : Verdict
        With these kept.
    irreducible : bool
        It is right with these kept, and was seen to be wrong with any single one of them left out.
    probes : int
        Sets that were tried.
    note : str
        Why the search fell short; "" where it did not.
    """

    keep: tuple[str, ...]
    outcome: V
    irreducible: bool
    probes: int
    note: str = ""


def search(evidence: Evidence, probe: Callable[[frozenset[str]], V], budget: Effort = Effort()) -> Found[V]:
    """A set of operations that cures when it is kept, and that loses that with any single one left out.

    Parameters
    ----------
    evidence : Evidence
        Wrong or missing evidence costs probes, not correctness.
    probe : callable
        ``probe(keep) -> Verdict``. Asked about each set once. It need not be monotone: sets are tried, never concluded upon.
    budget : Effort

    Returns
    -------
    Found
        Where the budget ended the search, the smallest set seen so far that cures; where keeping everything does not cure, nothing.

    Examples
    --------
    >>> from qsim.clinic.shadow import Outcome
    >>> evidence = Evidence(["conv", "square", "mean", "fc"], readers={"square": ["mean"]}, leaving=["square"])
    >>> found = search(evidence, lambda keep: Outcome({"square", "mean"} <= keep, 60.0, 0, None))
    >>> found.keep, found.irreducible, found.probes
    (('square', 'mean'), True, 4)
    """
    asked = _Asked(probe, budget)
    irreducible, note = True, ""
    try:
        keep = _irreducible(evidence, asked)
        if keep is None:
            everything = asked(frozenset(evidence.operations))
            return Found((), everything, False, asked.count, _beyond(everything))
    except _Spent as spent:
        irreducible, keep = False, asked.best()
        here = asked.seen[keep]
        broken = f", with {here.nonfinite} results that are NaN or Inf" if here.nonfinite else ""
        note = f"the budget of {spent} is spent: " + (
            "a smaller set may do" if here.ok else f"no set was found that is right; this one came nearest{broken}"
        )
    return Found(tuple(name for name in evidence.operations if name in keep), asked.seen[keep], irreducible, asked.count, note)


def _beyond(everything: Verdict) -> str:
    """Why keeping every operation is not enough."""
    broken = f"{everything.nonfinite} results are NaN or Inf"
    what = broken if everything.nonfinite else f"the results reach {everything.sqnr:.1f} only"
    return f"{what} even with every operation in float32: the fault is in float32 itself, or in inputs and constants, not in an operation"


class _Spent(Exception):
    """The budget is."""


class _Asked(Generic[V]):
    """The probe, asked about each set once, within the budget."""

    def __init__(self, probe: Callable[[frozenset[str]], V], budget: Effort) -> None:
        self.probe, self.budget = probe, budget
        self.seen: dict[frozenset[str], V] = {}
        self.began = time.monotonic()

    @property
    def count(self) -> int:
        return len(self.seen)

    def __call__(self, keep: frozenset[str]) -> V:
        if keep not in self.seen:
            if self.budget.probes is not None and self.count >= self.budget.probes:
                raise _Spent(f"{self.budget.probes} probes")
            # the first probe is made in any case: there is always something to tell
            if self.seen and self.budget.seconds is not None and time.monotonic() - self.began >= self.budget.seconds:
                raise _Spent(f"{self.budget.seconds:g} seconds")
            self.seen[keep] = self.probe(keep)
        return self.seen[keep]

    def best(self) -> frozenset[str]:
        """The smallest set that cured; without one, that with the fewest NaN and Inf and the least noise."""

        def key(keep: frozenset[str]) -> tuple[bool, int, float, int]:
            outcome = self.seen[keep]
            noise = math.inf if math.isnan(outcome.sqnr) else -outcome.sqnr
            return (False, 0, 0.0, len(keep)) if outcome.ok else (True, outcome.nonfinite, noise, len(keep))

        return min(self.seen, key=key)


def _irreducible(evidence: Evidence, asked: _Asked[V]) -> frozenset[str] | None:
    """The set; None if keeping everything does not cure."""
    nothing = frozenset[str]()
    if asked(nothing).ok:
        return nothing
    islands = [frozenset(island) for island in evidence.islands()]
    suspected, others = nothing.union(*islands), nothing
    if not islands or not asked(suspected).ok:
        if not asked(frozenset(evidence.operations)).ok:
            return None
        rest = evidence.by_suspicion(name for name in evidence.operations if name not in suspected)
        others = nothing.union(*_needed(asked, suspected, [frozenset({name}) for name in rest], len(rest) / 2))
    islands = _needed(asked, others, islands, 1)
    alone = others.union(*(island for island in islands if len(island) == 1))
    chains = evidence.by_suspicion(nothing.union(*islands) - alone)
    keep = alone.union(*_needed(asked, alone, [frozenset({name}) for name in chains], 1))
    return _verified(evidence, asked, keep)


def _needed(asked: _Asked[V], fixed: frozenset[str], units: Sequence[frozenset[str]], run: float) -> list[frozenset[str]]:
    """The units without which `fixed` and the others do not cure; with all of them it does.

    Parameters
    ----------
    units : sequence of frozenset of str
        The most suspicious first. Taken out from the end.
    run : float
        How many in a row are likely not needed.
    """
    needed: list[frozenset[str]] = []
    left, dropped = list(units), 0
    while left:
        size = min(len(left), max(1, int(run)))
        kept, tried = left[:-size], left[-size:]
        base = fixed.union(*needed, *kept)
        if asked(base).ok:
            left, dropped, run = kept, dropped + size, 2 * run
            continue
        count = _bisect(asked, base, tried)
        needed.append(tried[count - 1])
        left, run, dropped = kept + tried[: count - 1], (run + dropped + size - count) / 2, 0
    return needed


def _bisect(asked: _Asked[V], base: frozenset[str], units: Sequence[frozenset[str]]) -> int:
    """How many of the first units cure together with `base` where one fewer does not; none do not, and all do."""
    low, high = 0, len(units)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if asked(base.union(*units[:middle])).ok else (middle, high)
    return high


def _verified(evidence: Evidence, asked: _Asked[V], keep: frozenset[str]) -> frozenset[str]:
    """`keep`, less what it can do without after all: an operation that was needed beside others need not be so where the probe is not
    monotone."""
    while True:
        spare = next((name for name in reversed(evidence.by_suspicion(keep)) if asked(keep - {name}).ok), None)
        if spare is None:
            return keep
        keep -= {spare}
