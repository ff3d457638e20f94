import pytest
from browser import Browser


@pytest.fixture(scope="package")
def browser(tmp_path_factory):
    """A browser that all files of this folder look at pages with."""
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running
