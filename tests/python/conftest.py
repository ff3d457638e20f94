import os

import pytest
import torch
from hypothesis import settings

# Time is never asserted (first calls load kernels); CI draws the same examples on every run.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _same_random_numbers_whatever_ran_before() -> None:
    torch.manual_seed(0)
