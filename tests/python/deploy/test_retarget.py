"""A simulation for another target goes on with all that this one was made for, and with what became of it since."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from models import Forward
from restorable import batches_of, calibrated
from torch import nn

import qsim

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def two_paths(config=None):
    torch.manual_seed(0)
    layers = {"stem": nn.Linear(8, 8), "wide": nn.Linear(8, 4), "narrow": nn.Linear(8, 4)}
    model = Forward(lambda m, x, wide=True: m.wide(F.relu(m.stem(x))) if wide else torch.sigmoid(m.narrow(m.stem(x))), **layers)
    sim = qsim.QuantSim(model.eval(), [{"x": X}, {"x": X, "wide": False}], config)
    sim.calibrate([{"x": X}, {"x": 3 * X, "wide": False}], progress=False)
    return sim


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "default"])
def test_every_example_call_is_retargeted(target):
    got, wanted = two_paths().retarget(target), two_paths(qsim.int8(target=target))
    assert got.encodings() == wanted.encodings()
    for wide in (True, False):
        assert torch.equal(got(X, wide=wide), wanted(X, wide=wide))


@pytest.mark.filterwarnings("ignore:QuantSim. what runs in float")
def test_that_it_was_restored_is_known_there():
    sim = calibrated(config=qsim.int4())
    sim.solve_weights(batches_of(8), progress=False)
    assert sim.restored
    got = sim.retarget("tensorrt")
    with pytest.warns(UserWarning, match="is not the float model any more"), got.in_float():
        pass
    with pytest.raises(ValueError, match="were solved for already"):
        got.restore(batches_of(2), progress=False)


def test_batch_norms_that_were_frozen_stay_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    sim = qsim.QuantSim(model, X, dataclasses.replace(qsim.int8(), batch_norm="keep"))
    sim.calibrate([X], progress=False)
    sim.freeze_batch_norms("*")
    assert not sim.retarget("openvino").train().model[1].training


def test_weights_that_no_batch_read_are_known_there():
    torch.manual_seed(0)
    model = Forward(lambda m, x, wide=True: m.wide(x) if wide else m.narrow(x), wide=nn.Linear(8, 4), narrow=nn.Linear(8, 4))
    sim = qsim.QuantSim(model.eval(), [{"x": X}, {"x": X, "wide": False}], qsim.w4a16(group=None).override("*", weight={"bits": 4}))
    sim.calibrate([{"x": X}], progress=False)
    assert sim.unread() == ["narrow.weight"]
    assert sim.retarget(sim.config.target).unread() == ["narrow.weight"]


def test_the_method_that_was_set_stays():
    sim, wanted = two_paths(), two_paths(qsim.int8(target="tensorrt"))
    for each in (sim, wanted):
        each.set_method("percentile", percentile=90.0)
    assert sim.retarget("tensorrt").encodings() == wanted.encodings()
