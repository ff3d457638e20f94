"""One quantizer for a tensor that several layers read, where they read it: it is for that tensor alone."""

import warnings

import pytest
import torch
from by_hand import EXACT, on_grid
from torch import nn

import qsim

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ELSE = "'second' .* ran on what the example inputs did not show it: its operand 0 stays in float"


class Network(nn.Module):
    """What `masked_fill` puts in lies on no grid: its readers quantize, and share a quantizer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, way="as it is"):
        y = x.masked_fill(x > 1, 1.0)
        first = self.first(y) if way != "alone" else y
        if way == "times five":
            y = y * 5
        elif way == "another":
            y = x
        elif way == "made":
            y = torch.full_like(x, 7.0)
        return first, self.second(y)


@pytest.fixture
def sim():
    found = qsim.QuantSim(Network().double(), X, EXACT)
    found.calibrate([X], progress=False)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_the_tensor_of_the_example(sim, compiled):
    assert [key for key in sim.quantizers() if key.endswith("input[0]")] == ["first.input[0]"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called = torch.compile(sim, backend="eager") if compiled else sim
        called(X)
        called(X + 0.1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["times five", "another", "made"])
def test_another_tensor_is_not_put_on_its_grid(sim, way, compiled):
    called = torch.compile(sim, backend="eager") if compiled else sim
    with pytest.warns(UserWarning, match=ELSE):
        _, found = called(X, way)
    sim.disable("second.output")
    y = {"times five": on_grid(X).masked_fill(X > 1, 1.0) * 5, "another": X, "made": torch.full_like(X, 7.0)}[way]
    _, free = sim(X, way)
    assert (free - sim.model.second(y)).abs().max() < 0.1
    assert found.shape == free.shape


def test_what_a_hook_puts_there_is_not_either(sim):
    sim.model.second.register_forward_pre_hook(lambda module, given: (given[0] + 5.0,))
    with pytest.warns(UserWarning, match=ELSE):
        sim.calibrate([X], progress=False)
    _, found = sim(X)
    expected = sim.model.second.weight @ (X.masked_fill(X > 1, 1.0) + 5.0).T
    assert (found - expected.T - sim.model.second.bias).abs().max() < 0.2


def test_where_the_first_does_not_read_it_the_second_does(sim):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, found = sim(X, "alone")
    assert not any("operand 0" in str(warning.message) for warning in told)
    torch.testing.assert_close(found, sim(X)[1], rtol=0, atol=0)
