"""Parts of outputs that a concatenation made: what each loses is told."""

from dataclasses import replace

import pytest
import torch
from exported import computed
from torch import Tensor, nn

import qsim
from qsim.config.profile import ONNXRUNTIME

CONFIG = qsim.int8(target="onnxruntime")
JOINED = qsim.int8(target=replace(ONNXRUNTIME, kernels=()))  # with a grid behind every concatenation, also one that is returned


class Detector(nn.Module):
    """Boxes up to 96, and scores from 0 to 1, in one output."""

    def __init__(self, order=(0, 1, 2, 3)):
        super().__init__()
        self.stem, self.boxes, self.scores, self.order = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 6, 1), order

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return torch.cat([self.boxes(x) * 60, torch.sigmoid(self.scores(x) - 3)], 1).permute(self.order)


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(n))


def verified(config: qsim.Config, path, order=(0, 1, 2, 3)):
    torch.manual_seed(0)
    model = Detector(order).eval()
    sim = qsim.QuantSim(model, images(2), config)
    sim.calibrate([images(32)], progress=False)
    return model, sim.export(path, verify=[images(5), images(7)]).verification


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [((0, 1, 2, 3), "[:, 0:4]", "[:, 4:10]"), ((2, 0, 3, 1), "[:, :, :, 0:4]", "[:, :, :, 4:10]")],
    ids=["as joined", "permuted"],
)
def test_a_part_that_drowns_is_named_with_its_loss(order, first, second, tmp_path):
    path, batches, back = tmp_path / "model.onnx", [images(5), images(7)], torch.tensor(order).argsort().tolist()
    model, found = verified(JOINED, path, order)
    parts = found.parts["output"]
    assert list(parts) == [first, second]
    with torch.no_grad():
        wanted = torch.cat([model(x).permute(back) for x in batches])
    got = torch.cat([torch.from_numpy(computed(path, x, optimised=True)[0]).permute(back) for x in batches])
    for part, channels in ((first, slice(0, 4)), (second, slice(4, 10))):
        signal, noise = (t.double()[:, channels].square().sum() for t in (wanted, wanted - got))
        assert parts[part].sqnr == pytest.approx(float(10 * torch.log10(signal / noise)))
    (sentence,) = found.drowned
    assert sentence in str(found)
    assert f"its part {second} has" in sentence
    assert sentence.endswith("Config.override('cat', activation=None), or return them apart")


@pytest.mark.parametrize("config", [JOINED.override("cat", activation=None), CONFIG], ids=["the cure", "the default"])
def test_parts_on_grids_of_their_own_do_not_drown(config, tmp_path):
    _, found = verified(config, tmp_path / "model.onnx")
    assert min(d.sqnr for d in found.parts["output"].values()) > 20
    assert found.drowned == []


def test_other_outputs_have_no_parts(tmp_path):
    sim = qsim.QuantSim(nn.Linear(4, 3).eval(), torch.randn(2, 4), CONFIG)
    sim.calibrate([torch.randn(8, 4)], progress=False)
    assert sim.export(tmp_path / "model.onnx", verify=True).verification.parts == {}
