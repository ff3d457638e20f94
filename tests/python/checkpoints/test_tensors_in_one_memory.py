"""Tensors that lie in one memory: views are written each, one tensor once, and a file that has two for it is refused."""

import pytest
import torch
from torch import nn

import qsim

safetensors = pytest.importorskip("safetensors.torch")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
FOUR = qsim.Config(qsim.w4a16(group=32).weight, None)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 8)
        whole = torch.randn(8, 8)
        for name, t in {"whole": whole, "first": whole[0], "flat": whole.view(-1), "turned": whole.T, "same": whole}.items():
            self.register_buffer(name, t)

    def forward(self, x):
        return self.fc(x) * self.whole[3] + self.first + self.flat[:8] + self.turned[2] + self.same[1]


class TwoHeads(nn.Module):
    def __init__(self, tied) -> None:
        super().__init__()
        self.mid, self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.a(x) + self.b(self.mid(x))


def simulated(model, config=FOUR):
    sim = qsim.QuantSim(model.eval(), X, config)
    sim.calibrate([X], progress=False)
    return sim


def test_views_are_written_each(tmp_path):
    torch.manual_seed(0)
    sim = simulated(Viewed())
    sim.save_compressed(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    names = {"whole", "first", "flat", "turned"}
    assert {name for name in tensors if not name.startswith("fc.")} == names
    assert all(torch.equal(tensors[name], getattr(sim.model, name)) for name in names)
    again = simulated(Viewed())
    again.load_compressed(tmp_path)
    assert torch.equal(again(X), sim(X))

    del tensors["first"]
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'first' is not in the checkpoint"):
        again.load_compressed(tmp_path)


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_two_tensors_of_a_file_that_are_one_of_the_model(name, tmp_path):
    config = FOUR.override("a", weight=None).override("b", weight=None)
    untied = simulated(TwoHeads(tied=False), config)
    untied.save_compressed(tmp_path)
    tied = simulated(TwoHeads(tied=True), config)
    before = {key: t.clone() for key, t in tied.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'a\.weight' and 'b\.weight' are one tensor of the model, and two in the checkpoint that differ"):
        tied.load_compressed(tmp_path)
    assert all(torch.equal(t, before[key]) for key, t in tied.model.state_dict().items())

    checkpoint = qsim.load_checkpoint(tmp_path)
    same = {**checkpoint.tensors, **dict.fromkeys(("a.weight", "b.weight"), checkpoint.tensors[name])}
    tied.load_compressed(qsim.Checkpoint(checkpoint.weights, same, checkpoint.format))
    assert torch.equal(tied.model.b.weight, checkpoint.tensors[name])
