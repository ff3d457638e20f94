"""Random calls of every operator: an error that changed nothing, or what the same call gives on contiguous tensors. `make fuzz` runs
a million of them under AddressSanitizer."""

import os
import time

import pytest
import torch

from operator_fuzz.calls import OPERATORS, many_calls
from operator_fuzz.outcome import SUMS

SECONDS = 10


def test_random_calls_are_right_or_an_error():
    seed = int(os.environ.get("QSIM_FUZZ_SEED", time.time_ns() % 10**9))
    print(f"seed {seed}: QSIM_FUZZ_SEED={seed} repeats it")
    ended = many_calls(seed, seconds=SECONDS)
    right = {operator for operator, how in ended if how == "equal"}
    assert right == {str(operator) for operator in OPERATORS} or ended.total() < 2000, "some operator was never called rightly"


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_layout_tags_hold(operator):
    """What the random calls compare exactly, across layouts, may be given any layout by Inductor."""
    layouts = {torch.Tag.flexible_layout, torch.Tag.needs_exact_strides}
    name = operator._schema.name.removeprefix("qsim::")
    holds_memory_order = name in SUMS or "mask" in name or name.startswith("observe_")
    assert layouts & set(operator.tags) == {torch.Tag.needs_exact_strides if holds_memory_order else torch.Tag.flexible_layout}
