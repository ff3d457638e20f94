"""The guards of `tests/fuzz/programs/guards.py` can be taken out, and a program of the fuzzer fails then."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fuzz.programs.guards import GUARDS
from tests.fuzz.programs.oracles import ORACLES
from tests.fuzz.programs.without import RECORDED, TESTED, failure_without, program_of


def test_guards_are_put_back():
    for name, guard in GUARDS.items():
        before = [getattr(owner, attribute) for owner, attribute, _ in guard.changes]
        with guard.out():
            within = [getattr(owner, attribute) for owner, attribute, _ in guard.changes]
        assert all(a is not b for a, b in zip(within, before, strict=True)), name
        after = [getattr(owner, attribute) for owner, attribute, _ in guard.changes]
        assert after == before, name


def test_what_is_recorded_is_of_guards_and_oracles():
    assert RECORDED.keys() | TESTED.keys() <= GUARDS.keys()
    assert not RECORDED.keys() & TESTED.keys()
    files = {file.name: file for file in Path(__file__).parents[1].rglob("test_*.py")}
    for test in TESTED.values():
        file, name = test.split("::")
        assert f"def {name}(" in files[file].read_text()
    assert all(oracle in GUARDS[guard].oracles and oracle in ORACLES for guard, (_, oracle) in RECORDED.items())


@pytest.mark.parametrize("guard", ["layers never called", "paths", "put back"])  # ``python -m tests.fuzz.programs.without`` shows all
def test_a_program_fails_without_a_guard(guard):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seed, oracle = RECORDED[guard]
        failure = failure_without(guard, program_of(seed), (oracle,))
    finally:
        torch.set_num_threads(threads)
    assert failure is not None
    assert failure.oracle == oracle
