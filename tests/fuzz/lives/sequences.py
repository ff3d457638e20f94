"""Sequences of steps: drawn from a seed, run, and made short where they fail."""

from __future__ import annotations

import random
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

import qsim

from ..programs.results import same_bits
from .life import CONFIGS, Life, Skip, born, run
from .oracles import ORACLES, settings_of, state_changed, state_of
from .steps import STEPS
from .subjects import SUBJECTS

_TOLD = (ValueError, TypeError, RuntimeError, OSError, qsim.NoEncodingError)


_COMPILED = 50  # one life of so many is compiled, which takes seconds a step


@dataclass(frozen=True)
class Sequence:
    """A simulation and what is done to it: names of steps, each with a seed of its own, so that one can be left out."""

    seed: int
    subject: str
    config: str
    steps: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        lines = [f"{self.subject!r}, {self.config!r}, seed {self.seed}:"]
        return "\n".join([*lines, *(f"    ({name!r}, {seed})," for name, seed in self.steps)])


@dataclass(frozen=True)
class Failure:
    """What is wrong after a step."""

    oracle: str
    step: int
    name: str
    detail: str

    @property
    def title(self) -> str:
        return f"{self.oracle} after {self.name!r}"


def draw(seed: int, length: int = 12) -> Sequence:
    """The sequence of a seed. Most simulations are calibrated first."""
    rng = random.Random(f"life {seed}")
    subject, config = rng.choice(list(SUBJECTS)), rng.choice(list(CONFIGS))
    if SUBJECTS[subject].is_stateful and config == "learned scales":
        config = "int8"  # its buffers get the graph of a call, through the scales, and torch goes back through no graph twice
    names, shares = list(STEPS), [step.share for step in STEPS.values()]
    chosen = rng.choices(names, shares, k=rng.randint(4, length))
    if rng.random() < 0.9:
        chosen.insert(0, "calibrate")
    return Sequence(seed, subject, config, tuple((name, rng.randrange(1 << 30)) for name in chosen))


def live(sequence: Sequence, counts: Counter[str] | None = None, only: str | None = None) -> Failure | None:
    """The first failure of a sequence; `counts`: of what was asked. `only`: ask one oracle, in every step."""
    folder = tempfile.mkdtemp(prefix="life")
    counts = Counter() if counts is None else counts
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            life = born(sequence.subject, sequence.config, sequence.seed, folder)
            life.compiles = sequence.seed % _COMPILED == 0
            for at, (name, seed) in enumerate(sequence.steps):
                found = _lived(life, name, seed, counts, only)
                if found is not None:
                    return Failure(found[0], at, name, found[1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        torch.set_grad_enabled(True)
    return None


def _lived(life: Life, name: str, seed: int, counts: Counter[str], only: str | None) -> tuple[str, str] | None:
    rng, step, before = random.Random(seed), STEPS[name], state_of(life.sim)
    settings, call = settings_of(life.sim), life.call(seed)
    results = run(life.sim, call) if life.is_calibrated else None
    torch.manual_seed(seed)
    refused = False
    try:
        step.do(life, rng)
        counts[f"step {name}"] += 1
    except Skip:
        return None
    except AssertionError as error:
        return "step", str(error)
    except Exception as error:
        if problem := _untold(error):
            return "error", problem
        refused = True
        counts[f"step {name}: {type(error).__name__}"] += 1
    if (step.pure or refused) and name not in ATOMIC_NOT:
        if problem := state_changed(before, state_of(life.sim)):
            return ("refused" if refused else "pure"), problem
        now = settings_of(life.sim)
        if now != settings:
            return ("refused" if refused else "pure"), f"settings of {[key for key in settings | now if settings.get(key) != now.get(key)]}"
        if results is not None and (problem := same_bits(run(life.sim, call), results)):
            return ("refused" if refused else "pure"), problem
    if step.keeps and (now := settings_of(life.sim)) != settings:
        return "keeps", f"settings of {[key for key in settings | now if settings.get(key) != now.get(key)]}"
    if step.parameters and (problem := state_changed(*(_of_model(state) for state in (before, state_of(life.sim))))):
        return "keeps", problem
    if not life.is_calibrated:
        return None
    return _asked(life, seed, counts, only)


def _of_model(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if not name.startswith("quantization.")}


def _asked(life: Life, seed: int, counts: Counter[str], only: str | None) -> tuple[str, str] | None:
    rng = random.Random(f"oracles {seed}")
    call = life.call(seed ^ 0x5A5A)
    for name, (oracle, share) in ORACLES.items():
        if rng.random() >= share and name != only:
            continue
        if only not in (None, name, "error", "pure", "refused", "step", "keeps"):
            continue
        try:
            problem = oracle(life, call)
            counts[f"oracle {name}"] += 1
        except Skip:
            continue
        except Exception as error:
            if not _untold(error):
                counts[f"oracle {name}: {type(error).__name__}"] += 1
                continue
            problem = _untold(error)
        if problem:
            return name, problem
    return None


# Documented to keep what was seen before an error, or steps of several calls.
ATOMIC_NOT = frozenset(
    {
        "calibrate",
        "calibrate on one batch",
        "calibrate by a forward that fails",
        "set_method",
        "observe and choose",
        "optimizer steps",
        "a schedule",
        "averaged weights",
        "encodings through AIMET's file",
        "weights' encodings from their values",
        "an earlier state",
        "another dtype",
    }
)


def _untold(error: Exception) -> str:
    """What an error lacks that should say what was got, expected, and what to do; "" for one that does."""
    text = str(error)
    if isinstance(error, _TOLD) and ("QuantSim" in text or "qsim" in text or "; expected " in text or isinstance(error, FileNotFoundError)):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-6:]]
    return f"{type(error).__name__}: {text[:300]} at {' > '.join(places)}"


def shrink(sequence: Sequence, failure: Failure) -> Sequence:
    """A shorter sequence that fails in the same way."""
    found = Sequence(sequence.seed, sequence.subject, sequence.config, sequence.steps[: failure.step + 1])
    at = len(found.steps) - 1
    while at >= 0:
        shorter = Sequence(found.seed, found.subject, found.config, found.steps[:at] + found.steps[at + 1 :])
        again = live(shorter, only=failure.oracle)
        if again is not None and again.oracle == failure.oracle:
            found = Sequence(shorter.seed, shorter.subject, shorter.config, shorter.steps[: again.step + 1])
            at = min(at, len(found.steps))
        at -= 1
    return found
