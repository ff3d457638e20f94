"""The examples in docstrings give what they show."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import qsim

FOUND = [module.name for module in pkgutil.walk_packages(qsim.__path__, "qsim.")]
MODULES = [name for name in FOUND if not name.startswith("qsim.lib")]  # the operators' libraries end like Python modules


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    public = {name: getattr(qsim, name) for name in qsim.__all__}
    assert doctest.testmod(module, extraglobs={"torch": torch, "qsim": qsim, **public, **vars(module)}).failed == 0
