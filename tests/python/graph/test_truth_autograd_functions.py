"""What is computed inside of an `autograd.Function`: gradients are off there, so nothing may be clipped before it is out."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from by_hand import simulated
from models import Forward
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsim

X = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = F.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (y > 0)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class RectifiedModule(nn.Module):
    def __init__(self, rectify):
        super().__init__()
        self.rectify = rectify

    def forward(self, x):
        return self.rectify(x)


def again(*, use_reentrant):
    return lambda m, x, relu: m.b(checkpoint(lambda y: relu(m.a(y)), x, use_reentrant=use_reentrant))


def read_twice(m, x, relu):
    y = relu(m.a(x))
    return m.b(y) + y


def gated_by_a_slice(m, x, relu):
    y = relu(m.a(x))
    return m.b(y * y[:, :1])


READ = {
    "by a layer": lambda m, x, relu: m.b(relu(m.a(x))),
    "by two": read_twice,
    "in a module of its own": lambda m, x, relu: m.b(m.rectified(m.a(x))),
    "by a slice first": gated_by_a_slice,
    "by a view": lambda m, x, relu: m.b(relu(m.a(x)).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)),
    "by a concatenation": lambda m, x, relu: m.b(torch.cat([relu(m.a(x))[:, :4], x[:, 4:]], 1)),
    "under a reentrant checkpoint": again(use_reentrant=True),
    "under a checkpoint": again(use_reentrant=False),
    "by what ends its chain": lambda m, x, relu: m.b(relu(m.a(x) + x)),
}


def found(program, relu, compiled):
    """Quantizers, outputs and gradients, where the ranges clip half of the data."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(8, 8).double(), "b": nn.Linear(8, 8).double(), "rectified": RectifiedModule(relu)}
    model = Forward(lambda m, x: program(m, x, relu), **layers)
    sim = simulated(model.eval(), X / 3)
    torch._dynamo.reset()
    called = torch.compile(sim, fullgraph=True, backend="eager") if compiled else sim
    x = X.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="QuantSim")  # that the backward, which Dynamo traces too, is none of the examples'
        out = called(x)
    out.square().sum().backward()
    return sorted(sim.quantizers()), [out, x.grad, *(p.grad for p in sim.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("program", READ)
def test_it_is_quantized_where_it_is_read(program, compiled):
    """As the same function of torch's own is, values and gradients."""
    if compiled and "reentrant" in program:
        pytest.skip("Dynamo breaks the graph at a reentrant checkpoint")
    quantizers, expected = found(READ[program], F.relu, compiled=False)
    names, results = found(READ[program], Rectified.apply, compiled)
    assert names == quantizers
    torch.testing.assert_close(results, expected)


def test_the_chain_goes_on_behind_it():
    """A product in a function and a rectifier behind it have one grid, and weights that a function reads are on theirs."""

    def values(product):
        torch.manual_seed(0)
        model = Forward(lambda m, x: m.b(F.relu(product(x, m.a.weight))), a=nn.Linear(8, 8).double(), b=nn.Linear(8, 8).double())
        sim = simulated(model.eval(), X)
        return sorted(sim.quantizers()), sim(X)

    names, out = values(Product.apply)
    expected_names, expected = values(torch.matmul)
    assert names == expected_names
    torch.testing.assert_close(out, expected)


def test_its_backward_reads_weights_as_they_are_in_eager_and_compiled():
    model = Forward(lambda m, x: m.b(Product.apply(x, m.a.weight)), a=nn.Linear(8, 8).double(), b=nn.Linear(8, 8).double())
    sim = simulated(model.eval(), X, config=qsim.w4a8())
    grads = []
    for called in (sim, torch.compile(sim, fullgraph=True, backend="eager")):
        x = X.clone().requires_grad_()
        called(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("rest", [lambda m, y: y, lambda m, y: m.b(y.add_(1.0))], ids=["returned", "changed in place"])
def test_what_no_reader_can_quantize_has_its_grid_and_a_warning(rest):
    layers = {"a": nn.Linear(8, 8).double(), "b": nn.Linear(8, 8).double()}
    outs = []
    for relu in (F.relu, Rectified.apply):
        model = Forward(lambda m, x, relu=relu: rest(m, relu(m.a(x))), **layers).eval()
        if relu is F.relu:
            sim = qsim.QuantSim(model, X)
        else:
            with pytest.warns(UserWarning, match=r"'relu' computes is quantized inside of an autograd.Function.*keeps its gradient"):
                sim = qsim.QuantSim(model, X)
        sim.calibrate([X], progress=False)
        outs.append(sim(X))
    torch.testing.assert_close(*outs)
