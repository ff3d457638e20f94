"""Every name that a user can reach has an entry in the API reference, and an example in its docstring (test_docstrings.py runs them)."""

import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "docs" / "site"))

from public_names import members, public_names  # noqa: E402

NAMES = dict(public_names())
EXAMPLE = re.compile(r"^\s*(?:>>>|\.\.\.) (.*)", re.M)


def lines_of_example(found: object) -> str:
    return "\n".join(EXAMPLE.findall(inspect.getdoc(found) or ""))


@pytest.mark.parametrize("path", NAMES)
def test_has_an_example(path):
    """A class has one too, which may also show what its methods and properties do."""
    found = NAMES[path]
    example = lines_of_example(found)
    assert example, f"{path}: its docstring has no example"
    if inspect.isclass(found):
        examples = {name: lines_of_example(member) for name, member in members(found)}
        shown = {"forward", *re.findall(r"\.(\w+)", "\n".join([example, *examples.values()]))}
        silent = [name for name, own in examples.items() if not own and name not in shown]
        assert not silent, f"{path}: no example uses {', '.join(silent)}"


def entries() -> set[str]:
    """What the pages of docs/api list."""
    found = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for module, block in re.findall(
            r"currentmodule:: (\S+)\n\n.. autosummary::\n   :toctree: names\n\n(.*?)```", page.read_text(), re.S
        ):
            found |= {f"{module}.{name}" for name in block.split()}
    return found


def test_reference_lists_every_name():
    missing = set(NAMES) - entries()
    assert not missing, f"add these to a page in docs/api: {', '.join(sorted(missing))}"


def test_constructor_is_documented():
    assert "example_inputs" in inspect.getdoc(NAMES["qsim.QuantSim"].__init__)
