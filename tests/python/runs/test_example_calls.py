"""Example inputs in each form that a simulation takes."""

import pytest

from qsim.runs.arguments import example_calls


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, [((1,), {})]),
        ((1, 2), [((1, 2), {})]),
        ({"x": 1}, [((), {"x": 1})]),
        ([1, (2, 3), {"x": 1}], [((1,), {}), ((2, 3), {}), ((), {"x": 1})]),
    ],
)
def test_example_calls(given, expected):
    assert example_calls(given) == expected
