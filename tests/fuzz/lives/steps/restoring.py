"""Steps that win accuracy back."""

from __future__ import annotations

import random

from ..life import Life, Skip
from . import step


@step("restore", share=0.4, keeps=True)
def _restore(life: Life, rng: random.Random) -> None:
    life.sim.restore(life.batches(rng, 4), progress=False, steps=rng.choice([0, 2]))


@step("solve_weights", share=0.4, keeps=True)
def _solve(life: Life, rng: random.Random) -> None:
    life.sim.solve_weights(life.batches(rng, 4), rng.choice(["gptq", "gpfq", "nearest"]), progress=False)


@step("learn_rounding", share=0.3, keeps=True)
def _learn(life: Life, rng: random.Random) -> None:
    life.sim.learn_rounding(life.batches(rng, 4), steps=5, progress=False)


@step("correct_biases", share=0.5, keeps=True)
def _biases(life: Life, rng: random.Random) -> None:
    life.sim.correct_biases(life.batches(rng, 4), progress=False)


@step("search_weight_ranges", share=0.5, keeps=True)
def _ranges(life: Life, rng: random.Random) -> None:
    life.sim.search_weight_ranges(life.batches(rng, 4), progress=False)


@step("distill", share=0.5, keeps=True)
def _distill(life: Life, rng: random.Random) -> None:
    life.sim.distill(life.batches(rng, 4), 3, progress=False)


@step("restore with a batch that does not fit", share=0.3, keeps=True)
def _unfit(life: Life, rng: random.Random) -> None:
    batches = life.batches(rng, 3)
    first = batches[0]
    if isinstance(first, dict):
        raise Skip
    tensor = first[0] if isinstance(first, tuple) else first
    if not tensor.is_floating_point():
        raise Skip
    batches.append(tensor[..., :-1])
    life.sim.restore(batches, progress=False)
