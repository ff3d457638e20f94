"""python -m operator_fuzz [--calls N] [--seed N] [--only INDEX] [--trace FILE], with tests/python on PYTHONPATH."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from operator_fuzz.calls import OPERATORS, many_calls, one_call

parser = argparse.ArgumentParser(prog="python -m operator_fuzz")
parser.add_argument("--calls", type=int, default=10_000)
parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
parser.add_argument("--only", type=int, help="the call with this index alone")
parser.add_argument("--trace", type=Path, help="a file that holds the index of the call that is running")
parser.add_argument("--errors", action="store_true", help="print the messages of errors, by number")
given = parser.parse_args()

if given.only is not None:
    print(*one_call(given.seed, given.only))
else:
    print(f"seed {given.seed}", flush=True)
    ended = many_calls(given.seed, calls=given.calls, trace=given.trace)
    for operator in OPERATORS:
        counts = {how: count for (name, how), count in ended.items() if name == str(operator)}
        right = sum(count for how, count in counts.items() if how in ("equal", "meta"))
        print(f"{operator!s:50} {sum(counts.values()):8d} calls, {right:8d} right, the rest errors")
    if given.errors:
        for (name, how), count in ended.most_common():
            print(f"{count:8d} {name}: {how.splitlines()[0][:200]}")
