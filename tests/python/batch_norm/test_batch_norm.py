"""Folded models against the unfolded ones in float64, and the reason for everything that is kept."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Forward, data, trained
from torch import nn

import qsim

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def magnitude(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Sum of the absolute terms of each output of a Sequential, in float64: what rounding errors are relative to."""
    absolute = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, t in (*absolute.named_parameters(), *absolute.named_buffers()):
            t.abs_()
            if "running_mean" in name:
                t.neg_()
        return absolute(x.double().abs())


def assert_folds(model: nn.Module, x: torch.Tensor, expected: dict[str, str]) -> None:
    """The layers afterwards compute what the original does, within a few ulp of the terms they are sums of. Both in float64: how a
    convolution rounds its sums depends on the CPU."""
    exact, terms = copy.deepcopy(model).double()(x.double()), magnitude(model, x)
    report = qsim.fold_batch_norms(model, x)
    assert report.folded == expected
    assert report.kept == {}
    assert report.warnings == ()
    ulps = (copy.deepcopy(model).double()(x.double()) - exact).abs() / (torch.finfo(x.dtype).eps * terms)
    assert ulps.max() <= (8 if x.dtype is torch.float64 else 2)  # in float64 the original rounds as much
    assert model(x).dtype is x.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layers", [CONVOLUTIONS, TRANSPOSED])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_after_convolution(dims, layers, groups, bias, dtype):
    model = nn.Sequential(layers[dims](4, 8, 3, stride=2, padding=1, groups=groups, bias=bias), NORMS[dims](8))
    assert_folds(trained(model, dtype), data(dims, dtype=dtype), {"1": "0"})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_before_convolution(dims, groups, bias, dtype):
    model = nn.Sequential(NORMS[dims](4), CONVOLUTIONS[dims](4, 8, 3, stride=2, dilation=2, groups=groups, bias=bias))
    assert_folds(trained(model, dtype), data(dims, dtype=dtype), {"0": "1"})


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_before_pointwise_transposed_convolution(dims, groups):
    model = nn.Sequential(NORMS[dims](4), TRANSPOSED[dims](4, 6, 1, groups=groups))
    assert_folds(trained(model), data(dims), {"0": "1"})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias, dtype):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6))
    assert_folds(trained(model, dtype), torch.randn(5, 4).to(dtype), {"0": "1", "2": "1"})


def test_linear_after():
    assert_folds(trained(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))), torch.randn(5, 4), {"1": "0"})


@pytest.mark.parametrize("options", [{"affine": False}, {"bias": False}, {"momentum": None}, {"eps": 0.1}])
def test_options_of_batch_norm(options):
    assert_folds(trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, **options))), data(2), {"1": "0"})


def test_channels_last_and_padding_without_effect():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 8, 1, padding="same"), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last)
    assert_folds(trained(model), data(2).to(memory_format=torch.channels_last), {"0": "1", "2": "1"})


def test_constant_channel_is_folded():
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)))
    model[1].running_var[3] = 0.0  # a dead channel: eps alone keeps it finite
    assert_folds(model, data(2), {"1": "0"})


def test_sync_batch_norm():
    assert_folds(trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.SyncBatchNorm(8))), data(2), {"1": "0"})


def test_materialized_lazy_modules():
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet: run the model once"):
        qsim.fold_batch_norms(model, data(2))
    model(data(2))
    assert_folds(trained(model), data(2), {"1": "0"})


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        padded = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first = nn.Sequential(padded, nn.Sequential(nn.BatchNorm2d(channels)), nn.ReLU(True))
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.bn(self.conv(self.first(x))) + x)


def test_residual_blocks_in_nested_sequentials():
    model = trained(nn.Sequential(Residual(4), nn.Sequential(Residual(4), nn.Conv2d(4, 2, 1))))
    x, paths = data(2), set(dict(model.named_modules()))
    expected = copy.deepcopy(model).double()(x.double())
    report = qsim.fold_batch_norms(model, x)
    assert report.folded == {"0.first.1.0": "0.first.0", "0.bn": "0.conv", "1.0.first.1.0": "1.0.first.0", "1.0.bn": "1.0.conv"}
    assert paths == set(dict(model.named_modules()))
    assert isinstance(model[0].bn, nn.Identity)
    torch.testing.assert_close(model(x).double(), expected, rtol=2e-5, atol=2e-5)


LAYERS = {
    "norm": lambda: nn.BatchNorm2d(4),
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "unpadded": lambda: nn.Conv2d(4, 4, 1, groups=2, bias=False),
    "reflecting": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
    "pointwise transposed": lambda: nn.ConvTranspose2d(4, 4, 1, groups=2),
    "relu": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(),
    "residual": lambda: Residual(4),
    "pool": lambda: nn.MaxPool2d(3, 1, 1),
}


@given(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6))
@settings(max_examples=25)
def test_any_chain_keeps_its_outputs(names):
    model = trained(nn.Sequential(*(LAYERS[name]() for name in names)), torch.float64)
    norms = {path for path, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    x = data(2, dtype=torch.float64)
    expected = model(x)
    report = qsim.fold_batch_norms(model, x)
    assert {*report.folded, *report.kept} == norms
    assert {path for path, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)} == set(report.kept)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12 * float(expected.detach().abs().max()))


def test_training_mode_is_kept_and_reported():
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Dropout()))
    model[1].num_batches_tracked.zero_()
    expected = model(data := torch.randn(3, 4, 7, 6))
    model.train()
    model[2].eval()
    report = qsim.fold_batch_norms(model, data)
    assert report.warnings == (
        "in training mode, yet folded with the running statistics, as eval mode uses them: '1'",
        "num_batches_tracked is 0: the running statistics may still be the initial ones: '1'",
    )
    assert [m.training for m in model.modules()] == [True, True, True, False]
    torch.testing.assert_close(model(data), expected, rtol=1e-5, atol=1e-5)


def test_training_pass_that_fails_is_reported():
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 5), nn.BatchNorm2d(8)))
    report = qsim.fold_batch_norms(model, torch.randn(1, 4, 5, 5))
    assert report.folded == {"1": "0"}
    assert re.search("could not be recorded in training mode: ValueError: Expected more than 1 value per channel", report.warnings[0])


def test_failing_model_raises_and_stays():
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)))
    with pytest.raises(ValueError, match=r"fold_batch_norms: the model does not run on example_inputs: .* It raised RuntimeError"):
        qsim.fold_batch_norms(model, torch.randn(1, 3, 5, 5))
    assert [type(m) for m in model] == [nn.Conv2d, nn.BatchNorm2d]


def test_frozen_part_is_folded():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            return super().train(False)

    model = trained(Frozen(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    assert qsim.fold_batch_norms(model, data(2)).folded == {"1": "0"}


def test_module_registered_twice_is_replaced_everywhere():
    norm = nn.BatchNorm2d(4)
    model = trained(Forward(lambda m, x: m.bn(m.conv(x)), conv=nn.Conv2d(4, 4, 3), bn=norm, alias=norm))
    assert qsim.fold_batch_norms(model, data(2)).folded == {"bn": "conv"}
    assert isinstance(model.alias, nn.Identity)


def test_parameters_stay_the_same_objects():
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8)))
    model[0].weight.requires_grad_(False)
    weight = model[0].weight
    qsim.fold_batch_norms(model, {"input": data(2)})
    assert model[0].weight is weight
    assert not model[0].bias.requires_grad


def test_report_reads_well():
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)))
    assert str(qsim.fold_batch_norms(model, data(2))).splitlines() == [
        "BatchNorm: 1 folded, 1 kept",
        "  folded '1' into '0'",
        "  kept '3': '3' reads '2', not the result of a convolution or linear layer as it is",
    ]


class Activated(nn.BatchNorm2d):
    """With a forward of its own, as timm's BatchNormAct2d has: it normalizes, then calls its children."""

    def __init__(self, channels: int, **children: nn.Module) -> None:
        super().__init__(channels)
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum, self.eps)
        for child in self.children():
            x = child(x)
        return x


class Doubled(Activated):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("children", [{}, {"drop": nn.Dropout(), "act": nn.ReLU(inplace=True)}, {"act": nn.PReLU(8)}])
def test_a_batch_norm_that_calls_its_children(children):
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), Activated(8, **children), nn.Conv2d(8, 4, 1)))
    x, before = torch.randn(4, 3, 9, 9), copy.deepcopy(model)
    report = qsim.fold_batch_norms(model, x)
    assert report.folded == {"1": "0"}
    assert [name for name, _ in model[1].named_children()] == list(children)
    torch.testing.assert_close(model(x), before(x), rtol=1e-5, atol=1e-5)


def test_a_batch_norm_that_does_more_stays():
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), Doubled(8, act=nn.ReLU())))
    report = qsim.fold_batch_norms(model, torch.randn(4, 3, 9, 9))
    assert not report.folded
    assert "'1' (Doubled) has a forward of its own" in report.kept["1"]


def test_states_of_a_batch_norm_with_children_load():
    """Into the simulation that folded it: what its children learned stays theirs."""
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), Activated(8, act=nn.PReLU(8)), nn.Conv2d(8, 4, 1)))
    x = torch.randn(4, 3, 9, 9)
    sim = qsim.QuantSim(model, x, qsim.int8())
    other = trained(copy.deepcopy(model))
    nn.init.uniform_(other[1].act.weight)
    sim.load_state_dict(other.state_dict())
    sim.load_state_dict(sim.state_dict())
    with sim.in_float():
        torch.testing.assert_close(sim(x), other(x), rtol=1e-5, atol=1e-5)


class Same(nn.Conv2d):
    """Pads by itself, as timm's Conv2dSame does: uneven where the stride asks for it."""

    def forward(self, x):
        return F.conv2d(F.pad(x, [0, 1, 0, 1]), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [7, 8])
def test_a_convolution_that_pads_by_itself(bias, size):
    model = trained(nn.Sequential(Same(4, 8, 3, stride=2, groups=2, bias=bias), nn.BatchNorm2d(8)))
    x, before = torch.randn(4, 4, size, size), copy.deepcopy(model)
    assert qsim.fold_batch_norms(model, x).folded == {"1": "0"}
    torch.testing.assert_close(model(x), before(x), rtol=1e-5, atol=1e-5)


def test_a_simulation_is_told_that_it_folds_its_own():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
    sim = qsim.QuantSim(model, torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"sim\.fold_batch_norms"):
        qsim.fold_batch_norms(sim, torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("inplace", [False, True])
def test_folding_within_autocast_forgets_what_it_cast(inplace):
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)).eval()
    model[1].running_mean.normal_()
    model[1].running_var.fill_(16.0)
    x = torch.randn(3, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)  # the cast of the weight is kept until the block ends
        sim = qsim.QuantSim(model, x, inplace=inplace)
        sim.calibrate([x], progress=False)
        with sim.in_float():
            torch.testing.assert_close(sim(x), wanted, rtol=0.02, atol=0.02)
    assert torch.is_autocast_cache_enabled()
