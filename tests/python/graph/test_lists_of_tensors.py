"""Lists of tensors that are longer or shorter than in the examples."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.stack(list(x.unbind(1)), 1))


class Hidden(Stacked):
    def forward(self, x):
        return torch.cat([F.hardswish(self.layer(part)) for part in x.split(2, 1)], 1)


CASES = [(Stacked, qsim.int8(target="tensorrt")), (Hidden, qsim.bf16()), (Hidden, qsim.int8(target="executorch")), (Hidden, qsim.int8())]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("cls", "config"), CASES, ids=["tensorrt", "bf16", "executorch", "int8"])
def test_shorter_and_longer_lists(cls, config, compiled):
    model, x = cls().eval(), torch.rand(3, 12, 4) - 0.5
    sim = qsim.QuantSim(model, x[:, :8], config)
    sim.calibrate([x[:, :8], x[:, :6]], progress=False)
    torch._dynamo.reset()
    run = torch.compile(sim, backend="eager", dynamic=False) if compiled else sim
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        shorter = run(x[:, :6])
    wanted = model(x)
    assert (shorter - wanted[:, :6]).square().sum() < 1e-3 * wanted.square().sum()
    with torch.no_grad(), pytest.warns(UserWarning, match="took more tensors than the example inputs show: those beyond the first"):
        longer = run(x)
    assert (longer - wanted).square().sum() < 1e-3 * wanted.square().sum()


class WithToken(nn.Module):
    """As in vision transformers: a parameter, quantized where it is read, before what is quantized where it is made."""

    def __init__(self):
        super().__init__()
        self.token, self.layer, self.head = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, more=False):
        y = self.layer(x)
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), y, *([x] if more else [])], 1))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_entries_that_are_quantized_where_they_are_made_are_known(compiled):
    x = torch.randn(3, 5, 4)
    sim = qsim.QuantSim(WithToken().eval(), x, qsim.int8())
    torch._dynamo.reset()
    run = torch.compile(sim, backend="eager") if compiled else sim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.calibrate([x], progress=False)
        run(x)
    with pytest.warns(UserWarning, match="those beyond the first 2 stay in float"):
        run(x, more=True)
