"""Float states that are loaded into the model of a simulation, into parts of it, or into what holds it: BatchNorms are folded."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import qsim

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias), nn.BatchNorm2d(6), nn.ReLU())
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 4)  # in front of what it is folded into

    def forward(self, x):
        return self.head(self.norm(self.backbone(x).mean((2, 3))))


def trained(seed, bias=True):
    torch.manual_seed(seed)
    model = Net(bias)
    for _ in range(9):
        model(2 * torch.randn(4, 3, 8, 8) + 1)
    return model.eval()


def part_of(state, path):
    return {name.removeprefix(f"{path}."): t for name, t in state.items() if name.startswith(f"{path}.")}


def into_wrapper(sim, state):
    wrapper = nn.Module()
    wrapper.net = sim.model
    wrapper.load_state_dict({f"net.{name}": t for name, t in state.items()}, strict=False)


def into_parts(sim, state):
    sim.model.backbone.load_state_dict(part_of(state, "backbone"))
    sim.model.load_state_dict({name: t for name, t in state.items() if not name.startswith("backbone")}, strict=False)


WAYS = {
    "the model": lambda sim, state: sim.model.load_state_dict(state),
    "not strict": lambda sim, state: sim.model.load_state_dict({**state, "other": torch.ones(1)}, strict=False),
    "a wrapper": into_wrapper,
    "parts": into_parts,
    "the simulation": lambda sim, state: sim.load_state_dict(state),
}


@pytest.mark.filterwarnings("ignore:QuantSim. a state without ranges")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "made", [lambda sim: sim, copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))], ids=["made", "copied", "pickled"]
)
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_it_is_the_model_whose_state_it_is(way, made, bias):
    sim, other = qsim.QuantSim(trained(0, bias), IMAGES), trained(1, bias)
    sim.calibrate([IMAGES], progress=False)
    sim = made(sim)
    state = other.state_dict()
    before = {name: t.clone() for name, t in state.items()}
    WAYS[way](sim, state)
    with sim.in_float():
        torch.testing.assert_close(sim(IMAGES), other(IMAGES))
    assert all(torch.equal(state[name], t) for name, t in before.items())
    sim.calibrate([IMAGES], progress=False)
    fresh = qsim.QuantSim(other, IMAGES)
    fresh.calibrate([IMAGES], progress=False)
    assert torch.equal(sim(IMAGES), fresh(IMAGES))
    sim.model.load_state_dict(fresh.model.state_dict())  # folded already
    assert torch.equal(sim(IMAGES), fresh(IMAGES))


def test_a_float_state_without_one_of_its_batch_norms_is_an_error():
    """That the layer has a bias does not make it a folded one, beside others that are as they were."""
    sim, state = qsim.QuantSim(trained(0), IMAGES), trained(1).state_dict()
    with pytest.raises(RuntimeError, match=r"has 'head' as it was before 'norm' was folded into it, without that BatchNorm"):
        sim.model.load_state_dict({name: t for name, t in state.items() if not name.startswith("norm")}, strict=False)


def test_halves_of_a_fold_are_told():
    sim, state = qsim.QuantSim(trained(0, bias=False), IMAGES), trained(1, bias=False).state_dict()
    before = {name: t.clone() for name, t in sim.model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"has 'backbone\.0' as it was before 'backbone\.1' was folded into it, without that BatchNorm"):
        sim.model.load_state_dict({"backbone.0.weight": state["backbone.0.weight"]}, strict=False)
    with pytest.raises(RuntimeError, match=r"has 'backbone\.1', which is folded into 'backbone\.0', without that layer"):
        sim.model.backbone[1].load_state_dict(part_of(state, "backbone.1"), strict=False)
    with pytest.warns(UserWarning, match=r"loaded into 'head' by itself is taken for weights with 'norm' folded into them"):
        sim.model.head.load_state_dict(dict(sim.model.head.state_dict()))
    assert all(torch.equal(t, before[name]) for name, t in sim.model.state_dict().items() if name.startswith("head"))


def test_a_baked_model_takes_its_own_states():
    sim = qsim.QuantSim(trained(0), IMAGES, qsim.Config(activation=None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim.calibrate([IMAGES], progress=False)
        baked = sim.bake()
    assert not any(m._load_state_dict_pre_hooks for m in baked.modules())
    assert baked.load_state_dict(baked.state_dict()) == ([], [])
