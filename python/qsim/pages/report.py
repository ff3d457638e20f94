"""What every report can do: be a page in a file, and be looked at in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from os import PathLike

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
        """Write it as one HTML page that needs no network: curves, tables that sort and filter, pictures of distributions.

        Parameters
        ----------
        path : path-like
            Such as "report.html"; an existing file is replaced.
        """
        self.page().write(path)

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
