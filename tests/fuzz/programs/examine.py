"""Looks at a program with oracles, and says what they found."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .case import Case, Failure, Raised, Undecided
from .generate import generate
from .ir import Program
from .loaded import loaded
from .oracles import ORACLES

Found = tuple[int, list[Failure], dict[str, str]]  # by a seed: what failed, and of what nothing was said


@dataclass(frozen=True)
class Verdict:
    """Of one program: what failed, and why oracles that were asked had nothing to say."""

    program: Program
    failures: tuple[Failure, ...]
    undecided: dict[str, str]
    asked: tuple[str, ...]


def oracles_of(seed: int) -> list[str]:
    """The oracles that look at a seed's program: the cheap ones always, the slow ones at some."""
    rng = random.Random(f"oracles {seed}")
    return [name for name, (_, share) in ORACLES.items() if rng.random() < share]


def examine(program: Program, oracles: Iterable[str]) -> Verdict:
    """Ask oracles by name."""
    failures, undecided, asked = [], {}, []
    with loaded(program) as found:
        case = Case(program, found)
        try:
            case.check()
        except Undecided as reason:
            return Verdict(program, (), {"all": str(reason)}, ())
        for name in oracles:
            asked.append(name)
            torch.manual_seed(program.seed)
            try:
                failure = ORACLES[name][0](case)
            except Undecided as reason:
                undecided[name], failure = str(reason), None
            except Raised as raised:
                failure = Failure(name, f"raises {type(raised.error).__name__}", str(raised))
            if failure is not None:
                failures.append(failure)
    return Verdict(program, tuple(failures), undecided, tuple(asked))


def examine_seed(seed: int) -> Verdict:
    """The verdict on a seed: the same whenever it is asked for."""
    return examine(generate(seed), oracles_of(seed))


def look(job: tuple[int, tuple[str, ...]]) -> Found:
    """What processes run: on a seed, the oracles to choose from (one is asked in any case; none: all)."""
    seed, oracles = job
    torch.set_num_threads(1)
    asked = list(oracles) if len(oracles) == 1 else [name for name in oracles_of(seed) if not oracles or name in oracles]
    verdict = examine(generate(seed), asked)
    return seed, list(verdict.failures), verdict.undecided
