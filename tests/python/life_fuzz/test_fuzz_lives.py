"""Some sequences of public calls in each run, by the oracles of `tests/fuzz/lives`; `python -m tests.fuzz.lives` draws others."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fuzz.lives.__main__ import report
from tests.fuzz.lives.sequences import draw, live

FIRST, LIVES, LENGTH, PARTS = 1, 12, 8, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_lives(part):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    count = LIVES // PARTS
    seeds = range(FIRST + part * count, FIRST + (part + 1) * count)
    print(f"seeds {seeds.start} to {seeds.stop - 1}")
    try:
        for seed in seeds:
            sequence = draw(seed, LENGTH)
            failure = live(sequence)
            if failure is not None:
                pytest.fail(report(sequence, failure, small=True), pytrace=False)
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()
