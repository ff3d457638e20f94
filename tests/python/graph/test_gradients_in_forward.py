"""Models that ask for gradients in their forward: forces as the gradient of an energy, steps of an inner loop."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsim

SIXTEEN = qsim.Config(weight=qsim.TensorSpec(bits=16, symmetric=True), activation=qsim.TensorSpec(bits=16))


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions):
        positions.requires_grad_(True)
        energy = self.energy(positions).sum(-1)
        return energy, -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]


def close(got, wanted, least):
    return all(
        10 * torch.log10(w.square().mean() / (g - w).square().mean().clamp_min(1e-30)) > least for g, w in zip(got, wanted, strict=True)
    )


@pytest.mark.parametrize(("config", "least"), [(SIXTEEN, 60), (qsim.int8(), 25)], ids=["int16", "int8"])
def test_forces(config, least):
    model, x = Forces().eval(), torch.randn(16, 4)
    with pytest.warns(UserWarning, match="computes gradients in its forward.*zero where these clip"):
        sim = qsim.QuantSim(model, x.clone(), config)
    sim.calibrate([x.clone()], progress=False)
    sim.disable("energy.2.output", "sum.output")  # which clip the largest and the smallest
    wanted = [t.detach() for t in model(x.clone())]
    assert close(sim(x.clone()), wanted, least)
    with torch.no_grad():  # where the float model raises
        assert close(sim(x.clone()), wanted, least)
    with sim.in_float():
        assert all(torch.equal(got, want) for got, want in zip(sim(x.clone()), wanted, strict=True))
    assert sim.compare(x.clone()).output.sqnr > least


def test_forces_are_trained():
    model, x = Forces().train(), torch.randn(16, 4)
    sim = qsim.QuantSim(copy.deepcopy(model).eval(), x.clone(), SIXTEEN)
    sim.calibrate([x.clone()], progress=False)
    sim.disable("energy.2.output", "sum.output")
    sim.train()
    for each in (model, sim.model):
        energy, forces = (sim if each is sim.model else each)(x.clone())
        (energy.sum() + forces.square().sum()).backward()
    wanted, got = (nn.utils.parameters_to_vector([p.grad for p in each.parameters()]) for each in (model, sim.model))
    assert (got - wanted).norm() < 5e-2 * wanted.norm()


class Recomputed(Forces):
    """Whose energy, or all of it, is computed again where a gradient asks for it: within the forward, and once more in the backward."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forces(self, positions):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.run(self.energy, positions) if self.what == "a module" else self.run(lambda x: self.energy(x), positions)
            return torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]

    def run(self, function, x):
        return checkpoint(function, x, use_reentrant=False) if self.what in ("a module", "a function") else function(x)

    def forward(self, positions):
        return checkpoint(self.forces, positions, use_reentrant=False) if self.what == "all" else self.forces(positions)


@pytest.mark.filterwarnings("ignore:QuantSim. the model computes gradients")
@pytest.mark.parametrize("what", ["a module", "a function", "all"])
def test_what_a_gradient_in_the_forward_computes_again_is_quantized(what):
    torch.manual_seed(0)
    x, found = torch.randn(16, 4), []
    state = Recomputed("nothing").state_dict()
    for each in ("nothing", what):
        model = Recomputed(each)
        model.load_state_dict(state)
        sim = qsim.QuantSim(model.eval(), x, qsim.int8())
        sim.calibrate([x], progress=False)
        sim.train()
        out = sim(x)
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in sim.model.parameters() if p.grad is not None)])
    assert len(found[0]) > 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_simulation_quantizes_where_torch_shows_modes_nothing():
    x = torch.randn(3, 4)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), x, qsim.int8())
    sim.calibrate([x], progress=False)
    expected = sim(x)
    with torch._C.DisableTorchFunction():
        assert torch.equal(sim(x), expected)
        assert torch._C._is_torch_function_all_disabled()


def test_empty_tensors_may_need_gradients():
    class Filled(nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                t = torch.empty(4, requires_grad=True)
                with torch.no_grad():
                    t.fill_(2.0)
                return x * torch.autograd.grad(t.square().sum(), t)[0]

    x = torch.randn(3, 4)
    assert close([qsim.QuantSim(Filled(), x, qsim.fp16())(x)], [4 * x], 50)


def test_other_errors_are_told_as_they_are():
    class Raises(nn.Module):
        def forward(self, x):
            raise RuntimeError("no such table")

    with pytest.raises(ValueError, match="no such table"):
        qsim.QuantSim(Raises(), torch.randn(2, 4))


class Adapted(nn.Module):
    """Takes a step on its weight before it uses it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        gradient = torch.func.grad(lambda w: (x.detach() @ w).square().mean())(self.w.detach())
        return x @ (self.w - 0.1 * gradient)


def test_what_is_observed_inside_a_transform_can_be_copied():
    x = torch.randn(3, 4)
    sim = qsim.QuantSim(Adapted(), x, SIXTEEN)
    sim.calibrate([x], progress=False)
    held = [t for q in sim.quantizers().values() for t in q.buffers()]
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in held)
    assert torch.equal(copy.deepcopy(sim)(x), sim(x))
    assert close([sim(x)], [Adapted.forward(sim.model, x)], 0)
