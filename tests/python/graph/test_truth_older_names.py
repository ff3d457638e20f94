"""What is read by an older name is quantized by the grid of what was changed in place there: only if it is that very memory."""

import pytest
import torch
from by_hand import EXACT, linear, on_grid
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.graph.execute.abroad import Abroad

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.rand(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
ENTERS = on_grid(X)
CHANGED = ENTERS.square()
LAST = "'last' .* ran on what the example inputs did not show it: its operand 0 stays in float"


class Changing(nn.Module):
    """Changes its argument in place, and the caller goes on with it by its older name."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(8, 8)

    def forward(self, x):
        return self.read(x.square_())


class Network(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.changing, self.other, self.last = Changing(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant  # of the checkpoint that the last layer runs under; None: of none

    def forward(self, x, way="as it is"):
        if way != "not at all":
            self.changing(x)
        if way == "another":
            x = self.other(x) * 20
        return self.last(x) if self.reentrant is None else checkpoint(self.last, x, use_reentrant=self.reentrant)


def simulation(reentrant=None):
    with pytest.warns(UserWarning, match="no example input reaches 'other'"):
        sim = qsim.QuantSim(Network(reentrant).double().eval(), (X.clone(),), EXACT)
    sim.calibrate([X.clone()], progress=False)
    return sim


@pytest.fixture
def sim():
    return simulation()


def last(sim, x):
    """The last layer on `x` as it is, on the grid that the example gave its result."""
    return on_grid(linear(sim.model.last, x), nn.functional.linear(X.square(), sim.model.last.weight, sim.model.last.bias))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_way_of_the_example(sim, compiled):
    close((torch.compile(sim, backend="eager") if compiled else sim)(X.clone()), last(sim, on_grid(CHANGED, X.square())))


def test_another_tensor_is_not_put_on_its_grid(sim):
    with pytest.warns(UserWarning, match=LAST):
        found = sim(X.clone(), "another")
    close(found, last(sim, linear(sim.model.other, on_grid(CHANGED)) * 20))  # `other` reads it by its older name


@pytest.mark.parametrize("compiled", [False, True])
def test_nor_what_was_never_changed(sim, compiled):
    with pytest.warns(UserWarning, match=LAST):
        found = (torch.compile(sim, backend="eager") if compiled else sim)(X.clone(), "not at all")
    close(found, last(sim, ENTERS))


def test_nor_what_a_hook_hands_on(sim):
    sim.model.last.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 3,))
    with pytest.warns(UserWarning, match=LAST):
        found = sim(X.clone())
    close(found, last(sim, CHANGED + 3))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["as it is", "another", "not at all"])
@pytest.mark.filterwarnings("ignore:QuantSim")
def test_what_runs_again_under_a_checkpoint_runs_as_it_ran(sim, way, reentrant):
    again = simulation(reentrant)
    plain, found = sim(X.clone(), way), again(X.clone().requires_grad_() * 1, way)
    close(found, plain)
    for result in (plain, found):
        result.sum().backward()
    close(again.model.last.weight.grad, sim.model.last.weight.grad)


def test_what_is_changed_in_parts_is_read_whole_on_a_grid_of_its_own():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            x[:, :4].square_()
            return self.last(x)

    sim = qsim.QuantSim(Parts().double().eval(), (X.clone(),), EXACT)
    sim.calibrate([X.clone()], progress=False)
    assert "square.output" not in sim.quantizers()  # nobody reads what is returned there
    seen, x = (torch.cat([t[:, :4].square(), t[:, 4:]], 1) for t in (X, ENTERS))
    y = linear(sim.model.last, on_grid(x, seen))
    close(sim(X.clone()), on_grid(y, nn.functional.linear(seen, sim.model.last.weight, sim.model.last.bias)))


class Attending(nn.Module):
    """torch's attention asks which of its arguments are one tensor, and projects those together."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        y = x.tanh_()
        return self.attention(y, x, y)[0]


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("savings", [True, False])
def test_what_is_returned_by_another_name_is_so_while_its_quantizer_only_observes(savings):
    sim = qsim.QuantSim(Attending().double().eval(), (X.clone(),), EXACT)
    sim.savings = savings
    sim.calibrate([X.clone()], progress=False)  # would warn of projections that were not reached, and have no range for them
    found = sim(X.clone())
    sim.quantizers()["tanh.output"].enabled = False
    other = sim(X.clone())
    assert not other.equal(found)  # one grid is off, and all others are on
    with sim.in_float():
        assert not other.equal(sim(X.clone()))


class Growing(Attending):
    """What attention is given is changed once more behind it: no quantizer stands where it was changed before."""

    def forward(self, x):
        y = x
        for _ in range(2):
            y += x
        z = self.attention(x, y, y)[0]
        return z, x.add_(0.3)


@pytest.mark.filterwarnings("error:QuantSim")
@pytest.mark.parametrize("fallback", [None, "attention.softmax", "add"])
@torch.no_grad()
def test_what_is_returned_by_another_name_is_so_without_a_quantizer_too(fallback):
    model = Growing().eval()
    sim = qsim.QuantSim(model, (X.float()[None],), qsim.int16())
    sim.calibrate([X.float()[None]], progress=False)  # would warn of projections that were not reached, and have no range for them
    if fallback is not None:
        sim.fallback(fallback)
    found, expected = sim(X.float()[None]), model(X.float()[None])
    assert (found[0] - expected[0]).abs().max() < 1e-2 * expected[0].abs().max()
    assert all(map(torch.equal, torch.compile(sim.model, backend="aot_eager")(X.float()[None]), found))
    with sim.in_float():
        assert all(map(torch.equal, sim(X.float()[None]), expected))


def test_memory_that_a_traced_container_noted_is_known_to_an_eager_one():
    """Parts compiled by themselves: Dynamo has no references to storages, the container around them asks by memory."""
    abroad, result = Abroad(nn.Identity()), torch.ones(3)
    abroad.memory["act"] = [result]
    assert abroad.lies_in(("act",), result[1:])
    assert not abroad.lies_in(("act",), torch.ones(3))
