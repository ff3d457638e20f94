"""Tensors of subclasses: what their `__torch_function__` computes is the simulation's, or a warning says that it is not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from by_hand import decibels
from models import Forward
from torch import Tensor, nn

import qsim

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
BITS_16 = qsim.Config(activation=qsim.TensorSpec(bits=16), weight=qsim.TensorSpec(bits=16, symmetric=True))


class Doubling(Tensor):
    """Additions are twice what they are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func.__name__ in ("add", "__add__") else out


class Named(Tensor):
    """Carries a note along, as images of data loaders do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Named):
            out.note = "kept"
        return out


def added_to_itself(m, x):
    y = m.a(x)
    return m.b(y + y)


def simulated(x, forward=added_to_itself):
    torch.manual_seed(0)
    model = Forward(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    sim = qsim.QuantSim(model, x, BITS_16)
    sim.calibrate([x], progress=False)
    return model, sim


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_class_computes_besides_is_told(inside):
    def forward(m, x):
        y = m.a(x).as_subclass(Doubling)
        return m.b((y + y).as_subclass(Tensor))

    with pytest.warns(UserWarning, match="the class 'Doubling' have a __torch_function__ that computes more"):
        simulated(X, forward) if inside else simulated(X.as_subclass(Doubling))


def test_a_class_that_only_carries_notes_is_simulated_as_numbers_are():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, sim = simulated(X.as_subclass(Named))
    assert {"input", "a.output", "add.output"} <= set(sim.quantizers())
    assert decibels(sim(X.as_subclass(Named)).as_subclass(Tensor).detach(), model(X).detach()) > 60
    with sim.in_float():
        assert sim(X.as_subclass(Named)).note == "kept"


def test_attention_of_nested_tensors_in_jagged_layout():
    """torch's function alone refuses them: their class has one of its own."""

    def forward(m, long, short):
        nested = torch.nested.nested_tensor([m.a(long), m.a(short)], layout=torch.jagged)
        heads = nested.unflatten(-1, (2, 4)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads)
        return m.b(torch.cat(out.transpose(1, 2).flatten(-2).unbind()))

    torch.manual_seed(0)
    model, given = Forward(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(), (X[:9], X[9:])
    with pytest.warns(UserWarning, match="'scaled_dot_product_attention' is not dense"):
        sim = qsim.QuantSim(model, given, BITS_16)
    sim.calibrate([given], progress=False)
    assert {"a.weight", "a.output", "b.weight", "b.output"} <= set(sim.quantizers())
    with torch.no_grad():
        with sim.in_float():
            assert torch.equal(sim(*given), model(*given))
        assert decibels(sim(*given), model(*given)) > 60


def test_a_model_that_does_not_run_is_told_as_any_other():
    with pytest.raises(ValueError, match="the model does not run on example_inputs"):
        simulated(torch.randn(2, 7).as_subclass(Doubling))
