"""Training in eval mode does not go unnoticed."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import qsim


@pytest.fixture
def sim():
    simulated = qsim.QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4))
    simulated.calibrate([torch.randn(8, 4)], progress=False)
    return simulated


def step(sim):
    optimizer = torch.optim.SGD(sim.parameters(), 0.1)
    sim(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def test_training_in_eval_mode_warns_once(sim):
    step(sim)
    with pytest.warns(UserWarning, match=r"while it is in eval mode.*call sim\.train\(\) before"):
        step(sim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(sim)


def test_copies_and_pickles_notice_too(sim):
    for twin in (copy.deepcopy(sim), pickle.loads(pickle.dumps(sim))):
        step(twin)
        with pytest.warns(UserWarning, match="eval mode"):
            step(twin)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))])
def test_to_be_copied_after_a_call_is_no_training(sim, copied):
    sim(torch.randn(8, 4))
    with torch.no_grad():
        next(sim.parameters()).mul_(0.5)  # counts a version that the copy does not
    twin = copied(sim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin(torch.randn(8, 4))
        twin(torch.randn(8, 4))


def test_folding_is_no_training():
    model = nn.Sequential(nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8)).eval()
    sim = qsim.QuantSim(model, torch.randn(1, 4, 4), qsim.Config(batch_norm="keep"))
    sim.calibrate([torch.randn(8, 4, 4)], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(torch.randn(8, 4, 4))
        sim.fold_batch_norms()
        sim(torch.randn(8, 4, 4))


@pytest.mark.parametrize("quiet", ["train", "no_grad", "load", "eval"])
def test_nothing_is_said_where_nobody_trains_there(sim, quiet):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if quiet == "train":
            sim.train()
            step(sim)
            step(sim)
        elif quiet == "no_grad":
            for _ in range(2):
                with torch.no_grad():
                    sim(torch.randn(8, 4))
                    next(sim.parameters()).mul_(0.5)
        elif quiet == "load":
            sim(torch.randn(8, 4))
            sim.load_state_dict(sim.state_dict())
            sim(torch.randn(8, 4))
        else:
            step(sim)
            sim.eval()
            sim(torch.randn(8, 4))


def test_only_batch_norms_in_training_mode_are_named():
    model = nn.Sequential(nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Linear(4, 2)).eval()
    model[4].train()  # a new head
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qsim.QuantSim(model, torch.randn(2, 4, 4))
    model[3].train()
    with pytest.warns(UserWarning, match=r"running statistics of BatchNorm \(3\)"):
        qsim.QuantSim(model, torch.randn(2, 4, 4))
