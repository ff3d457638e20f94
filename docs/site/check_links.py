"""Says which links of the built site lead nowhere, and what it would load from elsewhere: it has to open without a network.

python docs/site/check_links.py FOLDER
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in LOADED and LOADED[tag] in found:
            self.loaded.append(found[LOADED[tag]])


def complaints(folder: Path) -> list[str]:
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                if link in page.loaded:
                    found.append(f"{path}: loads {link}")
            elif parts.scheme not in ("mailto", "data"):
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                if not target.is_file():
                    found.append(f"{path}: {link} leads nowhere")
                elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                    found.append(f"{path}: {link} has no such anchor")
    return found


if __name__ == "__main__":
    lines = complaints(Path(sys.argv[1]))
    print("\n".join(lines) or "every link leads somewhere")
    sys.exit(bool(lines))
