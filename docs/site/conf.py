"""Sphinx: the site is the repository's own Markdown, from its root, and an API reference from the docstrings. `make docs` builds it."""

import sys
from pathlib import Path

SITE = Path(__file__).parent
sys.path.insert(0, str(SITE))

from navigation import NAVIGATION, toctrees  # noqa: E402
from public_names import is_for_users, is_listed  # noqa: E402

import qsim  # noqa: E402

project = "qsim"
release = version = qsim.__version__
author = "the qsim maintainers"
copyright = f"{author}, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "README"
include_patterns = [
    "README.md",
    *[f"{page}.md" for pages in NAVIGATION.values() for page in pages],
    "docs/api/names/*.rst",
]
templates_path = [str(SITE / "templates")]

myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # pages begin with what is seen, whatever its level
default_role = "py:obj"  # `Config` in a docstring is a link where it is a name, and code where it is none

autosummary_generate = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "both"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
add_module_names = False
python_display_short_literal_types = True

html_theme = "furo"
html_title = f"qsim {version}"
html_static_path = ["static"]
html_css_files = ["qsim.css"]
html_extra_path = [str(SITE / "extra")]
html_copy_source = False
html_show_sourcelink = False


def add_navigation(app: object, name: str, source: list[str]) -> None:
    """The first page carries the navigation, which its file on disk does without."""
    if name == root_doc:
        source[0] += "\n\n" + toctrees() + "\n"


def skip(app: object, what: str, name: str, member: object, skipped: bool, options: object) -> bool | None:
    """Members that are there for other packages of qsim, and what the docstring of their class lists among its attributes."""
    field_of_tuple = (getattr(member, "__doc__", None) or "").startswith("Alias for field number")
    return True if field_of_tuple or is_listed(name, member) or not is_for_users(name, member) else None


def setup(app: object) -> None:
    app.connect("source-read", add_navigation)
    app.connect("autodoc-skip-member", skip)
