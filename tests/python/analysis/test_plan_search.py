"""The search for the smallest set to keep: beside brute force, on dataflow graphs where overflow passes along readers."""

import itertools
import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qsim.analysis.search
from qsim.analysis.evidence import Evidence
from qsim.analysis.search import Effort, search


class Outcome(NamedTuple):
    ok: bool
    sqnr: float
    nonfinite: int = 0


@dataclass(frozen=True)
class World:
    """A model of operations 0 to n - 1: what each reads, which make values out of range, bring them back, or are right with Inf too."""

    reads: tuple[tuple[int, ...], ...]
    makes: frozenset[int]
    restores: frozenset[int]
    saturates: frozenset[int]

    @property
    def names(self) -> list[str]:
        return [f"op{i}" for i in range(len(self.reads))]

    def leaving(self) -> set[int]:
        found: set[int] = set()
        for i, reads in enumerate(self.reads):
            if i in self.makes or (not found.isdisjoint(reads) and i not in self.restores | self.saturates):
                found.add(i)
        return found

    def probe(self, keep: frozenset[str]) -> Outcome:
        """An operation that is not kept reads Inf where a value leaves the range, and returns Inf where its own does."""
        leaving, broken = self.leaving(), set()
        for i, reads in enumerate(self.reads):
            kept = f"op{i}" in keep
            reads_inf = any(j in broken or (j in leaving and not kept) for j in reads)
            if (reads_inf and i not in self.saturates) or (i in leaving and not kept):
                broken.add(i)
        read = {j for reads in self.reads for j in reads}
        bad = sum(i in broken for i in range(len(self.reads)) if i not in read)
        return Outcome(not bad, float(-bad), bad)

    def evidence(self, order: str = "true") -> Evidence:
        readers = {f"op{j}": [f"op{i}" for i, reads in enumerate(self.reads) if j in reads] for j in range(len(self.reads))}
        return Evidence(self.names, readers, [f"op{i}" for i in self.leaving()] if order == "true" else [])


@st.composite
def worlds(draw, least: int = 1, most: int = 9) -> World:
    size = draw(st.integers(least, most))
    reads = tuple(tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else () for i in range(size))
    some = st.frozensets(st.integers(0, size - 1), max_size=3)
    return World(reads, draw(some), draw(st.frozensets(st.integers(0, size - 1))), draw(some))


def cures(world: World, keep) -> bool:
    return world.probe(frozenset(keep)).ok


@settings(max_examples=200, deadline=None)
@given(worlds(), st.sampled_from(["true", "none"]))
def test_no_proper_subset_of_what_is_found_cures(world, order):
    found = search(world.evidence(order), world.probe)
    everything = cures(world, world.names)
    assert found.outcome.ok == everything == found.irreducible
    if everything:
        subsets = itertools.chain.from_iterable(itertools.combinations(found.keep, n) for n in range(len(found.keep)))
        assert cures(world, found.keep)
        assert not any(cures(world, subset) for subset in subsets)
        assert list(found.keep) == [name for name in world.names if name in found.keep]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7), st.randoms(use_true_random=False))
def test_irreducible_where_the_probe_is_not_monotone(size, random):
    names = [f"op{i}" for i in range(size)]
    table = {frozenset(s): random.random() < 0.4 for n in range(size) for s in itertools.combinations(names, n)}
    table[frozenset(names)] = True
    suspicion = {name: random.random() for name in names}
    leaving = random.sample(names, random.randint(0, size))
    readers = {name: random.sample(names[i + 1 :], min(2, size - i - 1)) for i, name in enumerate(names)}
    found = search(Evidence(names, readers, leaving, suspicion=suspicion), lambda keep: Outcome(table[keep], 0.0))
    assert found.irreducible
    assert table[frozenset(found.keep)]
    assert not any(table[frozenset(found.keep) - {name}] for name in found.keep)


def wide(rng: random.Random, size: int, lengths: list[int]) -> World:
    """A graph with skips where chains of these lengths overflow: the last of each brings values back."""
    reads = [(i - 1, *rng.sample(range(max(0, i - 6), i), min(i, rng.randint(0, 1)))) if i else () for i in range(size)]
    makes: set[int] = set()
    restores: set[int] = set(range(size))
    for length in lengths:
        start = rng.randrange(1, size - length)
        makes.add(start)
        restores -= set(range(start, start + length - 1))
    return World(tuple(reads), frozenset(makes), frozenset(restores), frozenset(rng.sample(range(size), 20)))


@pytest.mark.parametrize("seed", range(25))
def test_three_culprits_with_their_chains_among_412_take_40_probes(seed):
    rng = random.Random(seed)
    world = wide(rng, 412, [rng.randint(2, 5) for _ in range(3)])
    found = search(world.evidence(), world.probe)
    assert found.irreducible
    assert found.probes <= 40
    assert cures(world, found.keep)
    assert not any(cures(world, set(found.keep) - {name}) for name in found.keep)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 411), min_size=3, max_size=3))
def test_three_culprits_of_which_nothing_is_known_take_40_probes_too(culprits):
    names = [f"op{i}" for i in range(412)]
    needed = frozenset(names[i] for i in culprits)
    found = search(Evidence(names), lambda keep: Outcome(needed <= keep, 0.0))
    assert frozenset(found.keep) == needed
    assert found.irreducible
    assert found.probes <= 40


def test_the_sum_of_many_small_errors_is_cured_by_the_largest():
    """Noise that adds up, as in int8: the ranking is right, and the smallest set is its beginning."""
    names = [f"layer{i}" for i in range(60)]
    noise = {name: 2.0 ** -(i % 10) for i, name in enumerate(names)}
    found = search(Evidence(names, suspicion=noise), lambda keep: Outcome(sum(noise[n] for n in names if n not in keep) < 1.5, 0.0))
    assert sorted(found.keep, key=noise.get) == sorted(names, key=noise.get)[-len(found.keep) :]
    assert found.irreducible
    assert found.probes < 3 * len(found.keep)


def test_a_whole_harmless_island_goes_in_one_probe():
    names = [f"op{i}" for i in range(31)]
    readers = {a: [b] for a, b in itertools.pairwise(names[:29])}
    found = search(Evidence(names, readers, [*names[:28], "op30"]), lambda keep: Outcome("op30" in keep, 0.0))
    assert found.keep == ("op30",)
    assert found.probes == 4  # none, all that is suspected, each island alone


def test_equal_answers_are_decided_by_suspicion():
    def probe(keep):
        return Outcome(bool(keep & {"a", "b"}), 0.0)

    assert search(Evidence(["a", "b", "c"], suspicion={"b": 1.0}), probe).keep == ("b",)
    assert search(Evidence(["a", "b", "c"], suspicion={"a": 1.0}), probe).keep == ("a",)


def test_nothing_to_cure():
    found = search(Evidence(["a"]), lambda keep: Outcome(True, 90.0))
    assert (found.keep, found.irreducible, found.probes, found.note) == ((), True, 1, "")


@pytest.mark.parametrize(("outcome", "told"), [(Outcome(False, 3.0, 12), "12 results are NaN or Inf"), (Outcome(False, 3.0), "reach 3.0")])
def test_the_fault_of_float32_is_not_blamed_on_operations(outcome, told):
    found = search(Evidence(["a", "b"], leaving=["a"]), lambda keep: outcome)
    assert found.keep == ()
    assert not found.irreducible
    assert found.outcome == outcome
    assert told in found.note
    assert "float32 itself" in found.note


@pytest.mark.parametrize("probes", [1, 2, 3, 5, 9, 15])
def test_a_spent_budget_leaves_the_smallest_set_seen_that_cures(probes):
    names = [f"op{i}" for i in range(100)]
    needed = frozenset({"op7", "op70"})
    seen = []

    def probe(keep):
        seen.append(keep)
        return Outcome(needed <= keep, float(len(needed & keep)))

    found = search(Evidence(names), probe, Effort(probes=probes))
    right = [keep for keep in seen if needed <= keep]
    assert found.probes == len(seen) == len(set(seen)) <= probes
    assert not found.irreducible
    assert f"the budget of {probes} probes is spent" in found.note
    assert len(found.keep) == min(map(len, right), default=0)
    assert ("a smaller set may do" in found.note) == bool(right)


def test_a_budget_in_seconds(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(qsim.analysis.search.time, "monotonic", lambda: next(clock))
    found = search(Evidence([f"op{i}" for i in range(100)]), lambda keep: Outcome("op50" in keep, 0.0), Effort(seconds=5))
    assert found.probes == 5
    assert "5 seconds" in found.note


@pytest.mark.parametrize("limits", [{"probes": 0}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_budgets_that_allow_nothing(limits):
    with pytest.raises(ValueError, match=r"QuantSim\.float_plan: got"):
        Effort(**limits)


def test_names_that_cannot_be_kept_are_in_no_island():
    evidence = Evidence(["a", "b"], {"a": ["b", "outside"], "outside": ["b"]}, ["a", "outside"])
    assert evidence.islands() == [["a", "b"]]
