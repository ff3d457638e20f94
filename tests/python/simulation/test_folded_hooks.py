"""Hooks between a layer and the BatchNorm that was folded into it see other tensors than in the float model, and are told."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import qsim


def model():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()
    for norm in (net[1], net[3]):
        norm.running_var.fill_(4.0)
    return net


@pytest.fixture
def sim():
    x = torch.randn(2, 3, 8, 8)
    sim = qsim.QuantSim(model(), x)
    sim.calibrate([x], progress=False)
    return sim


def look(module, args, out):
    return None


def before(module, args):
    return None


def gradient(module, grad_input, grad_output):
    return None


HOOKS = {
    "layer, forward": (0, lambda m: m.register_forward_hook(look), "'0'.*'0' computes with '1' folded into it, normalized already"),
    "layer, backward": (0, lambda m: m.register_full_backward_hook(gradient), "'0'.*'1' folded"),
    "layer, before its backward": (0, lambda m: m.register_full_backward_pre_hook(lambda m, g: None), "'0'.*'1' folded"),
    "norm, before": (1, lambda m: m.register_forward_pre_hook(before), "'1'.*'1' folded"),
    "norm in front": (3, lambda m: m.register_forward_hook(look), "'3'.*normalization of '3' still to come"),
    "layer behind its norm": (4, lambda m: m.register_forward_pre_hook(before), "'4'.*normalization of '3' still to come"),
}


@pytest.mark.parametrize(("at", "register", "told"), HOOKS.values(), ids=HOOKS)
def test_hooks_between_a_layer_and_its_batch_norm_are_told(sim, at, register, told):
    register(sim.model[at])
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=f"a hook on {told}"):
        sim(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(x)


class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 1.5


@pytest.mark.parametrize(("at", "told"), [(at, told) for at, _, told in HOOKS.values()], ids=HOOKS)
def test_wrappers_between_a_layer_and_its_batch_norm_are_told(sim, at, told):
    sim.model[at] = Adapter(sim.model[at])
    with pytest.warns(UserWarning, match=f"the Adapter around {told}"):
        sim(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))], ids=["copied", "pickled"])
def test_wrappers_in_copies_are_told(sim, copied):
    other = copied(sim)
    other.model[0] = Adapter(other.model[0])
    with pytest.warns(UserWarning, match="the Adapter around '0'"):
        other(torch.randn(2, 3, 8, 8))


def test_wrappers_of_torch_are_not_told(sim):
    sim.model[0] = torch.compile(sim.model[0], backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "QuantSim.* around ")
        sim(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim))], ids=["copied", "pickled"])
def test_hooks_on_copies_are_told(sim, copied):
    other = copied(sim)
    other.model[0].register_forward_hook(look)
    with pytest.warns(UserWarning, match="a hook on '0'"):
        other(torch.randn(2, 3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(torch.randn(2, 3, 8, 8))


QUIET = {
    "behind the norm": lambda net: net[1].register_forward_hook(look),
    "before the layer": lambda net: net[0].register_forward_pre_hook(before),
    "activation": lambda net: net[2].register_forward_hook(look),
}


@pytest.mark.parametrize("register", QUIET.values(), ids=QUIET)
def test_hooks_elsewhere_see_what_they_see_in_float(sim, register):
    register(sim.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(torch.randn(2, 3, 8, 8))


def test_where_nothing_is_folded_nothing_is_told():
    x, net = torch.randn(2, 3, 8, 8), model()
    net[0].register_forward_hook(look)  # keeps its BatchNorm from folding
    sim = qsim.QuantSim(net, x)
    kept = qsim.QuantSim(model(), x, qsim.Config(batch_norm="keep"))
    kept.model[0].register_forward_hook(look)
    for each in (sim, kept):
        each.calibrate([x], progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            each(x)


def test_the_librarys_own_hooks_are_not_told(sim, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with qsim.numeric_log(sim, tmp_path / "run.qlog"):
            assert sim.model[0]._forward_hooks
            sim(torch.randn(2, 3, 8, 8))


def test_what_was_folded_after_training_is_told():
    x = torch.randn(2, 3, 8, 8)
    sim = qsim.QuantSim(model(), x, qsim.Config(batch_norm="keep"))
    sim.calibrate([x], progress=False)
    sim.fold_batch_norms()
    sim.model[0].register_forward_hook(look)
    with pytest.warns(UserWarning, match="a hook on '0'"):
        sim(x)


@pytest.mark.parametrize("write", [torch.relu_, lambda y: y.add_(1)], ids=["rectified", "added to"])
def test_what_a_full_backward_hook_hands_on_may_be_written_to(write):
    """As Grad-CAM has it: behind a BatchNorm in float, which returns a tensor of its own."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.head(write(self.norm(self.conv(x))))

    x, seen = torch.randn(2, 3, 8, 8), []
    sim = qsim.QuantSim(Written().eval(), x)
    sim.calibrate([x], progress=False)
    plain = sim(x)
    plain.square().sum().backward()
    wanted = {name: p.grad for name, p in sim.model.named_parameters()}
    sim.model.zero_grad()
    sim.model.conv.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0]))
    with pytest.warns(UserWarning, match="a hook on 'conv'"):
        hooked = sim(x)
    hooked.square().sum().backward()
    assert torch.equal(hooked, plain)
    assert all(torch.equal(p.grad, wanted[name]) for name, p in sim.model.named_parameters())
    assert seen[0].shape == (2, 4, 6, 6)
    assert torch.equal(sim(x), plain)
