"""A log of the numbers in a model while it runs or trains: for every module and step the range, the RMS, and what is not finite."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qsim.analysis.deviation import float_tensors
from qsim.analysis.numeric_log_file import LogWriter
from qsim.call_fit import tells_arguments
from qsim.graph.record.tape import version_of
from qsim.options import check_whole
from qsim.simulation.simulation import Simulation


@tells_arguments("qsim.numeric_log")
def numeric_log(model: nn.Module, path: str | PathLike[str], *, max_bytes: int = 64 << 20) -> NumericLogger:
    """Log the results of every module within ``with``: one record for each forward of `model`, in training too.

    Parameters
    ----------
    model : nn.Module
        A `QuantSim` too. Its forward is a step; what is called several times in one step has one entry. Modules that are called as
        functions of another, and operations that are no modules, are seen in the results of the module around them.
    path : path-like
        Replaced if it exists. Read it with `read_numeric_log`, at any time, also after a crash: each step is written when it ends.
    max_bytes : int
        What the log may take on disk. The older half of the steps is dropped when it is full; in which step each module met NaN or
        Inf first is kept.

    Returns
    -------
    NumericLogger
        A context manager.

    Notes
    -----
    Costs one read of each result for the range and the counts and one for the RMS; they stay on the device, and a step waits for it
    once. Not compiled: hooks break graphs.

    Examples
    --------
    >>> import tempfile
    >>> from qsim import read_numeric_log
    >>> model, path = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), f"{tempfile.mkdtemp()}/log"
    >>> with numeric_log(model, path):
    ...     for _ in range(3):
    ...         out = model(torch.ones(2, 4))
    >>> log = read_numeric_log(path)
    >>> log.layers, log.steps, log["1"].nonfinite
    (['0', '1', ''], [0, 1, 2], [0, 0, 0])
    """
    return NumericLogger(model, Path(path), max_bytes)


class NumericLogger:
    """Writes a log while it is entered; `numeric_log` makes one.

    Attributes
    ----------
    steps : int
        How many were written.
    """

    def __init__(self, model: nn.Module, path: Path, max_bytes: int) -> None:
        check_whole("numeric_log", "max_bytes", max_bytes, least=1 << 16)
        root = model.model if isinstance(model, Simulation) else model
        inner = {name: module for name, module in root.named_modules() if name and not isinstance(module, nn.Sequential)}
        self.steps = 0
        self._model, self._modules = model, {**inner, "": root}
        self._names = list(self._modules)
        self._file = LogWriter(path, self._names, max_bytes)
        self._tallies: dict[torch.device, _Tally] = {}
        self._depth = 0
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None  # the latest result: tensor, version, row
        self._same: dict[int, int] = {}  # rows of modules that returned what another one had made, and nothing else yet, as the other
        self._calls: Counter[int] = Counter()  # of this step, by row
        self._undo = ExitStack()

    def __enter__(self) -> NumericLogger:
        self._undo.enter_context(self._file)
        for row, module in enumerate(self._modules.values()):
            self._undo.callback(module.register_forward_hook(lambda _m, _a, out, row=row: self._note(row, out)).remove)
        self._undo.callback(self._model.register_forward_pre_hook(self._begin).remove)
        self._undo.callback(self._model.register_forward_hook(self._end, always_call=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _begin(self, *_: Any) -> None:
        self._depth += 1

    def _end(self, model: nn.Module, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._write(model.training)

    @torch.no_grad()
    def _note(self, row: int, out: Any) -> None:
        if self._depth == 0:  # called outside of the model's forward
            return
        with torch._C.DisableTorchFunction():  # the simulation follows the model's own calls
            if isinstance(out, Tensor) and self._last is not None and self._last[0]() is out and self._last[1] == version_of(out):
                other = self._last[2]
                if self._calls[row] == 0 and self._calls[other] == 1:  # what the other saw is this alone
                    self._calls[row], self._same[row] = 1, other
                    return
            for waiting in [each for each, other in self._same.items() if row in (each, other)]:
                other = self._same.pop(waiting)
                for tally in self._tallies.values():
                    tally.copy(other, waiting)
            self._calls[row] += 1
            for t in float_tensors(out):
                if t.layout is torch.strided and not t.is_meta:
                    if t.device not in self._tallies:
                        self._tallies[t.device] = _Tally(len(self._names), t.device)
                    self._tallies[t.device].add(row, t.detach())
            if isinstance(out, Tensor):
                self._last = weakref.ref(out), version_of(out), row

    def _write(self, training: bool) -> None:
        seen: dict[int, _Seen] = {}
        for tally in self._tallies.values():
            for row, there in tally.taken().items():
                seen[row] = seen[row].with_others(there) if row in seen else there
        for row, other in self._same.items():
            if other in seen:
                seen[row] = seen[other]
        self._last, self._same = None, {}
        self._calls.clear()
        self._file.add(self.steps, training, {row: there.numbers() for row, there in seen.items()})
        self.steps += 1


class _Seen(NamedTuple):
    """What was seen in a row: the sum of squares, and numbers of elements."""

    low: float
    high: float
    squares: float
    elements: float
    nans: float
    infinite: float

    def with_others(self, other: _Seen) -> _Seen:
        return _Seen(min(self.low, other.low), max(self.high, other.high), *(a + b for a, b in zip(self[2:], other[2:], strict=True)))

    def numbers(self) -> list[float]:
        """Lowest, highest, RMS, NaN and Inf."""
        rms = math.sqrt(self.squares / self.elements) if self.elements else math.nan
        return [self.low, self.high, rms, int(self.nans), int(self.infinite)]


class _Tally:
    """What was seen in this step on one device: it stays there until the step ends."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._low, self._high = torch.empty(rows, device=device), torch.empty(rows, device=device)
        self._counts = torch.empty(rows, 4, dtype=torch.int64, device=device)
        self._views = [each.unbind() for each in (self._low, self._high, self._counts)]
        self._norms: list[tuple[int, Tensor]] = []
        self._clear()

    def _clear(self) -> None:
        self._low.fill_(math.inf)
        self._high.fill_(-math.inf)
        self._counts.zero_()
        self._norms.clear()

    def add(self, row: int, t: Tensor) -> None:
        low, high, counts = (views[row] for views in self._views)
        torch.ops.qsim.observe_range_(t, low, high, counts, axis=None, block_size=None)
        kind = torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else t.dtype
        self._norms.append((row, torch.linalg.vector_norm(t, dtype=kind)))

    def copy(self, row: int, other: int) -> None:
        """Have another row, which saw nothing, have seen what this one did."""
        for views in self._views:
            views[other].copy_(views[row])
        self._norms += [(other, norm) for each, norm in self._norms if each == row]

    def taken(self) -> dict[int, _Seen]:
        """By row, of rows that saw something; waits for the device. Starts the next step."""
        if not self._norms:
            return {}
        norms = torch.stack([norm.double() for _, norm in self._norms])
        n = len(self._low)
        numbers = torch.cat([self._low.double(), self._high.double(), self._counts.double().flatten(), norms]).tolist()
        squares = [0.0] * n
        for (row, _), norm in zip(self._norms, numbers[6 * n :], strict=True):
            squares[row] += norm * norm
        found = {}
        for row in dict.fromkeys(row for row, _ in self._norms):
            elements, nans, positive, negative = numbers[2 * n + 4 * row : 2 * n + 4 * row + 4]
            found[row] = _Seen(numbers[row], numbers[n + row], squares[row], elements, nans, positive + negative)
        self._clear()
        return found
