"""`qsim.quantize`: one call to a goal."""

import math

import pytest
import torch
from torch import nn

import qsim


def problem(bits_matter=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6)).eval()
    x, unseen = torch.randn(512, 16), torch.randn(512, 16)
    with torch.no_grad():
        labels = model(unseen).argmax(1)

    def accuracy(network, data):
        assert len(data) == 8
        assert not network.training
        return float((network(unseen).argmax(1) == labels).float().mean())

    return model, x[:1], list(x.split(64)), accuracy


def test_ends_at_the_first_that_reaches_the_goal():
    model, example, data, accuracy = problem()
    before = [p.clone() for p in model.parameters()]
    found = qsim.quantize(model, example, data, accuracy, goal=0.95, progress=False)
    assert found.reached
    assert [each.name for each in found.trail] == ["calibrate"]
    assert accuracy(found.sim, data) == found.trail[0].metric
    assert found.sim.config.target == "onnxruntime"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_frozen_parameters_are_told():
    model, example, data, accuracy = problem()
    assert not qsim.quantize(model, example, data, accuracy, goal=0.5, progress=False).notes
    model[0].requires_grad_(False)
    found = qsim.quantize(model, example, data, accuracy, goal=0.5, progress=False)
    assert [note.partition(":")[0] for note in found.notes] == ["2 parameters are frozen (requires_grad=False)"]
    assert "requires_grad_(True)" in str(found)


def test_what_is_dearer_is_tried_where_it_takes_more():
    model, example, data, accuracy = problem()
    config = qsim.Config(weight=qsim.TensorSpec(bits=3, symmetric=True, axis=0, method="minmax"), activation=qsim.TensorSpec(bits=8))
    found = qsim.quantize(model, example, data, accuracy, goal=0.925, config=config, progress=False)
    assert found.reached
    assert found.trail[-1].name.startswith("restore")
    assert max(each.metric for each in found.trail[:-1]) < found.goal <= found.trail[-1].metric
    assert accuracy(found.sim, data) == found.trail[-1].metric
    assert "reached" in str(found)


def test_a_goal_out_of_reach_returns_the_best_and_the_whole_trail():
    model, example, data, accuracy = problem()
    trained = []
    config = qsim.Config(weight=qsim.TensorSpec(bits=2, symmetric=True, axis=0), activation=qsim.TensorSpec(bits=2))
    metric = lambda network, batches: accuracy(network, batches) if isinstance(network, qsim.QuantSim) else 2.0  # noqa: E731
    found = qsim.quantize(model, example, data, metric, goal=1.0, config=config, train=trained.append, progress=False)
    assert not found.reached
    assert len(trained) == 1
    assert accuracy(found.sim, data) == max(each.metric for each in found.trail)
    assert [each.name for each in found.trail][:4] == ["calibrate", "ranges by mse", "ranges by percentile", "ranges by minmax"]
    assert any("in float" in each.name for each in found.trail)
    assert "not reached" in str(found)


def test_a_loss_is_lower_where_it_is_better_and_time_ends_it():
    model, example, data, _ = problem()

    def loss(network, batches):
        return 1.0 + sum(float((network(x) - model(x)).square().mean()) for x in batches)

    found = qsim.quantize(model, example, data, loss, goal=0.5, higher_is_better=False, progress=False)
    assert found.goal == pytest.approx(2.0)
    assert found.reached
    short = qsim.quantize(model, example, data, loss, goal=1.0, higher_is_better=False, seconds=0.0, progress=False)
    assert len(short.trail) == 1


def test_what_cannot_be_a_goal_is_an_error():
    model, example, data, accuracy = problem()
    with pytest.raises(ValueError, match=r"goal=1\.5"):
        qsim.quantize(model, example, data, accuracy, goal=1.5, progress=False)
    with pytest.raises(ValueError, match="metric is nan"):
        qsim.quantize(model, example, data, lambda *_: math.nan, progress=False)
    with pytest.raises(qsim.CalibrationError, match="no batch"):
        qsim.quantize(model, example, [], accuracy, progress=False)
