"""A page: one file with its style and its scripts in it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from html import escape
from os import PathLike
from pathlib import Path
from string import Template

import torch

from qsim.atomic import write_atomically
from qsim.pages.chart import Chart
from qsim.pages.picture import SUFFIXES, picture
from qsim.version import VERSION

_HERE = Path(__file__).parent
_PAGES = (".html", ".htm", "")
_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "plot.js", "charts.js", "distributions.js", "tables.js")


@dataclass(frozen=True)
class Page:
    """A title, a line under it, HTML, what it is about (names and texts), and the curves that are in it.

    The page's security policy lets the browser run our scripts, told by their digest, and nothing else, and load nothing at all: even a
    name that got past escaping could do nothing.
    """

    title: str
    subtitle: str
    body: str
    about: Sequence[tuple[str, str]] = ()
    chart: Chart | None = None

    def html(self) -> str:
        """The whole document."""
        style, script = _style(), _script()
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in [*self.about, ("made", _made())])
        return Template((_HERE / "page.html").read_text(encoding="utf-8")).substitute(
            title=escape(self.title),
            subtitle=escape(self.subtitle),
            about=facts,
            body=self.body,
            style=style,
            script=script,
            style_hash=_digest(style),
            script_hash=_digest(script),
            version=escape(VERSION),
        )

    def write(self, path: str | PathLike[str]) -> None:
        """Write the document to a file, whole or not at all; its curves alone where the name ends as a picture's does."""
        suffix = Path(path).suffix.lower()
        if suffix not in (*SUFFIXES, *_PAGES):
            ways = ", ".join(("'.html'", *map(repr, SUFFIXES)))
            raise ValueError(f"got the file name '{path}'; expected one that ends as what is written does: {ways}, or '.csv' of a report")
        contents = picture(self.title, self.chart, suffix) if suffix in SUFFIXES else self.html().encode()
        write_atomically(Path(path), contents)


@cache
def _style() -> str:
    return "\n".join(_text(name) for name in _STYLES)


@cache
def _script() -> str:
    """The scripts, the library's with its licence before it."""
    licence = "\n".join(f" * {line}".rstrip() for line in _text("uplot/LICENSE").splitlines())
    return "\n".join([f"/*\n * uPlot:\n{licence}\n */", *map(_text, _SCRIPTS)])


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _made() -> str:
    """When a page was made, by what, beside what."""
    return f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC by qsim {VERSION}, torch {torch.__version__}"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
