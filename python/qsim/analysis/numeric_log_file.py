"""The file of `qsim.numeric_log`: how it is written and read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from qsim.call_fit import tells_arguments
from qsim.loggers.figures import Figures
from qsim.loggers.sinks import writer_of
from qsim.pages.chart import Axis, Chart, Series
from qsim.pages.curves import Curves
from qsim.pages.markup import Cell, Column, Line, count_cell, name_cell, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.table import text_table

_COLUMNS = 100_000  # of the curves of all modules on one page
_FORMAT = "qsim-numeric-log-1"


def _older_half(path: Path) -> Path:
    """The file beside a log that the older half of its steps is moved to when it is full."""
    return path.with_name(f"{path.name}.older")


class LogWriter:
    """Writes JSON lines: a header first, and one for each step.

    Parameters
    ----------
    path : Path
    names : list of str
        Modules; records name them by their place in this list.
    max_bytes : int
    """

    def __init__(self, path: Path, names: list[str], max_bytes: int) -> None:
        self._path, self._names, self._limit = path, names, max_bytes
        self._first: dict[str, int] = {}  # in which step each module met NaN or Inf first
        self._undo = ExitStack()

    def __enter__(self) -> LogWriter:
        _older_half(self._path).unlink(missing_ok=True)
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _open(self) -> None:
        self._file = self._undo.enter_context(self._path.open("w", encoding="utf-8"))
        self._size = 0
        self._line({"format": _FORMAT, "layers": self._names, "first_nonfinite": self._first})

    def _line(self, fields: dict[str, Any]) -> None:
        text = json.dumps(fields, separators=(",", ":")) + "\n"
        self._file.write(text)
        self._file.flush()
        self._size += len(text)

    def add(self, step: int, training: bool, rows: dict[int, list[float]]) -> None:
        for row, (*_, nans, infs) in rows.items():
            if nans or infs:
                self._first.setdefault(self._names[row], step)
        if self._size > self._limit // 2:
            self._undo.close()
            os.replace(self._path, _older_half(self._path))
            self._open()
        self._line({"step": step, "training": training, "rows": {row: list(map(_short, values)) for row, values in rows.items()}})


def _short(value: float) -> float | int | None:
    """Six digits, as many as a float32 is worth reading; JSON has neither NaN nor Inf."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass
class LayerLog:
    """The results of one module, step by step.

    Attributes
    ----------
    steps : list of int
        Those in which it was called.
    min, max : list of float
        Ends of the range of the finite elements; NaN where there were none.
    rms : list of float
        Root of the mean square; NaN in steps with NaN or Inf.
    nans, infs : list of int
    """

    steps: list[int] = field(default_factory=list)
    min: list[float] = field(default_factory=list)
    max: list[float] = field(default_factory=list)
    rms: list[float] = field(default_factory=list)
    nans: list[int] = field(default_factory=list)
    infs: list[int] = field(default_factory=list)

    @property
    def nonfinite(self) -> list[int]:
        """NaN and Inf together."""
        return [n + i for n, i in zip(self.nans, self.infs, strict=True)]


@dataclass(frozen=True)
class NumericLog(Report):
    """What `read_numeric_log` returns: ``log["layer1.0.conv1"].max``; ``print`` shows a line for each module, ``save`` writes a page.

    Attributes
    ----------
    layers : list of str
        Modules that were called, in the order of the model; "" is the model itself.
    steps : list of int
        Those that are in the log.
    training : list of bool
        Whether the model was in training mode, by step.
    first_nonfinite : dict of str to int
        In which step a module met NaN or Inf first, also where the log does not reach back so far; in the order in which they did.

    Examples
    --------
    >>> import tempfile
    >>> model, path = torch.nn.Sequential(torch.nn.Linear(4, 2)), tempfile.mktemp(".bin")
    >>> with qsim.numeric_log(model, path):
    ...     _ = model(torch.ones(1, 4)), model(torch.full((1, 4), torch.nan))
    >>> log = qsim.read_numeric_log(path)
    >>> log.layers, log.steps, log.first_nonfinite["0"]
    (['0', ''], [0, 1], 1)
    >>> log.save(tempfile.mktemp(".html"))
    """

    layers: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    training: list[bool] = field(default_factory=list)
    first_nonfinite: dict[str, int] = field(default_factory=dict)
    _of: dict[str, LayerLog] = field(default_factory=dict, repr=False)

    def __getitem__(self, layer: str) -> LayerLog:
        return self._of[layer]

    def log(self, to: Any, step: int = 0) -> None:
        """Write every step to a logger: range, RMS, NaN and Inf of each module.

        Parameters
        ----------
        to : object
            As `qsim.Summary.log` takes loggers.
        step : int
            What the log's first step is counted from.

        Examples
        --------
        >>> class Names:
        ...     def log(self, figures, step):
        ...         print(step, list(figures))
        >>> NumericLog(["fc"], [0], [True], {}, {"fc": LayerLog([0], [-1.0], [1.0], [0.5], [0], [0])}).log(Names())
        0 ['min/fc', 'max/fc', 'rms/fc', 'nans/fc', 'infs/fc']
        """
        write = writer_of(to, "NumericLog.log")
        places = {name: {step: i for i, step in enumerate(self._of[name].steps)} for name in self.layers}
        for each in self.steps:
            found: dict[str, float] = {}
            for name in self.layers:
                if (i := places[name].get(each)) is not None:
                    columns = ("min", "max", "rms", "nans", "infs")
                    found |= {f"{column}/{name or '(the model)'}": float(getattr(self._of[name], column)[i]) for column in columns}
            write(Figures(found), step + each)

    def __str__(self) -> str:
        head = f"{len(self.layers)} modules, steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no step"
        rows = [(name or "(the model)", *_line(self._of[name]), str(self.first_nonfinite.get(name, ""))) for name in self.layers]
        columns = ("module", "min", "max", "rms", "last rms", "NaN", "Inf", "first in step")
        return f"{head}\n{text_table(columns, rows, columns[1:])}" if rows else head

    def page(self) -> Page:
        """See `Report.page`."""
        return numeric_log_page(self)


def _line(layer: LayerLog) -> list[str]:
    lows, highs, rms = ([value for value in column if not math.isnan(value)] for column in (layer.min, layer.max, layer.rms))
    numbers = [min(lows, default=math.nan), max(highs, default=math.nan), max(rms, default=math.nan), layer.rms[-1]]
    shown = ["" if math.isnan(value) else f"{value:.4g}" for value in numbers]
    return [*shown, *(str(sum(counts) or "") for counts in (layer.nans, layer.infs))]


@tells_arguments("qsim.read_numeric_log")
def read_numeric_log(path: str | PathLike[str]) -> NumericLog:
    """Read a log of `numeric_log`, also one that is still written, or was cut off by a crash.

    Raises
    ------
    ValueError
        It is no such log.
    FileNotFoundError

    Examples
    --------
    >>> import tempfile
    >>> model, path = torch.nn.Sequential(torch.nn.Linear(4, 2)), tempfile.mktemp(".bin")
    >>> with qsim.numeric_log(model, path):
    ...     _ = model(torch.ones(1, 4))
    >>> len(read_numeric_log(path)["0"].max)
    1
    """
    path = Path(path)
    try:
        return _read(path)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"read_numeric_log: '{path}' holds a line that numeric_log does not write ({type(error).__name__}: {error})"
        ) from None


def _read(path: Path) -> NumericLog:
    found = NumericLog()
    older = _older_half(path)
    order: list[str] = []
    for file in [older, path] if older.exists() else [path]:
        lines = _lines(file)
        header = next(lines, None)
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise ValueError(f"read_numeric_log: '{file}' is no numeric log; its first line does not say {_FORMAT!r}")
        order = header["layers"]
        found.first_nonfinite.update(header["first_nonfinite"])
        for record in lines:
            _add(found, record, order)
    found.layers.extend(name for name in order if name in found._of)
    first = sorted(found.first_nonfinite.items(), key=lambda entry: (entry[1], order.index(entry[0])))
    return replace(found, first_nonfinite=dict(first))


def _lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # cut off while it was written
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"read_numeric_log: '{file}' holds a line that is no JSON: {error}") from None


def _add(found: NumericLog, record: dict[str, Any], order: list[str]) -> None:
    step = record["step"]
    found.steps.append(step)
    found.training.append(record["training"])
    for row, (low, high, rms, nans, infs) in record["rows"].items():
        layer = found._of.setdefault(order[int(row)], LayerLog())
        layer.steps.append(step)
        for column, value in ((layer.min, low), (layer.max, high), (layer.rms, rms)):
            column.append(math.nan if value is None else float(value))
        layer.nans.append(nans)
        layer.infs.append(infs)
        if nans or infs:
            found.first_nonfinite.setdefault(order[int(row)], step)


def numeric_log_page(log: NumericLog) -> Page:
    """A row for each module, which opens its steps; what met NaN or Inf is marked."""
    heads = ("min", "max", "largest RMS", "last RMS")
    columns = [Column("module", wide=True), *(Column(head, number=True) for head in (*heads, "NaN", "Inf"))]
    columns.append(Column("first in step", number=True, ascending=True))
    lines, largest, rms = [], [], []
    for name in log.layers:
        layer, first = log[name], log.first_nonfinite.get(name)
        low, high, most, last, *_ = _line(layer)
        magnitudes = torch.tensor([_largest(*ends) for ends in zip(layer.min, layer.max, strict=True)])
        curves = Curves("step", {"largest magnitude": magnitudes, "RMS": torch.tensor(layer.rms)}, first=layer.steps[0])
        cells = [name_cell(name or "(the model)"), *(Cell(text, float(text) if text else math.nan) for text in (low, high, most, last))]
        cells += [count_cell(sum(layer.nans)), count_cell(sum(layer.infs)), Cell("" if first is None else str(first), first)]
        cells[0] = replace(cells[0], markup=cells[0].markup + curves.markup(_COLUMNS // len(log.layers)))
        lines.append(Line(cells, severity="" if first is None else "error"))
        largest.append(max((value for value in magnitudes.tolist() if not math.isnan(value)), default=math.nan))
        rms.append(layer.rms[-1])
    series = [Series("largest magnitude", "inside", largest), Series("last RMS", "second", rms)]
    axes = Axis("module, in the order of the model"), Axis("value", logarithmic=True)
    chart = Chart("Largest magnitude and RMS of each module", *axes, series, list(range(len(lines)))) if lines else None
    facts = [("modules", str(len(log.layers))), ("steps", str(len(log.steps))), ("that met NaN or Inf", str(len(log.first_nonfinite)))]
    note = "Results of modules over all steps that the log holds; a row opens its steps."
    body = tiles(facts) + table("Modules", note, columns, lines, chart)
    return Page("Numeric log", "The numbers in a model while it ran", body, chart=chart)


def _largest(low: float, high: float) -> float:
    return math.nan if math.isnan(low) else max(abs(low), abs(high))
