"""docs/architecture.md, CONTRIBUTING.md and the READMEs of folders name files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("python", "kernels", "csrc", "tests", "docs", "scripts", "benchmarks", "examples")
FILES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
PAGES = [
    ROOT / "docs/architecture.md",
    ROOT / "CONTRIBUTING.md",
    *(path for folder in FOLDERS[:4] for path in (ROOT / folder).rglob("README.md")),
]
BASES = ("", "python", "python/qsim", "kernels", "kernels/include", "csrc", "tests", "tests/python", "docs")
FOREIGN = ("ATen/", "dist/")  # of torch and of uPlot
NAME = re.compile(r"[\w./-]+\.(?:py|h|cpp|cu|cuh|sh|md|toml)|[\w.-]+(?:/[\w.-]+)+")


def is_there(name: str, page: Path) -> bool:
    if "/" not in name:
        return name in FILES or (ROOT / name).exists()
    return any((ROOT / base / name).exists() or (ROOT / base / f"{name}.py").exists() for base in (*BASES, page.parent))


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_names_files_that_are_there(page):
    words = (word for text in re.findall(r"`([^`\n]+)`", page.read_text()) for word in re.split(r"[\s,|()]+", text))
    missing = [word for word in words if NAME.fullmatch(word) and not word.startswith(FOREIGN) and not is_there(word.rstrip("/"), page)]
    assert not missing


def test_floors_are_the_packages():
    """In the order of the import contract, from the roof to the ground."""
    text = (ROOT / "docs/architecture.md").read_text()
    table = text[text.index("## The floors of python/qsim") : text.index("| question")]
    listed = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`[^|]+) \|", table, re.M)]
    contract = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(
        r'^  "([\w |]+)",$', contract[contract.index("[tool.importlinter]") : contract.index('"Record, plan, execute"')], re.M
    )
    floors = [layer.split(" | ") for layer in layers]
    assert listed == floors[1 : len(listed) + 1]  # above them is __main__, below them the ground
    packages = {path.parent.name for path in (ROOT / "python/qsim").glob("*/__init__.py")}
    assert packages == {name for names in listed for name in names}
