"""Sums of two products against brute force, and the layers that could saturate without VNNI."""

from itertools import combinations

import pytest
import torch
from models import seeded
from torch import nn

import qsim
from qsim.integer.kernels.pairs import largest_pair
from qsim.onnx.sessions import EXACT_SUMS

X = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def brute_force(rows: torch.Tensor) -> int:
    ends = (0, 255)
    return max(abs(x * a + y * b) for row in rows.tolist() for a, b in combinations(row, 2) for x in ends for y in ends)


@pytest.mark.parametrize("shape", [(4, 7), (3, 2, 3, 3), (5, 2)])
@pytest.mark.parametrize("low", [-128, 0, -20])
def test_largest_pair_is_that_of_all_pairs_and_activations(shape, low):
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        weight = torch.randint(low, 128, shape, generator=generator).to(torch.int8)
        assert largest_pair(weight, 0) == brute_force(weight.flatten(1))
        assert largest_pair(weight.movedim(0, -1), -1) == brute_force(weight.flatten(1))
        assert largest_pair(weight, None) == brute_force(weight.reshape(1, -1))


def test_single_and_no_products():
    assert largest_pair(torch.tensor([[-128], [5]], dtype=torch.int8), 0) == 255 * 128
    assert largest_pair(torch.zeros(0, 4, dtype=torch.int8), 0) == 0


class Layers(nn.Module):
    """A convolution, a linear layer and a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(64, 5)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.fc(x.flatten(1)), x @ x.mT


def simulated(**weight) -> qsim.QuantSim:
    config = qsim.int8(target="onnxruntime").override("conv", weight=weight) if weight else qsim.int8(target="onnxruntime")
    sim = qsim.QuantSim(seeded(Layers), X, config)
    with torch.no_grad():
        sim.model.fc.weight.fill_(1e-3)[:, 3] = 0.5  # one large weight a channel: no two of them in a sum
    sim.calibrate([X], progress=False)
    return sim


def test_layers_that_could_saturate_are_told():
    found = {kernel.name: kernel for kernel in simulated().kernels()}
    assert {name: kernel.saturates for name, kernel in found.items()} == {"conv": True, "fc": False, "matmul": False}
    assert found["fc"].pair == 255 * 127
    assert found["matmul"].pair is None
    assert not any(kernel.saturates for kernel in simulated(bits=7).kernels())


@pytest.mark.parametrize(("weight", "told"), [({}, True), ({"bits": 7}, False)])
def test_a_file_of_which_no_layer_could_needs_no_option(weight, told, tmp_path):
    report = simulated(**weight).export(tmp_path / "model.onnx")
    assert (EXACT_SUMS in " ".join([*report.session_options, *report.notes])) == told


def test_int8_activations_make_no_such_products():
    sim = qsim.QuantSim(seeded(Layers), X, qsim.int8(target="onnxruntime").override("*", activation={"signed": True}))
    sim.calibrate([X], progress=False)
    assert [kernel.pair for kernel in sim.kernels()] == [None] * 3
