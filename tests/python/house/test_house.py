"""What holds for all files of the package (floors are held by import-linter, in `make lint`)."""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import qsim
from qsim.graph.record import call_sites

ROOT = Path(qsim.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def package_of(path: Path) -> str:
    """The folder that a file lies in, from the package on; "" for the files on the ground."""
    return path.parent.relative_to(ROOT).as_posix()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def made_names(tree: ast.Module) -> set[str]:
    """Private names that a file defines, of functions, classes, attributes and variables."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return set(filter(is_private, found))


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def test_private_names_stay_in_their_package(trees):
    """An attribute with an underscore, or an import of one, belongs to the package that defines it. `self` may be a subclass of torch's."""
    makers = defaultdict(set)
    for path, tree in trees.items():
        for name in made_names(tree):
            makers[name].add(package_of(path))
    reached = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                owners = makers.get(node.attr)
                if owners and package_of(path) not in owners and node.attr not in FOREIGN:
                    reached.append(f"{path}:{node.lineno}: {ast.unparse(node)}, of {', '.join(sorted(owners))}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qsim."):
                owner = ROOT.joinpath(*str(node.module).split(".")[1:])
                names = [alias.name for alias in node.names if is_private(alias.name)]
                if names and (owner if owner.is_dir() else owner.parent) != path.parent:
                    reached.append(f"{path}:{node.lineno}: {', '.join(names)} of {node.module}")
    assert not reached, "\n".join(reached)


FOREIGN = ("_replace", "_fields", "_asdict", "_ops", "_schema")  # Python's and torch's


def test_no_file_is_longer_than_400_lines():
    long = {str(path): count for path in FILES if (count := len(path.read_text().splitlines())) > 400}
    assert not long


# An operator's family has one stem in every layer, docs/architecture.md says; a command's module is called as the command is.
FAMILIES = {path.stem for path in FILES if package_of(path) == "ops"}


def homes(names: Iterator[tuple[str, Path]]) -> dict[str, list[str]]:
    """The names that are more than one thing, and where."""
    found = defaultdict(list)
    for name, path in names:
        found[name].append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_module_has_a_name_of_its_own():
    own = [path for path in FILES if not path.stem.startswith("__") and package_of(path) != "cli" and path.stem not in FAMILIES]
    assert not homes((path.stem, path) for path in own)


def test_a_class_has_a_name_of_its_own(trees):
    """But for those of the twins."""
    classes = ((node.name, path) for path, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef))
    assert not homes((name, path) for name, path in classes if not is_private(name) and package_of(path) != "reference")


def test_names_that_moved_are_found_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"qsim\.Counts is now qsim\.quantizers\.observer\.Counts"):
        assert qsim.Counts is import_module("qsim.quantizers.observer").Counts
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = qsim.Nothing
    assert set(qsim.__all__) <= set(dir(qsim))
    assert all(hasattr(qsim, name) for name in qsim.__all__)


def test_files_that_call_sites_are_told_by_are_there():
    path, function = call_sites.SIMULATED
    assert f"def {function}(" in Path(path).read_text()
    for name, function in call_sites.BASES:
        (found,) = ROOT.joinpath("graph").rglob(name)
        assert f"def {function}(" in found.read_text()


def test_importing_qsim_registers_operators_and_imports_little_more():
    code = (
        "import sys, qsim, torch; torch.ops.qsim.fake_quantize; assert 'qsim.numbers.spec' not in sys.modules; "
        "qsim.QuantSim; assert 'qsim.simulation.simulation' in sys.modules; qsim.equalization; "
        "import gc; assert gc.isenabled(); gc.disable(); qsim.doctor; assert not gc.isenabled()"  # as it was
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(Path(qsim.__path__[0]).parent)}, check=True)


def test_a_name_that_is_none():
    with pytest.raises(AttributeError, match="module 'qsim' has no attribute 'QuantSimm'; did you mean 'QuantSim'"):
        qsim.QuantSimm  # noqa: B018
