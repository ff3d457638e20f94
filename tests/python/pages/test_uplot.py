"""The library that draws curves is the released one, unchanged, and its licence goes with every page."""

import hashlib
from pathlib import Path

import pytest

from qsim.pages.page import Page

FOLDER = Path(__file__).parents[3] / "python" / "qsim" / "pages" / "uplot"
DIGESTS = {  # of uPlot 1.6.32
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_files_are_those_of_the_release(name):
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == DIGESTS[name]


def test_a_page_has_the_licence():
    document = Page("Title", "", "").html()
    for line in (FOLDER / "LICENSE").read_text().splitlines():
        assert line in document
