"""Folded models against the unfolded ones in float64, and the reason for everything that is kept."""

import copy
import re
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
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
    assert ulps.max() <= (8 if x.dtype is torch.float64 else 2)  # in float64 the original rounds as much


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


def with_hook(name: str) -> nn.Module:
    model = Forward(in_order, conv=conv(), bn=bn())
    model.get_submodule(name).register_forward_hook(lambda *_: None)
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


def remembered(m, x):
    m.feature = m.conv(x)
    return m.bn(m.feature)


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
    "parametrized": (
        Forward(in_order, conv=nn.utils.parametrizations.weight_norm(conv()), bn=bn()),
        "the weight of 'conv' is computed anew in each call",
    ),
    "hook on the batch norm": (with_hook("bn"), "'bn' has hooks, which would see other tensors"),
    "hook on the layer": (with_hook("conv"), "'conv' has hooks, which would see other tensors"),
    "parametrized batch norm": (
        Forward(in_order, conv=conv(), bn=nn.utils.parametrize.register_parametrization(bn(), "weight", nn.Softplus())),
        "'bn' is parametrized",
    ),
    "kept in an attribute": (Forward(remembered, conv=conv(), bn=bn()), "'conv' .* returned by the model or read out"),
    "returned in an object": (
        Forward(lambda m, x: types.SimpleNamespace(y=[m.bn(y := m.conv(x)), y]), conv=conv(), bn=bn()),
        "'conv' .* returned by the model",
    ),
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


def test_functional_batch_norm_is_kept():
    kept = reasons(trained(Forward(functional, conv=conv(), bn=bn())), data(2))
    assert kept["batch_norm"] == "'batch_norm' is a call of F.batch_norm, not a module that could be taken out of the model"
    assert kept["bn"] == "'bn' is not called in eval mode with these example inputs"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_by_hook_is_kept():
    model = trained(Forward(in_order, conv=nn.utils.weight_norm(conv()), bn=bn()))
    assert reasons(model, data(2)) == {
        "bn": "the weight of 'conv' is computed anew in each call (a parametrization, weight_norm or the like)"
    }


def degenerate(**changes: float) -> nn.Module:
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, eps=changes.pop("eps", 1e-5))))
    for name, value in changes.items():
        getattr(model[1], name).data[5] = value
    return model


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"running_var": float("nan")}, "its running_var is not finite"),
        ({"running_var": float("inf")}, "its running_var is not finite"),
        ({"running_var": -1e-6}, "its running_var is negative"),
        ({"running_var": 0.0, "eps": 0.0}, "its running_var and eps are both zero"),
        ({"running_var": 1e-30, "eps": 0.0, "weight": 1.0}, "it would multiply by more than 8.39e+06 (weight / sqrt(running_var + eps))"),
        ({"running_mean": float("inf")}, "its running_mean is not finite"),
        ({"weight": float("nan")}, "its weight is not finite"),
        ({"bias": float("-inf")}, "its bias is not finite"),
    ],
)
def test_degenerate_statistics_are_named(changes, why):
    assert reasons(degenerate(**changes), data(2)) == {"1": f"'1' has degenerate statistics: {why} in 1 of 8 channels, first in 5"}


def test_overflow_of_the_type_is_kept():
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)), torch.float16)
    model[0].weight.data[0, 0, 0, 0], model[1].running_var[0], model[1].weight.data[0] = 1000, 0, 1
    kept = reasons(model, data(2, dtype=torch.float16))
    assert kept == {"1": "the weight of '0' with '1' folded into it would not be finite in torch.float16"}


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
    with pytest.raises(ValueError, match="fold_batch_norms: the model could not be recorded in eval mode: RuntimeError"):
        qsim.fold_batch_norms(model, torch.randn(1, 3, 5, 5))
    assert [type(m) for m in model] == [nn.Conv2d, nn.BatchNorm2d]


def test_branch_of_training_alone():
    """A second reader that only training has keeps the BatchNorm, as folding would change what is trained."""

    def auxiliary(m, x):
        y = m.conv(x)
        return m.bn(y) + y if m.training else m.bn(y)

    kept = reasons(trained(Forward(auxiliary, conv=conv(), bn=bn())), data(2))
    assert kept == {"bn": "the output of 'conv' goes to 'bn' and is also read by 'add' in training mode"}


def test_frozen_part_is_folded():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            return super().train(False)

    model = trained(Frozen(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    assert qsim.fold_batch_norms(model, data(2)).folded == {"1": "0"}


def test_module_registered_twice_is_replaced_everywhere():
    norm = bn()
    model = trained(Forward(in_order, conv=conv(), bn=norm, alias=norm))
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
