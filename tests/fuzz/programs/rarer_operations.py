"""Operations that stand in some programs only: most of them the hand-written simulation has no rule for, and all other oracles judge."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .dataflow import Kind
from .operation import ALL, FLAT, Operation, binary, moved, unary

_FUNCTIONS = """\
class Damped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return torch.tanh(t) * 0.8

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors
        return grad * 0.8 * (1 - torch.tanh(t) ** 2)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad
"""
_SEQ, _IMG, _ROWS = ("seq",), ("img",), ("rows",)
_SCORES = "(({0} @ {1}.mT) * 0.35{more}).softmax(-1) @ {1}"
_ONES = "torch.ones(6, 6, device={0}.device)"
_ATTENTION = "F.scaled_dot_product_attention({0}, {1}, {1}, attn_mask="
_TURNED = "torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], device={0}.device)"

# name: sources, by the number of operands and the forms of their tensors
_SOURCES: dict[tuple[int, tuple[str, ...]], dict[str, str]] = {
    (1, ALL): {
        # Functions of single elements.
        "exp": "torch.exp(-{0}.abs())",
        "log1p": "torch.log1p({0}.abs())",
        "root": "torch.sqrt({0}.abs() + 0.1)",
        "reciprocal": "torch.reciprocal(1.0 + {0}.abs())",
        "atan": "torch.atan({0})",
        "expit": "torch.special.expit({0})",
        "logsigmoid": "F.logsigmoid({0})",
        "celu": "F.celu({0})",
        "selu": "torch.selu({0})",
        "softshrink": "F.softshrink({0}, 0.2)",
        "tanhshrink": "F.tanhshrink({0})",
        "relu by a flag": "{0} * ({0} > 0)",
        "relu by a cast flag": "{0} * ({0} > 0).to({0}.dtype)",
        "where scaled": "torch.where({0} > 0, {0}, 0.1 * {0})",
        "where zero": "torch.where({0} > 0.0, {0}, 0.0)",
        "nan_to_num": "torch.nan_to_num({0})",
        "by the name of a function": 'getattr(torch, "tanh")({0})',
        "torch.ops": "torch.ops.aten.tanh({0})",
        "by the class": "torch.Tensor.sigmoid({0})",
        "walrus": "(t := torch.tanh({0})) * t",
        "a condition of the shape": "(F.gelu({0}) if {0}.shape[0] > 1 else {0})",
        "by the shape": "{0} * {0}.shape[-1] ** -0.5",
        "without a gradient": "{0} + torch.no_grad()(F.silu)({0})",
        "in float32": "{0}.to(torch.float32).tanh().to({0}.dtype)",
        # Over an axis.
        "cumsum": "{0}.cumsum(-1)",
        "cummax": "{0}.cummax(-1).values",
        "normalize": "F.normalize({0} + 0.3, dim=-1)",
        "standardized": "({0} - {0}.mean(-1, keepdim=True)) / ({0}.std(-1, keepdim=True) + 0.5)",
        "less logsumexp": "{0} - {0}.logsumexp(-1, keepdim=True)",
        "over the norm": "{0} / (1.0 + {0}.norm(dim=-1, keepdim=True))",
        "less the median": "{0} - {0}.median(-1, keepdim=True).values",
        "softmin": "F.softmin({0}, dim=-1)",
        # One sample after the other.
        "each sample": "torch.stack([F.softplus(t) for t in {0}])",
        "mapped": "torch.stack(list(map(torch.sigmoid, {0})))",
        # Empty tensors.
        "nothing in front": "torch.cat([{0}[:0], {0}])",
        "nothing behind": "torch.cat([{0}, F.relu({0}[..., :0])], -1)",
        "plus the sum of nothing": "{0} + {0}[:0].tanh().sum()",
        "nothing chosen": "{0}.index_add(0, torch.zeros(0, dtype=torch.long, device={0}.device), {0}[:0].tanh())",
        # Moved values.
        "expanded": "{0}[..., :1].expand({0}.shape)",
        "padded": "F.pad({0}, (1, 0))[..., :-1]",
        "padded with a number": "F.pad({0}, (1, 0), value=0.7)[..., :-1]",
        "windows": "{0}.unfold(-1, 1, 1).squeeze(-1)",
        "unbound": "torch.stack(list({0}.unbind(1))[::-1], 1)",
        "topk": "{0}.topk({0}.shape[-1], dim=-1).values",
        "copied": "torch.empty_like({0}).copy_({0})",
        "accumulated": "{0}.new_zeros({0}.shape).add_({0})",
        "as_strided": "{0}.contiguous().as_strided({0}.shape, {0}.contiguous().stride())",
        # Out of what is no operation of its own.
        "autograd function": "Damped.apply({0})",
        "turned gradient": "Reversed.apply({0})",
        "spectrum": "torch.fft.ifft(torch.fft.fft({0})).real",
        "real spectrum": "torch.fft.irfft(torch.fft.rfft({0}), n={0}.shape[-1])",
    },
    (2, ALL): {
        "minimum": "torch.minimum({0}, {1})",
        "clamped by": "torch.clamp({0}, max={1}.abs() + 0.1)",
        "addcmul": "torch.addcmul({0}, {1}, {0}, value=0.5)",
        "addcdiv": "torch.addcdiv({0}, {1}, 1.0 + {0}.abs())",
        "hypot": "torch.hypot({0}, {1} + 3.0)",
        "glu": "F.glu(torch.cat([{0}, {1}], -1), -1)",
        "largest of two": "torch.stack([{0}, {1}], -1).amax(-1)",
        "sum of a list": "sum([{0}, {1}, {0}])",
        "inner product": "({0} * {1}).sum(-1, keepdim=True) * {0}",
        "cosine": "F.cosine_similarity({0} + 0.5, {1} + 0.5, dim=-1).unsqueeze(-1) * {0}",
        "starred": "torch.maximum(*({0}, {1}))",
        "a method's name": "{0}.__mul__({1})",
        "one after the other": "{0}.mul({1}).add({0}).sub(0.1)",
    },
    (1, FLAT): {
        "rms_norm": "F.rms_norm({0}, (8,))",
        "plus positions": "{0} + torch.arange(8, device={0}.device) * 0.1",
        "sines of positions": "{0} + torch.sin(torch.arange(8, device={0}.device) * 0.7).to({0}.dtype)",
        "take_along_dim": "torch.take_along_dim({0}, " + _TURNED + ".expand({0}.shape), -1)",
        "index_select": "{0}.index_select(-1, " + _TURNED + ")",
        "a list of indices": "{0}[..., [7, 6, 5, 4, 3, 2, 1, 0]]",
        "scatter": "torch.zeros_like({0}).scatter(-1, " + _TURNED + ".expand({0}.shape), {0})",
        "scatter_add": "torch.zeros_like({0}).scatter_add(-1, (" + _TURNED + " // 2).expand({0}.shape), {0})",
        "index_add": "{0}.index_add(-1, torch.tensor([0, 0, 3], device={0}.device), {0}[..., :3].tanh())",
        "repeated": "{0}[..., :4].repeat_interleave(2, -1)",
        "sum of halves": "torch.add(*{0}.chunk(2, -1)).repeat_interleave(2, -1)",
    },
    (1, _SEQ): {
        "causal attention": "F.scaled_dot_product_attention({0}, {0}, {0}, is_causal=True)",
    },
    (2, _SEQ): {
        "scores, infinite": _SCORES.replace("{more}", ' + torch.full((6, 6), float("-inf"), device={0}.device).triu(1)'),
        "scores, filled": "(({0} @ {1}.mT) * 0.35).masked_fill(" + _ONES + ".triu(1) > 0, float('-inf')).softmax(-1) @ {1}",
        "scores, lowest": _SCORES.replace("{more}", " + torch.full((6, 6), torch.finfo(torch.float32).min, device={0}.device).triu(1)"),
        "scores, of flags": _SCORES.replace("{more}", " + (1 - (torch.arange(6, device={0}.device) < 4).to({0}.dtype)) * -10000.0"),
        "attention, flags": _ATTENTION + _ONES + ".tril() > 0)",
        "attention, added": _ATTENTION + _ONES + ".triu(1).to({0}.dtype) - 0.5)",
        "bmm": "torch.bmm(torch.bmm({0}, {1}.mT) * 0.1, {1})",
        "baddbmm": "torch.baddbmm({0}, {0} @ {1}.mT, {1}, alpha=0.1)",
        "einsum": "torch.einsum('bqd,bkd->bqk', {0}, {1}).softmax(-1) @ {1}",
    },
    (1, _IMG): {
        "max_pool": "F.max_pool2d({0}, 3, 1, 1)",
        "avg_pool": "F.avg_pool2d({0}, 3, 1, 1)",
        "squeeze and excite": "F.adaptive_avg_pool2d({0}, 1).sigmoid() * {0}",
        "shuffled": "F.pixel_unshuffle(F.pixel_shuffle({0}, 2), 2)",
        "turned": "torch.rot90({0}, 2, (-2, -1))",
        "patches": "F.fold(F.unfold({0}, 3, padding=1), (5, 5), 3, padding=1)",
        "group_norm": "F.group_norm({0}, 2)",
        "channels shuffled": "{0}.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)",
    },
}
_OF_PARAMETERS = {  # rows and sequences
    "einsum of a weight": ("torch.einsum('...i,ij->...j', {0}, {a0})", ("matrix",)),
    "addmm": ("torch.addmm({a1}, {0}.flatten(0, -2), {a0}).view({0}.shape)", ("matrix", "vector")),
    "half of a weight": ("torch.cat([{0} @ {a0}[:, :4], {0} @ {a0}[:, 4:]], -1)", ("matrix",)),
    "normalized weight": ("F.linear({0}, F.normalize({a0}, dim=1), {a1})", ("matrix", "vector")),
    "softmax of a parameter": ("{0} * {a0}.softmax(-1)", ("vector",)),
}
_ROUGH = {
    "sign": ("{0} * torch.sign({1})", 2, ALL),
    "rounded": ("{0} + torch.round({0}) * 0.1", 1, ALL),
    "one hot": ("{0} * F.one_hot({0}.argmax(-1), {0}.shape[-1]).to({0}.dtype)", 1, ALL),
    "buckets": ("{0} + torch.bucketize({0}, torch.linspace(-1, 1, 5, dtype={0}.dtype, device={0}.device)).to({0}.dtype)", 1, ALL),
    "chosen rows": ("{0}.index_put(({0}[:, 0] > 0.2,), torch.tanh({0}[{0}[:, 0] > 0.2]))", 1, _ROWS),
    "scores, of data": (
        "(({0} @ {1}.mT) * 0.35).masked_fill(({1}[..., 0] > 0.5)[:, None], torch.finfo({0}.dtype).min).softmax(-1) @ {1}",
        2,
        _SEQ,
    ),
}
_IN_PLACE = {
    "limited by a mask": ("{0}[{0} > 0.5] = 0.5", 1, ALL),
    "first column": ("{0}[:, 0] = 0.0", 1, ALL),
    "index_fill_": ("{0}.index_fill_(-1, torch.tensor([1], device={0}.device), 0.3)", 1, ALL),
    "half of another added": ("{0}[..., :4] += {1}[..., 4:]", 2, FLAT),
    "copy_": ("{0}.copy_({1})", 2, ALL),
    "zero_": ("{0}.zero_()", 1, ALL),
    "clamp_ by another": ("{0}.clamp_(max={1}.abs() + 0.1)", 2, ALL),
    "two columns swapped": ("{0}[..., [0, 1]] = {0}[..., [1, 0]]", 1, ALL),
}
_RULES = {  # of the hand-written simulation
    "minimum": binary(Kind("Min"), torch.minimum),
    "starred": binary(Kind("Max"), torch.maximum),
    "atan": unary(Kind("Atan"), torch.atan),
    "by the class": unary(Kind("Sigmoid"), torch.sigmoid),
    "by the name of a function": unary(Kind("Tanh"), torch.tanh),
    "a list of indices": moved(lambda t: t.flip(-1), fresh=True),
    "index_select": moved(lambda t: t.flip(-1), fresh=True),
    "expanded": moved(lambda t: t[..., :1].expand(t.shape)),
    "repeated": moved(lambda t: t[..., :4].repeat_interleave(2, -1), fresh=True),
    "channels shuffled": moved(lambda t: t.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2), fresh=True),
    "max_pool": moved(lambda t: F.max_pool2d(t, 3, 1, 1), fresh=True),
    "turned": moved(lambda t: t.flip(-1, -2), fresh=True),
}
_ALIASES = ("nothing behind", "nothing in front", "as_strided", "windows", "expanded", "turned gradient", "nan_to_num")


def _rarer() -> Iterator[Operation]:
    def made(name: str, source: str, operands: int, forms: tuple[str, ...], **more: object) -> Operation:
        definitions = _FUNCTIONS if ".apply(" in source else ""
        fields = {"aliases": name in _ALIASES, "definitions": definitions, "rare": True, "weight": 1, **more}
        return Operation(name, source, _RULES.get(name), operands, forms, **fields)  # type: ignore[arg-type]

    for (operands, forms), sources in _SOURCES.items():
        for name, source in sources.items():
            yield made(name, source, operands, forms)
    for name, (source, attributes) in _OF_PARAMETERS.items():
        yield made(name, source, 1, FLAT, attributes=attributes)
    for name, (source, operands, forms) in _ROUGH.items():
        yield made(name, source, operands, forms, rough=True)
    for name, (source, operands, forms) in _IN_PLACE.items():
        yield made(name, source, operands, forms, in_place=True, statement="=" in source.split("(")[0])


RARER = tuple(_rarer())
