"""Folded models against the unfolded ones in float64, and the reason for everything that is kept."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def trained(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """In eval mode, with statistics and affine parameters (of both signs) as a training could leave them."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
            m.running_mean.normal_()
            m.running_var.uniform_(0.05, 4)
            m.num_batches_tracked.fill_(100)
            for parameter in m.parameters():
                nn.init.normal_(parameter)
    return model.to(dtype).eval()


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
    """Outputs afterwards equal those of the original in float64, within a few ulp of the terms they are sums of."""
    exact, terms = copy.deepcopy(model).double()(x.double()), magnitude(model, x)
    report = qsim.fold_batch_norms(model, x)
    assert report.folded == expected
    assert report.kept == {}
    assert report.warnings == ()
    ulps = (model(x).double() - exact).abs() / (torch.finfo(x.dtype).eps * terms)
    assert ulps.max() <= (8 if x.dtype is torch.float64 else 3)  # in float64 the original rounds as much


def reasons(model: nn.Module, *args: torch.Tensor) -> dict[str, str]:
    """Why nothing is folded; the model must be unchanged then."""
    before, modules = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    report = qsim.fold_batch_norms(model, args)
    assert report.folded == {}
    assert modules == [type(m) for m in model.modules()]
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0, equal_nan=True)
    return report.kept


def data(dims: int, channels: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, channels, *(7, 6, 5)[:dims]).to(dtype)


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
        self.first = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.Sequential(nn.BatchNorm2d(channels)), nn.ReLU(True)
        )
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


class Forward(nn.Module):
    """A model in one line: modules by name, and a forward that reads them."""

    def __init__(self, forward, **modules: nn.Module) -> None:
        super().__init__()
        for name, m in modules.items():
            self.add_module(name, m)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def conv(**options) -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1, **options)


def bn(**options) -> nn.Module:
    return nn.BatchNorm2d(4, **options)


def tied() -> nn.Module:
    model = Forward(lambda m, x: m.bn(m.conv(x)) + m.other(x), conv=conv(), bn=bn(), other=conv())
    model.other.weight = model.conv.weight
    return model


def with_hook(model: nn.Module) -> nn.Module:
    model.bn.register_forward_hook(lambda *_: None)
    return model


class Scaled(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


class Shifted(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


def in_order(m, x):
    return m.bn(m.conv(x))


def masked(m, x):
    y = m.conv(x)
    return m.bn(y) * (y > 0)


def written_into(m, x):
    y = m.conv(x)
    y[:, 0] = 0
    return m.bn(y)


def written_through_a_view(m, x):
    y = m.conv(x)
    y.view(-1)[0:1].fill_(3)
    return m.bn(y)


def functional(m, x):
    return F.batch_norm(m.conv(x), m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias)


KEPT = {
    "no statistics": (Forward(in_order, conv=conv(), bn=bn(track_running_stats=False)), "'bn' has no running statistics"),
    "residual of the convolution": (
        Forward(lambda m, x: m.bn(y := m.conv(x)) + y, conv=conv(), bn=bn()),
        "the output of 'conv' goes to 'bn' and is also read by 'add'",
    ),
    "returned too": (Forward(lambda m, x: (m.bn(y := m.conv(x)), y), conv=conv(), bn=bn()), "'conv' .* also returned by the model"),
    "mask of the convolution": (Forward(masked, conv=conv(), bn=bn()), "'conv' .* also read by 'mul'"),
    "where of the convolution": (
        Forward(lambda m, x: torch.where((y := m.conv(x)) > 0, m.bn(y), 0), conv=conv(), bn=bn()),
        "'conv' .* read out as a mask or number",
    ),
    "layer called twice": (Forward(lambda m, x: m.bn(m.conv(m.conv(x))), conv=conv(), bn=bn()), "'conv' is called 2 times in one forward"),
    "batch norm called twice": (Forward(lambda m, x: m.bn(m.conv(m.bn(x))), conv=conv(), bn=bn()), "'bn' is called 2 times in one forward"),
    "tied weight": (tied(), "the weight of 'conv' is shared with 'other.weight'"),
    "weight read elsewhere": (
        Forward(lambda m, x: m.bn(m.conv(x)) * m.conv.weight.mean(), conv=conv(), bn=bn()),
        "the weight of 'conv' is also read by 'mean'",
    ),
    "behind concat": (
        Forward(lambda m, x: m.bn(torch.cat([m.conv(x), x], 1)), conv=conv(), bn=nn.BatchNorm2d(8)),
        "'bn' reads 'cat', not the result of a convolution or linear layer as it is",
    ),
    "activation between": (Forward(lambda m, x: m.bn(m.act(m.conv(x))), conv=conv(), act=nn.ReLU(), bn=bn()), "'bn' reads 'act', not"),
    "in-place activation between": (Forward(lambda m, x: m.bn(F.relu(m.conv(x), True)), conv=conv(), bn=bn()), "'bn' reads 'relu', not"),
    "reshape between": (Forward(lambda m, x: m.bn(m.conv(x).transpose(2, 3)), conv=conv(), bn=bn()), "'bn' reads 'conv' through a reshape"),
    "written into": (Forward(written_into, conv=conv(), bn=bn()), "'bn' reads 'conv' through a reshape"),
    "written through a view": (Forward(written_through_a_view, conv=conv(), bn=bn()), "'bn' reads 'conv' through a reshape"),
    "dropout between": (
        Forward(lambda m, x: m.bn(m.drop(m.conv(x))), conv=conv(), drop=nn.Dropout(), bn=bn()),
        "'bn' reads 'conv' through .* in training mode",
    ),
    "zero padding behind": (Forward(lambda m, x: m.conv(m.bn(x)), conv=conv(), bn=bn()), "'bn' runs before 'conv', which pads with zeros"),
    "other padding behind": (
        Forward(lambda m, x: m.conv(m.bn(x)), conv=conv(padding_mode="reflect"), bn=bn()),
        "'conv' pads what it gets from 'bn'",
    ),
    "transposed behind": (
        Forward(lambda m, x: m.conv(m.bn(x)), conv=nn.ConvTranspose2d(4, 4, 2, stride=2), bn=bn()),
        "'bn' runs before 'conv', a transposed convolution",
    ),
    "two readers": (
        Forward(lambda m, x: m.conv(y := m.bn(x)) + y, conv=nn.Conv2d(4, 4, 1), bn=bn()),
        "'bn' reads a model input, not the result",
    ),
    "own forward of the layer": (Forward(in_order, conv=Scaled(4, 4, 3), bn=bn()), r"'conv' \(Scaled\) has a forward of its own"),
    "own forward of the batch norm": (Forward(in_order, conv=conv(), bn=Shifted(4)), r"'bn' \(Shifted\) has a forward of its own"),
    "parametrized": (Forward(in_order, conv=nn.utils.parametrizations.weight_norm(conv()), bn=bn()), "'conv' is parametrized"),
    "hook": (with_hook(Forward(in_order, conv=conv(), bn=bn())), "'bn' has hooks"),
    "not called": (Forward(lambda m, x: m.conv(x), conv=conv(), bn=bn()), "'bn' is not called in eval mode"),
    "functional layer": (
        Forward(lambda m, x: m.bn(F.conv2d(x, m.conv.weight)), conv=conv(), bn=bn()),
        "'conv2d' beside 'bn' is a function call",
    ),
    "channels elsewhere": (
        Forward(lambda m, x: m.bn(m.fc(x)), fc=nn.Linear(6, 6), bn=bn()),
        "'bn' normalizes axis 1, which 'fc' with 4 dimensions does not have its channels on",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_kept_with_reason(case):
    model, reason = KEPT[case]
    (kept,) = reasons(trained(model), data(2)).values()
    assert re.search(reason, kept)
