"""Parts of parameters that are multiplied with: cut to the length of the input, or packed."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim

CONFIG = qsim.Config(weight=qsim.TensorSpec(bits=16, symmetric=True, axis=0), activation=qsim.TensorSpec(bits=16))
WIDTH = 8


class Table(nn.Module):
    """Relative positions: a table that is cut to so many times the length, as attention has them. The width may be the length too."""

    def __init__(self, times=1):
        super().__init__()
        self.times, self.table, self.layer = times, nn.Parameter(torch.randn(64, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x) @ self.table[: self.times * x.size(1)].t()


class Packed(nn.Module):
    """Three products out of one parameter, each as wide as the input is long."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(18, WIDTH))

    def forward(self, x):
        q, k, v = (F.linear(x, self.weight[i : i + 6]) for i in (0, 6, 12))
        return torch.softmax(q @ k.mT, -1) @ v


class Half(nn.Module):
    """A smaller network out of a larger one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, WIDTH))

    def forward(self, x):
        return F.linear(x, self.weight[:16])


def simulated(model, x, *more):
    sim = qsim.QuantSim(model.eval(), [x, *more] if more else x, CONFIG)
    sim.calibrate([x, *more], progress=False)
    return sim


def weights_of(sim):
    return {key: q.spec.axis for key, q in sim.quantizers().items() if "weight" in key and key != "layer.weight"}


def assert_near(sim, model, x):
    with torch.no_grad():
        noise, wanted = sim(x) - model(x), model(x)
    assert noise.square().sum() < 1e-6 * wanted.square().sum()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_table_that_is_cut_to_the_length_has_one_scale(compiled):
    torch.manual_seed(0)
    model, x = Table(), torch.rand(2, 16, WIDTH) - 0.5
    sim = simulated(model, x[:, :8])
    sim.calibrate([x[:, :8], x], progress=False)
    torch._dynamo.reset()
    run = torch.compile(sim, backend="eager") if compiled else sim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (8, 6, 16):
            assert_near(run, model, x[:, :length])
    assert weights_of(sim) == {"matmul.weight": None}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_part_of_another_length_than_its_scales_is_told_and_stays_in_float(compiled):
    torch.manual_seed(0)
    model, x = Table(times=2), torch.rand(2, 16, WIDTH) - 0.5
    sim = simulated(model, x[:, :8])
    sim.calibrate([x[:, :8], x[:, 8:]], progress=False)
    torch._dynamo.reset()
    run = torch.compile(sim, backend="eager") if compiled else sim
    assert_near(run, model, x[:, :8])
    with pytest.warns(UserWarning, match=r"'matmul' \(.*\) ran on what the example inputs did not show it: its operand 1 stays in float"):
        assert_near(run, model, x[:, :6])
    shown = simulated(model, x[:, :8], x[:, :6])  # what the warning says to do
    assert weights_of(shown) == {"matmul.weight": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_near(shown, model, x[:, :6])


def test_parts_of_a_packed_weight_have_scales_for_each_channel():
    model, x = Packed(), torch.rand(2, 6, WIDTH) - 0.5
    sim = simulated(model, x)
    assert set(weights_of(sim).values()) == {0}
    assert len(weights_of(sim)) == 3
    assert_near(sim, model, x)


def test_a_part_that_is_no_length_has_scales_for_each_channel():
    model, x = Half(), torch.rand(2, 6, WIDTH) - 0.5
    sim = simulated(model, x)
    assert weights_of(sim) == {"linear.weight": 0}
    assert_near(sim, model, x)
