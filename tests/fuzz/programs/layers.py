"""Layers of torch.nn: how a program makes and calls them, and what the hand-written simulation computes in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .attention import attend
from .dataflow import Kind, Name, NotUnderstood
from .machine import Machine
from .recurrent import recur

GEMM = Kind("Gemm", "product", weights=((1, 0),), bias=2)
CONV = Kind("Conv", "product", weights=((1, 0),), bias=2)


@dataclass(frozen=True)
class Layer:
    """`source`: the constructor; `use`: the call, with the module as ``{m}``; `forms`: see `ir.FORMS`; `in_place`: overwrites its operand;
    `aliases`: may return it."""

    source: str
    use: str = "{m}({0})"
    forms: tuple[str, ...] = ("rows", "seq", "img")
    operands: int = 1
    in_place: bool = False
    aliases: bool = False
    weight: int = 2  # how often it is drawn

    @property
    def name(self) -> str:
        return f"{self.source} {self.use}"


_CROSSED = "{m}({0}.transpose(1, 2)).transpose(1, 2)"
_PADDED = "{m}({0}, src_key_padding_mask=torch.arange({0}.shape[1], device={0}.device).expand({0}.shape[:2]) > 3)"
_STEPS = "{m}({0}.flatten(0, 1)).view_as({0})"
_FLAT = ("rows", "seq")

LAYERS: tuple[Layer, ...] = (
    Layer("nn.Linear(8, 8)", forms=_FLAT, weight=14),
    Layer("nn.Linear(8, 8, bias=False)", forms=_FLAT, weight=4),
    Layer("nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))", forms=_FLAT, weight=2),
    Layer("nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1))", forms=("img",), weight=1),
    Layer("nn.Conv1d(8, 8, 3, padding=1)", _CROSSED, ("seq",), weight=3),
    Layer("nn.Conv1d(8, 8, 1, groups=2, bias=False)", _CROSSED, ("seq",)),
    Layer("nn.Conv2d(8, 8, 3, padding=1)", forms=("img",), weight=10),
    Layer("nn.Conv2d(8, 8, 3, padding=1, groups=4)", forms=("img",), weight=3),
    Layer("nn.Conv2d(8, 8, 1, groups=8, bias=False)", forms=("img",), weight=3),
    Layer("nn.BatchNorm1d(8)", forms=("rows",), weight=3),
    Layer("nn.BatchNorm1d(8)", _CROSSED, ("seq",)),
    Layer("nn.BatchNorm2d(8)", forms=("img",), weight=6),
    Layer("nn.LayerNorm(8)", forms=_FLAT, weight=3),
    Layer("nn.GroupNorm(2, 8)", forms=("rows", "img")),
    Layer("nn.ReLU()", weight=5),
    Layer("nn.ReLU(inplace=True)", in_place=True, weight=3),
    Layer("nn.ReLU6(inplace=True)", in_place=True),
    Layer("nn.Hardtanh()"),
    Layer("nn.Hardswish()"),
    Layer("nn.Hardswish(inplace=True)", in_place=True, weight=1),
    Layer("nn.Hardsigmoid()", weight=1),
    Layer("nn.LeakyReLU(0.1)"),
    Layer("nn.PReLU(8)", forms=("rows", "img"), weight=1),
    Layer("nn.GELU()"),
    Layer("nn.SiLU()"),
    Layer("nn.Tanh()"),
    Layer("nn.Sigmoid()"),
    Layer("nn.Softmax(-1)", weight=1),
    Layer("nn.Dropout(0.1)", aliases=True),
    Layer("nn.Identity()", aliases=True, weight=1),
    Layer("nn.MaxPool2d(3, 1, 1)", forms=("img",)),
    Layer("nn.AvgPool2d(3, 1, 1)", forms=("img",)),
    Layer("nn.LSTM(8, 8, batch_first=True)", "{m}({0})[0]", ("seq",)),
    Layer("nn.LSTM(8, 4, num_layers=2, bidirectional=True)", "{m}({0})[0]", ("seq",), weight=1),
    Layer("nn.GRU(8, 8, batch_first=True)", "{m}({0})[0]", ("seq",)),
    Layer("nn.GRU(8, 4, bidirectional=True, bias=False)", "{m}({0})[0]", ("seq",), weight=1),
    Layer("nn.RNN(8, 8, nonlinearity='relu')", "{m}({0})[0]", ("seq",), weight=1),
    Layer("nn.RNN(8, 8)", "{m}({0})[0]", ("seq",), weight=1),
    Layer("nn.GRUCell(8, 8)", forms=("rows",)),
    Layer("nn.GRUCell(8, 8)", _STEPS, ("seq",), weight=1),
    Layer("nn.LSTMCell(8, 8)", "{m}({0})[0]", ("rows",), weight=1),
    Layer("nn.RNNCell(8, 8)", "{m}({0}, {1})", ("rows",), 2, weight=1),
    Layer("nn.MultiheadAttention(8, 2, batch_first=True)", "{m}({0}, {0}, {0}, need_weights=False)[0]", ("seq",), weight=3),
    Layer("nn.MultiheadAttention(8, 2, batch_first=True)", "{m}({0}, {1}, {1}, need_weights=False)[0]", ("seq",), 2, weight=2),
    Layer("nn.MultiheadAttention(8, 2)", "{m}({0}, {0}, {0})[0]", ("seq",), weight=1),
    Layer("nn.MultiheadAttention(8, 2, bias=False)", "{m}({0}, {1}, {0})[0]", ("seq",), 2, weight=1),
    Layer("nn.Bilinear(8, 8, 8)", "{m}({0}, {1})", ("rows",), 2, weight=1),
    Layer("nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)", forms=("seq",), weight=1),
    Layer("nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)", _PADDED, ("seq",), weight=1),
)


def _product(m: Machine, kind: Kind, function: Callable[..., Tensor], module: nn.Module, x: Name) -> Name:
    if module.training and is_parametrized(module):
        raise NotUnderstood("a weight that training computes anew: its range is that of calibration")
    weight = m.constant(module.weight, weight=True)
    if module.bias is None:
        return m.compute(kind, lambda x, w: function(x, w, None), x, weight)
    return m.compute(kind, function, x, weight, m.constant(module.bias))


def _convolution(m: Machine, module: nn.Conv1d | nn.Conv2d, x: Name) -> Name:
    function = F.conv1d if isinstance(module, nn.Conv1d) else F.conv2d
    options = {"stride": module.stride, "padding": module.padding, "groups": module.groups}
    return _product(m, CONV, lambda x, w, b: function(x, w, b, **options), module, x)


def _batch_norm(m: Machine, module: nn.BatchNorm1d, x: Name) -> Name:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, variance = module.running_mean.clone(), module.running_var.clone()  # not to count a batch twice
        return F.batch_norm(x, mean, variance, weight, bias, module.training, 0.1, module.eps)

    return m.compute(Kind("BatchNormalization", "norm"), run, x, m.constant(module.weight), m.constant(module.bias))


def _norm(m: Machine, module: nn.LayerNorm | nn.GroupNorm, x: Name) -> Name:
    if isinstance(module, nn.LayerNorm):
        kind, function = Kind("LayerNormalization", "norm"), lambda x, w, b: F.layer_norm(x, module.normalized_shape, w, b, module.eps)
    else:
        kind, function = Kind("GroupNormalization", "norm"), lambda x, w, b: F.group_norm(x, module.num_groups, w, b, module.eps)
    return m.compute(kind, function, x, m.constant(module.weight), m.constant(module.bias))


def _prelu(m: Machine, module: nn.PReLU, x: Name) -> Name:
    return m.compute(Kind("PRelu"), F.prelu, x, m.constant(module.weight))


def _dropout(m: Machine, module: nn.Dropout, x: Name) -> Name:
    return m.move(lambda t: F.dropout(t, module.p, module.training), x, fresh=module.training)


# class -> ONNX type and function of one tensor; "HardSwish" and its like are hidden from function modes.
_ACTIVATIONS: dict[type[nn.Module], tuple[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]]] = {
    nn.ReLU: ("Relu", lambda module: torch.relu),
    nn.ReLU6: ("Clip", lambda module: lambda x: F.relu6(x)),
    nn.Hardtanh: ("Clip", lambda module: lambda x: F.hardtanh(x, module.min_val, module.max_val)),
    nn.Hardswish: ("HardSwish", lambda module: lambda x: F.hardswish(x)),
    nn.Hardsigmoid: ("HardSigmoid", lambda module: lambda x: F.hardsigmoid(x)),
    nn.LeakyReLU: ("LeakyRelu", lambda module: lambda x: F.leaky_relu(x, module.negative_slope)),
    nn.GELU: ("Gelu", lambda module: F.gelu),
    nn.SiLU: ("Swish", lambda module: lambda x: F.silu(x)),
    nn.Tanh: ("Tanh", lambda module: torch.tanh),
    nn.Sigmoid: ("Sigmoid", lambda module: torch.sigmoid),
    nn.Softmax: ("Softmax", lambda module: lambda x: F.softmax(x, module.dim)),
    nn.AvgPool2d: ("AveragePool", lambda module: lambda x: F.avg_pool2d(x, 3, 1, 1)),
}
_HIDDEN = frozenset({"HardSwish", "HardSigmoid"})


def run_layer(m: Machine, module: nn.Module, use: str, names: list[Name]) -> Name:
    """What `use`, one of `Layer.use`, does with the module."""
    if use == _CROSSED:
        crossed = m.move(lambda t: t.transpose(1, 2), names[0])
        return m.move(lambda t: t.transpose(1, 2), run_layer(m, module, "{m}({0})", [crossed]))
    if isinstance(module, nn.MultiheadAttention):
        return attend(m, module, use, names)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return recur(m, module, use, names)
    (x,) = names if len(names) == 1 else (names[0],)
    # A parametrized layer is a container: all its calls share its quantizers.
    with m.call(module) if is_parametrized(module) else m.layer(module):
        return _run_one(m, module, x)


def _run_one(m: Machine, module: nn.Module, x: Name) -> Name:
    """A layer of one operation."""
    if isinstance(module, nn.Linear):
        return _product(m, GEMM, F.linear, module, x)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return _convolution(m, module, x)
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        return _batch_norm(m, module, x)
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return _norm(m, module, x)
    if isinstance(module, nn.PReLU):
        return _prelu(m, module, x)
    if isinstance(module, nn.Dropout):
        return _dropout(m, module, x)
    if isinstance(module, nn.MaxPool2d):
        return m.move(lambda t: F.max_pool2d(t, 3, 1, 1), x, fresh=True)
    if isinstance(module, nn.Identity):
        return x
    if type(module) not in _ACTIVATIONS:
        raise NotUnderstood(f"{type(module).__name__} has no hand-written simulation")
    type_, function = _ACTIVATIONS[type(module)]
    kind = Kind(type_, hidden=type_ in _HIDDEN)
    if getattr(module, "inplace", False):
        return m.change(kind, function(module), x)
    return m.compute(kind, function(module), x)
