"""Lives many lives: ``python -m tests.fuzz.lives --seed 1 --count 1000``."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter

import torch

from .sequences import Failure, Sequence, draw, live, shrink

_SHOWN = 3  # of each kind of failure, made short


def report(sequence: Sequence, failure: Failure, *, small: bool) -> str:
    """A failure with the calls that lead to it."""
    shown = shrink(sequence, failure) if small else sequence
    again = live(shown, only=failure.oracle) if small else None
    lines = [f"seed {sequence.seed}, {failure.title}: {failure.detail}", *([f"  short: {again.title}: {again.detail}"] if again else [])]
    return "\n".join([*lines, str(shown), f"replay: PYTHONPATH=python python -m tests.fuzz.lives --seed {sequence.seed} --count 1"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.lives", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="sequences")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--seed", type=int, default=None, help="of the first one; a random one by default, which is printed")
    parser.add_argument("--length", type=int, default=12, help="of a sequence, at most")
    parser.add_argument("--as-it-is", action="store_true", help="do not look for shorter sequences")
    options = parser.parse_args()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    torch.set_num_threads(1)
    print(f"sequences from {seed}", flush=True)
    began, titles, counts, done = time.monotonic(), Counter[str](), Counter[str](), 0
    for each in range(seed, seed + options.count):
        if time.monotonic() - began > options.seconds:
            break
        sequence = draw(each, options.length)
        failure = live(sequence, counts)
        done += 1
        if failure is None:
            continue
        titles[failure.title] += 1
        small = not options.as_it_is and titles[failure.title] <= _SHOWN
        print(f"\n{report(sequence, failure, small=small)}", flush=True)
    print(f"\n{done} sequences in {time.monotonic() - began:.0f} s; {sum(titles.values())} failures")
    for title, count in titles.most_common():
        print(f"{count:6}  {title}")
    print("what ran:")
    for name, count in sorted(counts.items()):
        print(f"{count:6}  {name}")
    return 1 if titles else 0


if __name__ == "__main__":
    sys.exit(main())
