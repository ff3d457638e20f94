"""The documents of the house name what the code defines: `name` in `file`, and `Class.member` wherever it stands."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest
from test_architecture import BASES, FILES, PAGES, ROOT

# `a`, `b.c` and `d` in `folder/file.py`
NAMED = re.compile(r"((?:`[A-Za-z_][\w.]*`(?:, | and |, and )?)+)(?: [a-z]+){0,2}? (?:in|of) `([\w/.]+\.(?:py|h|cpp|cuh?))`")


def targets(node: ast.AST) -> list[str]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in found for part in ast.walk(target) if isinstance(part, ast.Name)]


def attributes(cls: ast.ClassDef) -> set[str]:
    """What a class defines, or its methods assign to."""
    given = (part for part in ast.walk(cls) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    defined = (node.name for node in cls.body if isinstance(node, ast.FunctionDef))
    return {*defined, *(name for node in cls.body for name in targets(node)), *(part.attr for part in given)}


def python_names(text: str) -> set[str]:
    """Top-level names of a module, and `Class.member`."""
    body = ast.parse(text).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | {
        name for node in body for name in targets(node)
    }
    return names | {f"{cls.name}.{member}" for cls in classes for member in attributes(cls)}


@functools.cache
def defines(path: Path, name: str) -> bool:
    text = path.read_text()
    return name in python_names(text) if path.suffix == ".py" else all(re.search(rf"\b{part}\b", text) for part in name.split("."))


@functools.cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """What classes of this name have, and what classes they name as their bases."""
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for path in (path for folder in ("python/qsim", "tests/python") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name][0].update(attributes(node))
                found[node.name][1].update(ast.unparse(base) for base in node.bases)
    return dict(found)


def has(cls: str, member: str) -> bool:
    own, bases = classes().get(cls, (set(), set()))
    return member in own or any(has(base, member) for base in bases)


def files_named(name: str, page: Path) -> list[Path]:
    if "/" in name or (page.parent / name).exists():
        return [path for base in (*BASES, page.parent) if (path := ROOT / base / name).exists()]
    return [path for folder in ("python", "kernels", "csrc", "tests") for path in (ROOT / folder).rglob(name)] if name in FILES else []


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_names_are_where_they_are_said_to_be(page):
    wrong = []
    for names, file in NAMED.findall(page.read_text()):
        paths = files_named(file, page)
        wrong += [f"{name} in {file}" for name in re.findall(r"`([\w.]+)`", names) if not any(defines(path, name) for path in paths)]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_members_exist(page):
    said = (name.split(".") for name in re.findall(r"`([A-Z]\w*\.[a-z_]\w*)`", page.read_text()))
    assert not [f"{cls}.{member}" for cls, member in said if cls in classes() and not has(cls, member)]


def test_what_is_not_there_is_seen():
    pairs = NAMED.findall((ROOT / "docs/architecture.md").read_text())
    assert ("`_steps`", "reference/fake_quantize.py") in pairs
    assert len(pairs) > 30
    twin = ROOT / "python/qsim/reference/fake_quantize.py"
    assert [defines(twin, name) for name in ("_steps", "_strides", "steps")] == [True, False, False]
    assert [has("QuantSim", name) for name in ("calibrate", "recorded_batches")] == [True, False]
