"""Constants in half precision: numbers and tensors lose there what they lose in the model's own half precision."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Calls
from torch import Tensor, nn

import qsim

LOWEST = torch.finfo(torch.float32).min


class Reads(nn.Module):
    """An expression of a tensor and of buffers."""

    def __init__(self, expression: Callable[..., Tensor], **buffers: Tensor) -> None:
        super().__init__()
        self.expression = expression
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.expression(self, x)


def values(dtype: torch.dtype) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    x[:, 0] = torch.tensor([0.1, 0.7, -0.1, 0.3, 0.1, 0.7])
    return x.to(dtype).float()


def in_place(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    y = x * 1.0
    change(y)
    return y


BIG, TENTH, BOUNDS = torch.tensor(1e6), torch.tensor(0.1), torch.tensor([0.1, 0.3, 0.7])
PLACED = {
    "a mask of attention": (lambda m, x: torch.where((x > 0.5) | (x < -5), x * 2, m.low).softmax(-1), {"low": torch.tensor(LOWEST)}),
    "where, first": (lambda m, x: torch.where(x > 0, m.big, x * 2) / 1e3, {"big": BIG}),
    "where, of the input": (lambda m, x: torch.where(x > 0, m.tenth, x), {"tenth": TENTH}),
    "where, returned": (lambda m, x: torch.where(x > 0, x * 2, m.tenth), {"tenth": TENTH}),
    "where, of constants": (lambda m, x: torch.where(x > 0, m.big, m.tenth), {"big": BIG, "tenth": TENTH}),
    "where, computed": (lambda m, x: torch.where(x > 0, x * 2, m.tenth * 4), {"tenth": TENTH}),
    "where, a number beside what is computed of constants": (
        lambda m, x: torch.where(x > 0, torch.where(x > 1, m.tenth * 4, x), 0.1),
        {"tenth": TENTH},
    ),
    "where, made in the call": (lambda m, x: torch.where(x > 0, x * 2, torch.full_like(x, 0.1)), {}),
    "index_put": (lambda m, x: (x * 1.0).index_put((torch.tensor([0, 2]),), m.tenth), {"tenth": TENTH}),
    "index_put, in place": (lambda m, x: (x * 1.0).index_put_((torch.tensor([0, 2]),), m.tenth), {"tenth": TENTH}),
    "masked_scatter": (lambda m, x: (x * 1.0).masked_scatter(x > 0, m.all), {"all": torch.full((6, 4), 0.1)}),
    "masked_fill": (lambda m, x: (x * 1.0).masked_fill(x > 0, m.tenth), {"tenth": TENTH}),
    "scatter": (lambda m, x: (x * 1.0).scatter(1, torch.zeros(6, 1, dtype=torch.long), m.all), {"all": torch.full((6, 4), 0.1)}),
    "scatter, a number": (lambda m, x: (x * 1.0).scatter(1, torch.zeros(6, 1, dtype=torch.long), 0.1), {}),
    "scatter, a number, in place": (lambda m, x: (x * 1.0).scatter_(1, torch.zeros(6, 1, dtype=torch.long), value=0.1), {}),
    "index_copy": (lambda m, x: (x * 1.0).index_copy(0, torch.tensor([1]), m.row), {"row": torch.full((1, 4), 0.1)}),
    "slice_scatter": (lambda m, x: (x * 1.0).slice_scatter(m.row, 0, 1, 2), {"row": torch.full((1, 4), 0.1)}),
    "select_scatter": (lambda m, x: (x * 1.0).select_scatter(m.row[0], 0, 1), {"row": torch.full((1, 4), 0.1)}),
    "an assignment": (lambda m, x: in_place(x, lambda y: y.__setitem__(0, m.row[0])), {"row": torch.full((1, 4), 0.1)}),
    "a copy": (lambda m, x: in_place(x, lambda y: y.copy_(torch.where(x > 0, m.tenth, y))), {"tenth": TENTH}),
    "a copy of a constant into a part": (lambda m, x: in_place(x, lambda y: y[0].copy_(m.row[0])), {"row": torch.full((1, 4), 0.1)}),
    "where, a literal": (lambda m, x: torch.where(x > 0, x * 2, torch.tensor(0.1)), {}),
    "masked_fill, a literal": (lambda m, x: (x * 1.0).masked_fill(x > 0, torch.tensor(0.1)), {}),
    "compared with a literal": (lambda m, x: torch.where(x >= torch.tensor(0.1), x, x * 2), {}),
    "the greater": (lambda m, x: torch.max(x * 1.0, m.tenth), {"tenth": TENTH}),
}
COMPARED = {
    "the end of a clamp": (lambda m, x: (x.clamp(max=0.7) > 0.7).to(x.dtype) + x, {}),
    "the other end": (lambda m, x: torch.where(x.clamp(min=0.1) <= 0.1, 0.0, x), {}),
    "of the input": (lambda m, x: torch.where(x >= 0.1, x, x * 2), {}),
    "from the other side": (lambda m, x: torch.where(0.1 > x, x, x * 2), {}),  # noqa: SIM300
    "equal": (lambda m, x: (x.clamp(min=0.1) == 0.1) * x, {}),
    "unequal": (lambda m, x: (x.clamp(min=0.1) != 0.1) * x, {}),
    "by name": (lambda m, x: torch.ge(x, 0.1) * x, {}),
    "by its long name": (lambda m, x: torch.greater_equal(x, 0.1) * x, {}),
    "less, by its long name": (lambda m, x: torch.less(x, other=0.1) * x, {}),
    "in place": (lambda m, x: (x * 1.0).ge_(0.1) * x, {}),
    "a buffer": (lambda m, x: torch.where(x >= m.tenth, x, x * 2), {"tenth": TENTH}),
    "a buffer, computed": (lambda m, x: torch.where(x * 1.0 >= m.third * 0.3, x, x * 2), {"third": torch.tensor(1 / 3)}),
    "a tensor of the call": (lambda m, x: torch.eq(x, torch.full_like(x, 0.1)) * x, {}),
    "isclose": (lambda m, x: torch.isclose(x, m.tenth, rtol=0, atol=0) * x, {"tenth": TENTH}),
    "isin": (lambda m, x: torch.isin(x, m.bounds) * x, {"bounds": BOUNDS}),
    "bucketize": (lambda m, x: torch.bucketize(x, m.bounds) * x, {"bounds": BOUNDS}),
    "searchsorted": (lambda m, x: torch.searchsorted(m.bounds, x) * x, {"bounds": BOUNDS}),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*PLACED, *COMPARED])
def test_loses_what_half_precision_loses(name, dtype):
    expression, buffers = {**PLACED, **COMPARED}[name]
    model, x = Reads(expression, **buffers), values(dtype)
    expected = copy.deepcopy(model).to(dtype)(x.to(dtype)).float()
    sim = qsim.QuantSim(model, x, qsim.fp16() if dtype is torch.float16 else qsim.bf16())
    torch.testing.assert_close(sim(x), expected, rtol=0, atol=0, equal_nan=True)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(x), sim(x), rtol=0, atol=0, equal_nan=True)


def test_numbers_alone_are_not_called_the_float_model(recwarn):
    x = torch.randn(4, 8)
    sim = qsim.QuantSim(Calls(lambda x: torch.where(x > 0, 1e6, x)), x, qsim.fp16())
    assert bool(sim(x).isinf().any())
    assert not [each for each in recwarn if "all figures are the float model's" in str(each.message)]


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", [*PLACED, *COMPARED])
def test_what_falls_back_to_float32_loses_nothing(name, how):
    expression, buffers = {**PLACED, **COMPARED}[name]
    model, x = Reads(lambda m, x: expression(m, x * 3) * 5, **buffers), values(torch.float16)
    sim = qsim.QuantSim(model, x, qsim.fp16())
    before = sim(x)
    sim.fallback("*", to="float32")
    torch._dynamo.reset()
    found = (torch.compile(sim, backend="eager", fullgraph=True) if how == "compiled" else sim)(x)
    torch.testing.assert_close(found, model(x), rtol=0, atol=0, equal_nan=True)
    sim.fallback(None)
    torch.testing.assert_close(sim(x), before, rtol=0, atol=0, equal_nan=True)
