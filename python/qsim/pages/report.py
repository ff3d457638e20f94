"""What every report can do: be a page in a file, be looked at in a notebook, and be logged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from qsim.atomic import write_atomically
from qsim.loggers.figures import Figures
from qsim.loggers.sinks import writer_of
from qsim.pages.page import Page
from qsim.pages.subject import Subject

_LARGEST = 1 << 20  # of a page within a notebook, which keeps it; of a larger one it has the text


@dataclass(frozen=True)
class Report:
    """Base of reports: `page` is theirs; `subject`, what it is about, stands in the head of their page."""

    subject: Subject | None = field(default=None, kw_only=True, repr=False, compare=False)

    def page(self) -> Page:
        """The report as an HTML page."""
        raise NotImplementedError(f"{type(self).__name__} has no page")

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as one HTML page that needs no network: curves, tables that sort and filter, pictures of distributions. Or its curves
        alone, as a picture, or its numbers alone.

        Parameters
        ----------
        path : path-like
            Such as "report.html"; "report.png", ".svg" or ".pdf", which takes matplotlib (``pip install qsim[report]``); "report.csv" for
            what `log` writes, a line each: figure, of what, value. An existing file is replaced.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        ValueError
            A picture of a report that has no curve; a name that ends in another way.
        """
        self._write(self.page, path)

    def _write(self, page: Callable[[], Page], path: str | PathLike[str]) -> None:
        if Path(path).suffix.lower() == ".csv":
            write_atomically(Path(path), self.figures().csv().encode())
        else:
            page().write(path)

    def figures(self) -> Figures:
        """Its numbers, as `log` writes them."""
        raise NotImplementedError(f"{type(self).__name__} has no figures")

    def log(self, to: Any, step: int = 0) -> None:
        """Write its numbers to a logger: scalars, and histograms where the report has them.

        Parameters
        ----------
        to : object
            A SummaryWriter of `torch.utils.tensorboard`, a run of W&B, the module mlflow, a logger of Lightning, or any object with
            ``log(dict)``. None of them is imported by qsim (docs/logging.md).
        step : int

        Examples
        --------
        >>> class Printer:
        ...     def log(self, figures, step):
        ...         print(step, [name for name in figures if name.startswith("clipped")])
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
        >>> sim.calibrate([torch.randn(8, 3)], progress=False).log(Printer(), step=5)
        5 ['clipped/input', 'clipped/weight', 'clipped/linear.output']
        """
        writer_of(to, f"{type(self).__name__}.log")(self.figures(), step)

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame of its own, which can be folded; of a large one the text."""
        page = self.page()
        document = page.html()
        if len(document) > _LARGEST:
            inside = f"<pre>{escape(str(self))}</pre>"
        else:
            style = "width: 100%; height: 32rem; border: 0"
            inside = f'<iframe srcdoc="{escape(document)}" style="{style}" title="{escape(page.title)}"></iframe>'
        return f"<details open><summary><b>{escape(page.title)}</b>: {escape(page.subtitle)}</summary>{inside}</details>"
