"""Every BatchNorm that cannot be folded: kept, with the reason in one sentence."""

import copy
import re
import types

import pytest
import torch
import torch.nn.functional as F
from models import Forward, data, trained
from torch import nn

import qsim


def reasons(model: nn.Module, *args: torch.Tensor) -> dict[str, str]:
    """Why nothing is folded; the model must be unchanged then."""
    before, modules = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    report = qsim.fold_batch_norms(model, args)
    assert report.folded == {}
    assert modules == [type(m) for m in model.modules()]
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0, equal_nan=True)
    return report.kept


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


class Unbiased(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight)


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
    "own forward of the layer": (Forward(in_order, conv=Scaled(4, 4, 3), bn=bn()), "the weight of 'conv' is computed anew"),
    "own forward that knows no bias": (
        Forward(in_order, conv=Unbiased(4, 4, 3, bias=False), bn=bn()),
        r"'conv' \(Unbiased\) has a forward of its own",
    ),
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


def test_branch_of_training_alone():
    """A second reader that only training has keeps the BatchNorm, as folding would change what is trained."""

    def auxiliary(m, x):
        y = m.conv(x)
        return m.bn(y) + y if m.training else m.bn(y)

    kept = reasons(trained(Forward(auxiliary, conv=conv(), bn=bn())), data(2))
    assert kept == {"bn": "the output of 'conv' goes to 'bn' and is also read by 'add' in training mode"}


class WrittenAfter(nn.Module):
    """What BatchNorm reads is written to before the layer behind it reads its result: an Identity would hand that on."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.conv, self.way = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), way
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x):
        if self.way != "an argument":
            x = self.first(x)
        y = self.bn(x)
        if self.way == "a part":
            x[:, :2] = 1.0
        elif self.way == "a view":
            x.flatten(1).mul_(-1)
        elif self.way != "nothing":
            x.relu_()
        return self.conv(y) + x.mean()


@pytest.mark.parametrize("way", ["an argument", "a result", "a part", "a view"])
def test_what_is_read_by_one_that_is_folded_ahead_is_not_written_to(way):
    model, x = WrittenAfter(way).eval(), torch.randn(2, 8 if way == "an argument" else 4, 5, 5)
    with torch.no_grad():
        expected = model(x.clone())
        folded = copy.deepcopy(model)
        assert qsim.fold_batch_norms(folded, x.clone()).folded == {}
        torch.testing.assert_close(folded(x.clone()), expected)
        sim = qsim.QuantSim(model, (x.clone(),), qsim.int16())
        sim.calibrate([x.clone()], progress=False)
        assert (sim(x.clone()) - expected).abs().max() < 1e-3 * expected.abs().max()


def test_the_reason_is_told():
    model = WrittenAfter("an argument").eval()
    assert "what 'bn' reads is written to in place" in qsim.fold_batch_norms(model, torch.randn(2, 8, 5, 5)).kept["bn"]


def test_one_is_folded_ahead_where_nothing_is_written():
    assert qsim.fold_batch_norms(WrittenAfter("nothing").eval(), torch.randn(2, 4, 5, 5)).folded == {"bn": "conv"}
