"""Integers are those of the model as it is: what is changed in it besides tensors is traced anew, and only that."""

import copy
import types

import pytest
import torch
from torch import nn

import qsim
from qsim.integer.programs import PROGRAMS
from qsim.integer.traced_state import traced_state

CONFIG = qsim.int8(target="onnxruntime")


class Settings:
    """As the configs of transformers: an attribute of the model that is an object, with another within."""

    def __init__(self):
        self.gain, self.inner = 1.0, types.SimpleNamespace(shift=0.0)


class Net(nn.Module):
    """Reads numbers from wherever models keep them."""

    of_class = (1.0,)

    def __init__(self):
        super().__init__()
        self.fc, self.act, self.norm, self.head = nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4)
        self.twice, self.settings, self.constant, self.last, self.by_name = False, Settings(), torch.ones(8), None, {"a": (1.0, {2})}

    def forward(self, x):
        y = self.norm(self.act(self.fc(x)))
        self.last = y.detach()  # left by a call, read by none
        y = y * self.constant * self.settings.gain + self.settings.inner.shift
        y = y * self.of_class[0] * self.by_name["a"][0]
        return self.head(y + y if self.twice else y)


def _hook(model):
    model.fc.register_forward_hook(lambda module, args, y: y * 2)


def _forward(model):
    model.act.forward = lambda x: x.clamp(0, 0.1)


CHANGES = {
    "flag": lambda model: setattr(model, "twice", True),
    "option of a layer": lambda model: setattr(model.norm, "eps", 0.5),
    "settings": lambda model: setattr(model.settings, "gain", 0.5),
    "settings within": lambda model: setattr(model.settings.inner, "shift", 0.5),
    "dict": lambda model: model.by_name.update(a=(0.5, {2})),
    "number of the class": lambda model: setattr(type(model), "of_class", (0.5,)),
    "another constant": lambda model: setattr(model, "constant", torch.full((8,), 0.5)),
    "constant in place": lambda model: model.constant.mul_(0.5),
    "hook": _hook,
    "forward": _forward,
    "layer": lambda model: setattr(model, "act", nn.Hardtanh(0, 0.1)),
}


def simulated():
    torch.manual_seed(0)
    kind = type("Own", (Net,), {})  # whose class may be changed
    model, x = kind().eval(), torch.randn(32, 6)
    sim = qsim.QuantSim(model, x, CONFIG)
    sim.calibrate([x], progress=False)
    return sim, x


@pytest.mark.filterwarnings("ignore:QuantSim. '")  # of what no example showed
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changed_in_the_model_changes_its_integers(change):
    sim, x = simulated()
    before = sim.evaluate(x, integer=True)
    change(sim.model)
    after = sim.evaluate(x, integer=True)
    assert torch.equal(after, copy.deepcopy(sim).evaluate(x, integer=True))  # which was never traced
    assert not torch.equal(after, before)
    step = float(sim.quantizers()["head.output"].encoding.scale)
    assert (after - sim.evaluate(x)).abs().max() < 1.5 * step
    assert len(sim.derived[PROGRAMS]) == 1


def test_nothing_is_traced_anew_where_nothing_changed():
    sim, x = simulated()
    sim(x)
    sim.evaluate(x, integer=True)
    (program,) = sim.derived[PROGRAMS].values()
    sim(x)  # leaves another tensor in an attribute
    sim.train()
    sim.eval()
    sim.state_dict()
    with torch.no_grad():
        sim.model.fc.weight.mul_(0.9)
    sim.evaluate(torch.randn(5, 6), integer=True)
    assert list(sim.derived[PROGRAMS].values()) == [program]


def test_numbers_that_equal_nothing_equal_themselves():
    model = Net()
    model.settings.gain, model.by_name["self"] = float("nan"), model.by_name  # and what holds itself has an end
    assert traced_state(model, set()) == traced_state(model, set())
    state = traced_state(model, set())
    model.settings.gain = 1
    assert traced_state(model, set()) != state
