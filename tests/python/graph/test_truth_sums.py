"""Python's own sums begin with 0: what is added to it is on its grid already, and runs as it is wherever the simulation does."""

import pytest
import torch
from integer_networks import by_runtime, differing
from models import seeded
from torch import Tensor, nn

import qsim


class Summing(nn.Module):
    """Branches that are summed, by one gate for all of them, as networks for re-identification have it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(4, 4, kernel, padding=kernel // 2) for kernel in (1, 3, 5))
        self.gate, self.last, self.how = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1), how

    def forward(self, x: Tensor) -> Tensor:
        branches = [branch(x) for branch in self.branches]
        parts = [y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid() for y in branches]
        if self.how == "sum":
            return self.last(sum(parts))
        if self.how == "other":
            return self.last(parts[0] + parts[1] + parts[2])
        total: Tensor | float = 0.0
        for part in parts:
            total = total + part
        return self.last(total)


def simulated(how: str, target: str) -> tuple[qsim.QuantSim, Tensor]:
    model = seeded(Summing, how)
    x = torch.randn(8, 4, 9, 9)
    sim = qsim.QuantSim(model.eval(), x, qsim.int8(target=target))
    sim.calibrate([x], progress=False)
    return sim, x


@pytest.mark.parametrize("target", ["default", "onnxruntime", "tensorrt", "openvino"])
@pytest.mark.parametrize("how", ["sum", "loop"])
def test_a_sum_from_zero_is_that_of_its_terms(how, target):
    (sim, x), (other, _) = simulated(how, target), simulated("other", target)
    assert len(sim.quantizers()) == len(other.quantizers())
    torch.testing.assert_close(sim(x), other(x), rtol=0, atol=0)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(x), sim(x), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["sum", "loop"])
def test_the_runtime_has_the_same_integers(how, tmp_path):
    sim, x = simulated(how, "onnxruntime")
    with torch.no_grad(), sim.integer():
        found = sim(x)
    assert all(kernel.kernel for kernel in sim.kernels())
    assert differing(found, by_runtime(sim, x, tmp_path)[0]) == (0, found.numel())
