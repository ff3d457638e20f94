"""scatter_reduce in a file, against the simulation."""

import numpy as np
import pytest
import torch
from exported import computed
from models import Forward
from torch import nn

import qsim

INDEX = torch.tensor([[0, 1, 2], [1, 1, 4], [4, 0, 2], [1, 3, 2]])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["mean", "sum", "prod", "amax", "amin"])
@pytest.mark.parametrize("places", [4, 3], ids=["as many as values", "fewer"])
def test_is_that_of_the_simulation(reduce, include_self, places, tmp_path):
    torch.manual_seed(0)

    def forward(m, x, index):
        return m.last(m.start(x[:6]).scatter_reduce(0, index, m.values(x[:4]), reduce, include_self=include_self))

    model = Forward(forward, start=nn.Linear(5, 3), values=nn.Linear(5, 3), last=nn.Linear(3, 4))
    x, index = torch.randn(9, 5) - 1.0, INDEX[:places]
    sim = qsim.QuantSim(model.eval(), (x, index), qsim.int8(target="openvino"))
    sim.calibrate([(x, index)], progress=False)
    sim.export(tmp_path / "model.onnx")
    np.testing.assert_allclose(computed(tmp_path / "model.onnx", x, index)[0], sim(x, index).detach().numpy(), atol=1e-5)
