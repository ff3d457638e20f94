"""Looks at many programs: ``python -m tests.fuzz.programs --count 20000 --seed 1``."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from .case import Failure
from .examine import Found, examine, look
from .generate import generate
from .loaded import use_device
from .oracles import ORACLES
from .shrink import shrink
from .source import source

_SHOWN = 3  # of each class of failures, with a small program
_PAUSE = 30.0  # seconds between two lines that say how far it is


def _looked(options: argparse.Namespace) -> Iterator[Found]:
    jobs = [(seed, tuple(options.oracle or ())) for seed in range(options.seed, options.seed + options.count)]
    if options.jobs == 1:
        yield from map(look, jobs)
        return
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), use_device, (options.device,)) as pool:
        yield from pool.map(look, jobs, chunksize=8)


def report(seed: int, failure: Failure, *, small: bool, device: str = "cpu") -> str:
    """A failure with its numbers and a program that has it; a `small` one takes a while to find."""
    program = shrink(generate(seed), failure.oracle) if small else generate(seed)
    lines = [f"seed {seed}, oracle {failure.oracle!r}: {failure.call}", f"  {failure.detail}"]
    if small:
        again = examine(program, [failure.oracle]).failures
        lines += [f"  small: {found.detail}" for found in again]
    replay = f"replay: PYTHONPATH=python python -m tests.fuzz.programs --seed {seed} --count 1 --oracle {failure.oracle!r}"
    if device != "cpu":
        replay += f" --device {device}"
    return "\n".join([*lines, source(program), replay])


def _told(found: Iterator[Found], count: int) -> Iterator[Found]:
    """What is found, with a word on stderr now and then: a run may take hours."""
    began = said = time.monotonic()
    failures = 0
    for done, each in enumerate(found, 1):
        failures += len(each[1])
        yield each
        if (now := time.monotonic()) - said >= _PAUSE:
            rate = done / (now - began)
            left = (count - done) / rate / 60
            print(f"{done} of {count} programs, {failures} failures; {rate:.1f} a second, {left:.0f} min left", file=sys.stderr, flush=True)
            said = now


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.programs", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="programs to look at")
    parser.add_argument("--seed", type=int, default=None, help="of the first program; a random one by default, which is printed")
    parser.add_argument("--oracle", action="append", choices=list(ORACLES), help="ask this one only; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--device", default="cpu", help="where models run: cpu or cuda")
    parser.add_argument("--show", action="store_true", help="print the program itself, failing or not")
    parser.add_argument("--as-it-is", action="store_true", help="do not look for smaller programs")
    options = parser.parse_args()
    use_device(options.device)
    options.seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(f"programs {options.seed} to {options.seed + options.count - 1}", flush=True)
    if options.show:
        print(source(generate(options.seed)))
    began, titles, reasons = time.monotonic(), Counter[str](), Counter[str]()
    for seed, failures, undecided in _told(_looked(options), options.count):
        reasons.update(f"{name}: {reason[:80]}" for name, reason in undecided.items())
        for failure in failures:
            titles[failure.title] += 1
            if titles[failure.title] <= _SHOWN:
                print(f"\n{report(seed, failure, small=not options.as_it_is, device=options.device)}", flush=True)
            else:
                print(f"\nseed {seed}, oracle {failure.oracle!r}: {failure.call}: {failure.detail}", flush=True)
    seconds = time.monotonic() - began
    print(f"\n{options.count} programs in {seconds:.0f} s ({options.count / seconds:.1f} a second); {sum(titles.values())} failures")
    for title, count in titles.most_common():
        print(f"{count:6}  {title}")
    print("nothing was said of:")
    for reason, count in reasons.most_common(25):
        print(f"{count:6}  {reason}")
    return 1 if titles else 0


if __name__ == "__main__":
    sys.exit(main())
