"""Seconds by stage, against a clock that the test turns."""

import pytest

from qsim.stages import Stages, seconds_text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("qsim.stages.time", clock)
    return clock


def test_stages_add_up_and_keep_their_order(clock):
    stages = Stages("trace")
    for _ in range(2):
        with stages.stage("write"):
            clock.now += 1
        clock.now += 10  # of no stage
    assert stages == {"trace": 0.0, "write": 2.0}
    assert list(stages) == ["trace", "write"]


def test_a_moment_counts_for_the_innermost_stage_alone(clock):
    stages = Stages()
    with stages.stage("forward"):
        clock.now += 1
        with stages.stage("observing"):
            clock.now += 2
        clock.now += 4
    assert stages == {"forward": 5.0, "observing": 2.0}


def test_a_stage_that_was_begun_and_broken_off_ends_with_the_one_around_it(clock):
    stages = Stages()

    def work() -> None:
        stages.begin("inner")
        clock.now += 1
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), stages.stage("outer"):
        work()
    with stages.stage("next"):
        clock.now += 2
    assert stages == {"outer": 0.0, "inner": 1.0, "next": 2.0}


def test_text():
    assert seconds_text({"trace": 0.126, "write": 12}) == "trace 0.13 s, write 12.00 s"
    stages = Stages("verify")
    assert str(stages) == "verify 0.00 s"
