"""`torch.vmap` in a forward: files and integers compute what the simulation does."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exported import computed, expected
from models import Forward
from torch import Tensor, nn

import qsim

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def causal(m: nn.Module, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    seen = torch.vmap(torch.vmap(lambda q, k: k <= q, in_dims=(None, 0)), in_dims=(0, None))(at, at)
    q, k = m.a(x), m.b(x)
    return (q @ k.mT).masked_fill(~seen, -1e9).softmax(-1) @ q


def unread(m: nn.Module, x: Tensor) -> Tensor:
    y = m.a(x)
    torch.vmap(torch.tanh)(y)
    return y


def into_part(m: nn.Module, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :2] = torch.vmap(torch.relu)(m.b(x))[:, :2]
    return y * 2.0


FORWARDS = {
    "an activation": lambda m, x: m.b(torch.vmap(torch.tanh)(m.a(x))),
    "layers": lambda m, x: torch.vmap(lambda row: torch.tanh(m.a(row)) * row)(x),
    "nested": lambda m, x: torch.vmap(torch.vmap(lambda row: torch.sigmoid(m.a(row)) * row))(x),
    "a later axis": lambda m, x: m.b(torch.vmap(lambda x: torch.tanh(x) * x, in_dims=2)(torch.stack([m.a(x), x], 2))),
    "weights": lambda m, x: torch.vmap(lambda weight: F.linear(m.a(x), weight))(m.weights),
    "masks": causal,
    "unread": unread,
    "into a part": into_part,
}
CONFIGS = {"int8": qsim.int8(), "a scale for each token": qsim.w8a8_dynamic()}


def simulated(forward, config: qsim.Config) -> qsim.QuantSim:
    torch.manual_seed(0)
    model = Forward(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.weights = nn.Parameter(torch.randn(3, 8, 8))
    sim = qsim.QuantSim(model.eval(), X, config)
    sim.calibrate([X], progress=False)
    return sim


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("name", [name for name in FORWARDS if name != "weights"])
def test_files_and_integers(name, config, tmp_path):
    sim = simulated(FORWARDS[name], config)
    sim.export(tmp_path / "m.onnx")
    x = X * 0.9
    (wanted,), (found,) = expected(sim, x), computed(tmp_path / "m.onnx", x)
    step = max((float(e.scale.max()) for e in sim.encodings().values()), default=0.0)
    assert np.abs(found - wanted).max() <= max(1.01 * step if config is CONFIGS["int8"] else 0.0, 1e-5)
    assert (np.abs(found - wanted) > 1e-5).mean() < 0.01
    with sim.integer():
        (integers,) = expected(sim, x)
    assert (np.abs(integers - wanted) > 1e-5).mean() < 0.01


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scales_of_what_is_mapped_over(tmp_path):
    """As many samples as channels: another axis would fit as well, and be wrong."""
    sim = simulated(FORWARDS["weights"], qsim.int8())
    with pytest.raises(qsim.ExportError, match=r"'linear.weight' has several scales, along axis 0 of a tensor that a torch.vmap"):
        sim.export(tmp_path / "m.onnx")
    sim = simulated(FORWARDS["weights"], qsim.int8().override("linear", weight={"axis": None}))
    sim.export(tmp_path / "m.onnx")
    np.testing.assert_allclose(computed(tmp_path / "m.onnx", X)[0], expected(sim, X)[0], rtol=0, atol=1e-5)
