"""A page: one file with its style and its script in it."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib import metadata
from os import PathLike
from pathlib import Path
from string import Template

from qsim.atomic import write_atomically
from qsim.version import VERSION

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Page:
    """A title, a line under it, and HTML.

    The page's security policy lets the browser run our script, told by its digest, and nothing else, and load nothing at all: even a
    name that got past escaping could do nothing.
    """

    title: str
    subtitle: str
    body: str

    def html(self) -> str:
        """The whole document."""
        style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
        return Template((_HERE / "page.html").read_text(encoding="utf-8")).substitute(
            title=escape(self.title),
            subtitle=escape(self.subtitle),
            body=self.body,
            style=style,
            script=script,
            style_hash=_digest(style),
            script_hash=_digest(script),
            version=escape(VERSION),
            made=escape(_made()),
        )

    def write(self, path: str | PathLike[str]) -> None:
        """Write the document to a file, whole or not at all."""
        write_atomically(Path(path), self.html().encode())


def _made() -> str:
    """By what, beside what and when a page was made."""
    return f"qsim {VERSION}, torch {metadata.version('torch')}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
