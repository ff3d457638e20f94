"""Tensors of integers in half precision: beside numbers of the format they become such numbers, and alone they stay integers."""

import copy
from collections.abc import Callable

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import qsim


class Counts(nn.Module):
    """An expression of a tensor and of integers, of which the model holds some."""

    def __init__(self, expression: Callable[..., Tensor]) -> None:
        super().__init__()
        self.expression = expression
        self.register_buffer("held", torch.tensor([3001, 70001, 2049, 5]))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.expression(self, x, n)


def assigned(x: Tensor, n: Tensor) -> Tensor:
    y = x * 1.0
    y[0] = n
    return y


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(5)).half().float()
N = torch.tensor([100000, 70001, 3001, 2049])
PROMOTED = {
    "a quotient": lambda m, x, n: x / n,
    "a product": lambda m, x, n: x * n,
    "from the other side": lambda m, x, n: n * x,
    "a sum": lambda m, x, n: x + n,
    "a difference from integers": lambda m, x, n: n - x,
    "in place": lambda m, x, n: (x * 1.0).div_(n),
    "a sum of integers": lambda m, x, n: x / n.cumsum(0),
    "positions": lambda m, x, n: torch.arange(3001, 3005) * x,
    "a buffer": lambda m, x, n: x * m.held,
    "int32": lambda m, x, n: x / n.int(),
    "int16": lambda m, x, n: x * (n // 30).short(),
    "8 bits": lambda m, x, n: x * n.to(torch.uint8),
    "flags": lambda m, x, n: x * (n > 3001),
    "a cast": lambda m, x, n: x * n.to(x.dtype),
    "the greater": lambda m, x, n: torch.maximum(x, n),
    "a clamp": lambda m, x, n: (x * 8192).clamp(max=n),
    "a comparison": lambda m, x, n: ((x * 2048 + 2048) > n) * x,
    "of equals": lambda m, x, n: ((x * 0 + 3000) == m.held) * x,
    "where": lambda m, x, n: torch.where(x > 0, x * 2, n),
    "an assignment": lambda m, x, n: assigned(x, n),
    "a copy": lambda m, x, n: (x * 1.0).copy_(n.expand(5, 4)),
    "a concatenation": lambda m, x, n: torch.cat([x * 2, n[None]]),
    "an outer product": lambda m, x, n: torch.outer(x[0], n),
}
ALONE = {
    "a comparison": lambda m, x, n: torch.where(n > 3001, x * 2, x * 1.0),
    "a number that the format has not": lambda m, x, n: x * (n == 70001),
    "arithmetic": lambda m, x, n: x * (n * 100003 % 7),
    "a difference": lambda m, x, n: x * (n + 70001 - n - 70000),
    "a division that is rounded": lambda m, x, n: x * torch.div(n * 100003, 70001, rounding_mode="floor").remainder(11),
    "a shape": lambda m, x, n: torch.full_like(n, 70000) % 9 * x,
    "places": lambda m, x, n: (x * 1.0).scatter(1, n[None].expand(5, 4) % 4, 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("expression", [*PROMOTED.values(), *ALONE.values()], ids=[*PROMOTED, *(f"alone: {name}" for name in ALONE)])
def test_become_what_half_precision_makes_of_them(expression, dtype):
    model, x = Counts(expression), X.to(dtype).float()
    expected = copy.deepcopy(model).to(dtype)(x.to(dtype), N).float()
    sim = qsim.QuantSim(model, (x, N), qsim.fp16() if dtype is torch.float16 else qsim.bf16())
    torch.testing.assert_close(sim(x, N), expected, rtol=0, atol=0, equal_nan=True)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(x, N), expected, rtol=0, atol=0, equal_nan=True)


OF_INTEGERS = {  # which torch computes in float32, and an engine in the format
    "a fraction": (lambda m, x, n: x * (n / 3), lambda x, n: x * (n / 3)),
    "a reciprocal": (lambda m, x, n: x * (1 / n), lambda x, n: x * (1 / n)),
    "a logarithm": (lambda m, x, n: x * torch.log(n), lambda x, n: x * torch.log(n)),
    "a part": (lambda m, x, n: x * (n * 0.25), lambda x, n: x * (n * 0.25)),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_what_makes_fractions_of_integers_reads_numbers_of_the_format(name):
    expression, in_half = OF_INTEGERS[name]
    sim = qsim.QuantSim(Counts(expression), (X, N), qsim.fp16())
    torch.testing.assert_close(sim(X, N), in_half(X.half(), N.half()).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("falls_back", [False, True])
@pytest.mark.parametrize("name", ["a quotient", "a product", "a comparison", "where", "a cast", *OF_INTEGERS])
def test_files_have_the_same(tmp_path, name, falls_back):
    expression = OF_INTEGERS[name][0] if name in OF_INTEGERS else PROMOTED[name]
    if falls_back:
        sim = qsim.QuantSim(Counts(expression), (X, N), qsim.int8(target="onnxruntime"))
        sim.calibrate([(X, N)], progress=False)
        sim.fallback("*", to="fp16")
    else:
        sim = qsim.QuantSim(Counts(expression), (X, N), qsim.fp16(target="onnxruntime"))
    sim.export(tmp_path / "model.onnx")
    file = onnx.load(tmp_path / "model.onnx")
    (found,) = ReferenceEvaluator(file).run(None, {"x": X.numpy(), "n": N.numpy()})
    torch.testing.assert_close(torch.from_numpy(found).float(), sim(X, N), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["a quotient", "a sum of integers", "a product", "where"])
def test_the_doctor_sees_what_they_lose(name):
    model = Counts(PROMOTED[name])
    n = torch.tensor([70000, 80000, 100000, 131072])
    lost = qsim.doctor(model, [(X, n)], target="tensorrt-fp16", progress=False)
    assert lost.findings
    kept = qsim.doctor(model, [(X, n // 1000)], target="tensorrt-fp16", progress=False)
    assert not kept.findings
    assert not qsim.doctor(Counts(ALONE["arithmetic"]), [(X, n)], target="tensorrt-fp16", progress=False).findings
