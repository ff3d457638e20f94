"""Blocks that torch.export traces apart are part of the graph: every quantizer in them stands in the file, and among the integers."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.errors import CaptureError
from qsim.trace.capture import capture


class Blocks(nn.Module):
    """Calls `block` between two layers."""

    def __init__(self, block, last=True):
        super().__init__()
        self.a, self.b, self.block = nn.Linear(8, 8), nn.Linear(8, 8) if last else nn.Identity(), block

    def forward(self, x):
        return self.b(self.block(self.a(x)))


def without_autocast(x):
    with torch.autocast(device_type="cpu", enabled=False):
        y = x.float() @ x.float().mT
        return y @ x, y.relu()


def in_float32(x):
    out, _ = without_autocast(x)
    return out


def both(x):
    out, y = without_autocast(x)
    return out + y.mean(-1, keepdim=True)


def one_in_another(x):
    with torch.autocast(device_type="cpu", enabled=False):
        y = x * 2
        with torch.no_grad():
            z = torch.sigmoid(y)
            with torch.autocast(device_type="cpu", enabled=False):
                z = z @ z.mT
        return z @ y


def switched_on_and_off(x):
    with torch.no_grad():
        y = torch.relu(x)
    with torch.enable_grad():
        return y * torch.sigmoid(x)


def unchanged(x):
    with torch.autocast(device_type="cpu", enabled=False):
        y = x + 1
        return x * y.sigmoid()


def checkpointed(x):
    return checkpoint(lambda t: torch.relu(t @ t.mT) @ t, x, use_reentrant=False)


FORMS = [in_float32, both, one_in_another, switched_on_and_off, unchanged, checkpointed]


@pytest.mark.parametrize("last", [True, False], ids=["read", "returned"])
@pytest.mark.parametrize("block", FORMS, ids=lambda f: f.__name__)
def test_the_file_has_the_simulations_integers(block, last, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    sim = qsim.QuantSim(Blocks(block, last).eval(), x, qsim.int8(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime", verify=[x])
    assert set(report.names) >= {key for key in sim.quantizers() if key != "relu.output"}  # which nothing may read
    assert all(d.mismatching == 0 for d in report.verification.differences["on integers", "optimised"].values())
    with torch.no_grad():
        graph = capture(sim, (x,), {}).exported.graph_module
        assert not [child for child in graph.children() if isinstance(child, GraphModule)]
        expected = sim(x)
        with sim.integer():
            assert (sim(x) - expected).abs().max() <= 1.01 * float(list(sim.encodings().values())[-1].scale)


def in_bfloat16(x):
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        return ((x @ x.mT) @ x).float()


def by_values(x):
    return torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (x,))


def again_and_again(x):
    return while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 0.5), (torch.tensor(0), x))[1]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (in_bfloat16, "torch.autocast in torch.bfloat16.*x.to"),
        (by_values, "cond.*take it out of forward"),
        (again_and_again, "while_loop.*take it out of forward"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(block, said, tmp_path):
    x = torch.randn(3, 8, 8)
    sim = qsim.QuantSim(Blocks(block).eval(), x, qsim.int8(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    with pytest.raises(CaptureError, match=said):
        sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert not list(tmp_path.iterdir())
    with pytest.raises(CaptureError, match=said), sim.integer(), torch.no_grad():
        sim(x)
