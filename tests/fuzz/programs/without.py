"""The fuzzer without its guards, one by one: ``python -m tests.fuzz.programs.without`` shows for each a program that needs it.

``--search`` looks for the first ones from ``--seed`` on, for all guards or those that are named.
"""

from __future__ import annotations

import argparse
import sys

import torch

from .case import Failure
from .examine import examine
from .generate import generate
from .guards import GUARDS
from .ir import Program

# guard -> the seed of a program that fails without it, and the oracle that sees that
RECORDED: dict[str, tuple[int, str]] = {}


def failure_without(guard: str, program: Program, oracles: tuple[str, ...]) -> Failure | None:
    """The first failure of a program without a guard that it has not with it."""
    with GUARDS[guard].out():
        failures = examine(program, oracles).failures
    return next((found for found in failures if not examine(program, [found.oracle]).failures), None)


def search(guard: str, seeds: range) -> tuple[int, Failure] | None:
    """The first seed whose program needs a guard, with what fails without it."""
    wanted, oracles = GUARDS[guard].wants, GUARDS[guard].oracles
    for seed in seeds:
        program = generate(seed)
        if wanted in repr(program) and (failure := failure_without(guard, program, oracles)) is not None:
            return seed, failure
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.programs.without", description=__doc__)
    parser.add_argument("guards", nargs="*", help="; ".join(GUARDS))
    parser.add_argument("--search", action="store_true", help="look for seeds instead of showing those that are recorded")
    parser.add_argument("--seed", type=int, default=1, help="the first to look at")
    parser.add_argument("--count", type=int, default=2000, help="how many to look at for each guard")
    options = parser.parse_args()
    torch.set_num_threads(1)
    missing = 0
    print("| guard | what it asks | seed | oracle | what that sees without it |\n|---|---|---|---|---|")
    for guard in options.guards or list(GUARDS):
        if options.search:
            found = search(guard, range(options.seed, options.seed + options.count))
        else:
            seed, oracle = RECORDED[guard]
            failure = failure_without(guard, generate(seed), (oracle,))
            found = failure and (seed, failure)
        missing += found is None
        row = ("-", "-", "nothing") if found is None else (str(found[0]), found[1].oracle, f"{found[1].call}: {found[1].detail}")
        print(f"| {guard} | {GUARDS[guard].premise} | {' | '.join(row)} |", flush=True)
    return missing


if __name__ == "__main__":
    sys.exit(main())
