"""200 programs in each run, by the oracles of `tests/fuzz/programs`. `QSIM_FUZZ_SEED=...` for others; `make fuzz` draws 20,000 new ones."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fuzz.programs.__main__ import report
from tests.fuzz.programs.examine import examine_seed

PROGRAMS, PARTS = 200, 8


@pytest.mark.parametrize("part", range(PARTS))
def test_programs(part, record_property):
    base = int(os.environ.get("QSIM_FUZZ_SEED", "1"))
    record_property("seed", base)
    print(f"QSIM_FUZZ_SEED={base}")
    count = PROGRAMS // PARTS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in range(base + part * count, base + (part + 1) * count):
            for failure in examine_seed(seed).failures:
                pytest.fail(f"QSIM_FUZZ_SEED={base}\n{report(seed, failure, small=True)}", pytrace=False)
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()
