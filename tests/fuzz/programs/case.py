"""A program with its float model, and simulations of it: what every oracle starts from."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

import qsim

from .decisions import decisions_of, going
from .ir import Apply, Program, Test, all_statements
from .loaded import Call, Loaded
from .results import tensors_of
from .running import MODES, Outcome, lines_run, quietly, run, same_state


class Undecided(Exception):
    """An oracle has nothing to say of a program."""


@dataclass(frozen=True)
class Failure:
    """What an oracle found: `detail` has the numbers."""

    oracle: str
    call: str
    detail: str

    @property
    def title(self) -> str:
        """Failures of one class have one title."""
        return f"{self.oracle}: {self.call}"


class Raised(Exception):
    """qsim raised where the float model does not."""

    def __init__(self, where: str, error: BaseException) -> None:
        last = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in last if "qsim" in frame.filename]
        at = f" in {inside[-1].filename.rpartition('/')[2]}:{inside[-1].name}" if inside else ""
        super().__init__(f"{where}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}{at}")
        self.error = error


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _float_model(loaded: Loaded, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = loaded.model(dtype)
    loaded.hook(model)
    return model


def _kind_of(error: Exception) -> str:
    """What an error is about: writes in place, which raise where they are made or in the backward pass; or the beginning of its text."""
    text = str(error)
    return "in place" if re.search("in-?place", text) else re.split("[:0-9]", text)[0]


def _outcome_in_float(
    loaded: Loaded,
    call: Call,
    mode: str,
    dtype: torch.dtype = torch.float32,
    under: contextlib.AbstractContextManager[Any] | None = None,
) -> Outcome | Exception:
    model = _float_model(loaded, dtype)
    try:
        with quietly(), under or contextlib.nullcontext():
            return run(model, loaded, call, mode, dtype)
    except Exception as error:
        return error


def in_float(sim: qsim.QuantSim) -> contextlib.AbstractContextManager[None]:
    """Simulation off: `QuantSim.in_float`, which was called `float`."""
    off: Callable[[], contextlib.AbstractContextManager[None]] = getattr(sim, "in_float", None) or sim.float
    return off()


class Case:
    """Parameters
    ----------
    program : Program
    loaded : Loaded
    """

    def __init__(self, program: Program, loaded: Loaded) -> None:
        self.program, self.loaded = program, loaded
        self._outcomes: dict[tuple[str, str, torch.dtype], Outcome | Exception] = {}
        self._told: list[str] = []  # by reports of calibration

    @cached_property
    def calls(self) -> list[Call]:
        """Those that the float model can run. Recorded are those that take the example's path, if data decide for it."""
        found = [call for call in self.loaded.calls() if isinstance(self.float_outcome(call, "no_grad"), Outcome)]
        if not any(test.kind == "data" for s in all_statements(self.program) if isinstance(test := getattr(s, "test", None), Test)):
            return found
        ways = [lines_run(self.float_model(), self.loaded, call) for call in found]
        return [dataclasses.replace(call, recorded=call.recorded and way == ways[0]) for call, way in zip(found, ways, strict=True)]

    def float_model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with all its hooks."""
        return _float_model(self.loaded, dtype)

    def float_outcome(self, call: Call, mode: str, dtype: torch.dtype = torch.float32) -> Outcome | Exception:
        """What the float model gives, or raises."""
        key = (call.name, mode, dtype)
        if key not in self._outcomes:
            self._outcomes[key] = _outcome_in_float(self.loaded, call, mode, dtype)
        return self._outcomes[key]

    def recomputed_outcome(self, call: Call, mode: str) -> Outcome | Exception:
        """What the float model gives, or raises, if each of its checkpoints keeps something to compute again, as quantizers there do."""
        return _outcome_in_float(self.loaded, call, mode, under=self.loaded.recomputing())

    def opened_outcome(self, call: Call, mode: str) -> Outcome | Exception:
        """What the float model gives, or raises, without torch's fast path of attention: that is one operation, with none to quantize."""
        return _outcome_in_float(self.loaded, call, mode, under=_without_fast_path())

    def modes(self, call: Call, *, train: bool = True) -> list[str]:
        """The modes in which the float model can run a call."""
        found = [mode for mode in MODES if isinstance(self.float_outcome(call, mode), Outcome)]
        return found if train else [mode for mode in found if mode != "train"]

    def check(self) -> None:
        """Raises Undecided if the float model cannot run its example."""
        example = self.loaded.calls()[0]
        outcome = self.float_outcome(example, "no_grad")
        if isinstance(outcome, Exception):
            raise Undecided(f"the float model raises {type(outcome).__name__}: {outcome}")
        if not all(bool(t.isfinite().all()) and float(t.abs().max()) < 1e8 for t in outcome.results if t.numel()):
            raise Undecided("the float model's results are not finite, or huge")

    def simulation(
        self, config: qsim.Config, dtype: torch.dtype = torch.float32, *, calibrated: bool = True, data: list[Call] | None = None
    ) -> qsim.QuantSim:
        """A calibrated simulation of the model. `data`: on these calls; by default on the recorded ones."""
        model = self.loaded.model(dtype)
        with quietly(), _raising("QuantSim"):
            sim = qsim.QuantSim(model, self.loaded.example(dtype), config)
        self.loaded.hook(sim.model)
        if calibrated:
            data = data or [call for call in self.calls if call.recorded][:2]
            with quietly(), self._perhaps_empty(), _raising("calibrate"):
                report = sim.calibrate(data, forward=lambda m, call: _forward(m, self.loaded, call, dtype), progress=False)
            self._told += report.problems
        return sim

    @contextlib.contextmanager
    def _perhaps_empty(self) -> Iterator[None]:
        """Nothing is to be said of a range that no batch gave where rows are chosen by their values: there may be none."""
        try:
            yield
        except Raised as raised:
            if isinstance(raised.error, qsim.CalibrationError) and any(
                isinstance(s, Apply) and s.operation == "chosen rows" for s in all_statements(self.program)
            ):
                raise Undecided("rows are chosen by their values, and there were none") from raised
            raise

    def run(self, sim: nn.Module, call: Call, mode: str, dtype: torch.dtype = torch.float32, *, of: qsim.QuantSim | None = None) -> Outcome:
        """A call of a simulation; gradients by the names of the float model."""
        owner = (of or sim).model if isinstance(of or sim, qsim.QuantSim) else of or sim
        with quietly() as noted, same_state(owner):
            try:
                outcome = run(sim, self.loaded, call, mode, dtype, of=owner)
            except Exception as error:
                if self._raises_on_the_way_of(of or sim, error, call, mode, dtype):
                    raise Undecided(f"the float model raises {type(error).__name__} on the way that quantized data decide for") from error
                if re.search("modified by an inplace operation|none of output has requires_grad", str(error)) and _learns_scales(of or sim):
                    raise Undecided("learned scales need gradients, where the float model needs none") from error
                if "runs under a checkpoint changes a tensor in place" in str(error):
                    raise Undecided("what a checkpoint keeps is written to, and the float model keeps nothing behind that") from error
                if isinstance(error, RuntimeError) and isinstance(self.recomputed_outcome(call, mode), RuntimeError):
                    raise Undecided("what a checkpoint took is written to, and the float model computes nothing again") from error
                if isinstance(error, RuntimeError) and str(self.opened_outcome(call, mode)) == str(error):
                    raise Undecided("the float model raises the same without torch's fast path of attention") from error
                if isinstance(error, qsim.NoEncodingError) and self.was_told(error, "met empty tensors alone"):
                    raise Undecided("values where calibration met empty tensors alone, as its report says") from error
                raise Raised(f"{call.name}, {mode}", error) from error
        self.warned = [str(w.message) for w in noted if issubclass(w.category, UserWarning)]
        return outcome

    def _raises_on_the_way_of(self, sim: nn.Module, error: Exception, call: Call, mode: str, dtype: torch.dtype) -> bool:
        """Whether the float model raises as a simulation does where its branches go as the simulation's."""
        owner = sim.model if isinstance(sim, qsim.QuantSim) else sim
        with same_state(owner):
            decisions = decisions_of(lambda: run(sim, self.loaded, call, mode, dtype, of=owner), self.loaded)
        # In training, scales that are learned make inputs need gradients.
        for way in (mode, *["train inputs"] * (mode == "train")):
            with going(self.loaded, decisions) as program:
                raised = _outcome_in_float(program, call, way, dtype)
            if type(raised) is type(error) and _kind_of(raised) == _kind_of(error):
                return True
        return False

    def was_told(self, error: qsim.NoEncodingError, what: str) -> bool:
        """Whether a report of calibration said of one of the quantizers that an error names what a pattern says."""
        named = re.findall(r"'.*?'", str(error))
        return any(re.match(f"(qsim: )?{re.escape(name)} {what}", told) for told in self._told for name in named)


def _learns_scales(sim: nn.Module) -> bool:
    return isinstance(sim, qsim.QuantSim) and any(quantizer.spec.learnable for quantizer in sim.quantizers().values())


def _forward(model: nn.Module, loaded: Loaded, call: Call, dtype: torch.dtype) -> Any:
    args, kwargs = loaded.arguments(call, dtype)
    return tensors_of(model(*args, **kwargs))  # a generator runs while it is asked


@contextlib.contextmanager
def _raising(where: str):
    try:
        yield
    except Exception as error:
        raise Raised(where, error) from error


def kept_batch_norms(config: qsim.Config) -> qsim.Config:
    return dataclasses.replace(config, batch_norm="keep")
