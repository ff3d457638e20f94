"""The pages on the five failures: each is one script that runs as shown and prints what the page says it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "failures").glob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)
SECONDS = re.compile(r"\b\d+\.\d+ s\b")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def parts(text: str) -> tuple[list[str], list[float]]:
    """The words, and the numbers between them, without seconds and without the layout of tables, which depends on both."""
    text = re.sub(r"[\s─]+", " ", SECONDS.sub("s", text)).strip()
    return NUMBER.split(text), [float(number) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_prints_what_it_shows(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    script = tmp_path / f"{page.stem}.py"  # a file, so that findings have lines to name
    script.write_text("\n".join(code for code, _ in blocks))
    namespace: dict[str, object] = {}
    lines = 0
    for code, shown in blocks:
        exec(compile("\n" * lines + code, str(script), "exec"), namespace)
        lines += code.count("\n") + 1
        printed = capsys.readouterr().out
        words, numbers = parts(printed)
        expected_words, expected_numbers = parts(shown)
        assert words == expected_words, printed
        assert numbers == pytest.approx(expected_numbers, rel=0.02), printed  # sums are rounded in an order that differs by CPU


def test_there_are_five_and_who_searches_finds_them():
    assert len(PAGES) == 5
    for document, folder in ((ROOT / "README.md", "docs/failures/"), (ROOT / "docs" / "README.md", "failures/")):
        text = document.read_text()
        assert [page.name for page in PAGES if f"({folder}{page.name})" not in text] == []
