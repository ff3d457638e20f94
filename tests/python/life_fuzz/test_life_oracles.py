"""The oracles find defects that are put in, and the sequence that has one is made short."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fuzz.lives.sequences import Sequence, live, shrink

from qsim.deploy import bake
from qsim.graph.execute.shortcuts import Kept

STEPS = (("calibrate", 1), ("summary", 2), ("copy_ into a parameter", 5), ("bake", 3), ("summary", 4))
LIFE = Sequence(1, "remembering", "int8", STEPS)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_of_these_calls_none_fails():
    assert live(LIFE) is None


def test_a_weight_that_is_kept_too_long(monkeypatch):
    called = Kept.__call__

    def never_anew(self, value):
        if not hasattr(self, "first") or torch.is_grad_enabled():
            self.first = called(self, value)
        return self.first

    monkeypatch.setattr(Kept, "__call__", never_anew)
    failure = live(LIFE)
    assert failure is not None
    assert failure.oracle == "savings"
    assert len(shrink(LIFE, failure).steps) <= 2


def test_a_report_that_leaves_a_trace(monkeypatch):
    before = bake.bake

    def writes(sim):
        sim.model.seen.add_(1.0)
        return before(sim)

    monkeypatch.setattr(bake, "bake", writes)
    failure = live(LIFE)
    assert failure is not None
    assert (failure.oracle, failure.name) == ("pure", "bake")
    assert [name for name, _ in shrink(LIFE, failure).steps] == ["calibrate", "bake"]
