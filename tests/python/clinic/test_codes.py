"""docs/codes.md: every code is on it, and the model beside each one has what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from qsim.clinic.codes import CODES

PAGE = (Path(__file__).parents[3] / "docs" / "codes.md").read_text()
SECTIONS = dict(re.findall(r"^## (QS\d{3}): .*?\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))


def test_the_page_has_every_code_by_its_title():
    assert re.findall(r"^## (QS\d{3}): (.*)$", PAGE, re.M) == list(CODES.items())


@pytest.mark.parametrize("code", CODES)
def test_the_example_has_it(code):
    torch.manual_seed(0)
    (example,) = re.findall(r"```python\n(.*?)```", SECTIONS[code], re.S)
    names = {"torch": torch, "nn": nn}
    exec(example, names)
    assert code in [finding.code for finding in names["diagnosis"].findings]
    assert "\nCure: " in SECTIONS[code]
