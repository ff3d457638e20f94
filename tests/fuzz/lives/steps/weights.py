"""Steps that change the model's parameters and buffers, by every way that there is."""

from __future__ import annotations

import random
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..life import Life, Skip
from . import step


def some(life: Life, rng: random.Random) -> nn.Parameter:
    return rng.choice(list(life.sim.model.parameters()))


def other(t: Tensor) -> Tensor:
    return (t.detach() * torch.empty_like(t).uniform_(0.5, 1.5)).contiguous()


@step("copy_ into a parameter")
def _copied(life: Life, rng: random.Random) -> None:
    p = some(life, rng)
    with torch.no_grad():
        p.copy_(other(p))


@step("assign .data")
def _data(life: Life, rng: random.Random) -> None:
    p = some(life, rng)
    p.data = other(p)


@step("write one element through .data")
def _element(life: Life, rng: random.Random) -> None:
    p = some(life, rng)
    p.data.view(-1)[rng.randrange(p.numel())] *= -0.7


@step("write through NumPy")
def _numpy(life: Life, rng: random.Random) -> None:
    p = some(life, rng)
    if p.dtype is torch.bfloat16:
        raise Skip
    p.detach().numpy()[...] *= 0.9


@step("write in inference mode")
def _inference(life: Life, rng: random.Random) -> None:
    p = some(life, rng)
    with torch.inference_mode():
        p.mul_(1.1)


@step("another Parameter in the module")
def _replaced(life: Life, rng: random.Random) -> None:
    owners = [(m, name) for m in life.sim.model.modules() for name, p in m.named_parameters(recurse=False)]
    shared = [p for m in life.sim.model.modules() for p in m._parameters.values() if p is not None]
    module, name = rng.choice(owners)
    p: Any = getattr(module, name)
    if sum(p is each for each in shared) > 1 or parametrize.is_parametrized(module):
        raise Skip  # what was one would be two
    setattr(module, name, nn.Parameter(other(p)))


@step("swap_tensors")
def _swapped(life: Life, rng: random.Random) -> None:
    p = some(life, rng)
    if len(weakref.getweakrefs(p)) > 0:
        raise Skip  # torch swaps none
    torch.utils.swap_tensors(p, nn.Parameter(other(p)))


@step("vector_to_parameters")
def _vector(life: Life, rng: random.Random) -> None:
    parameters = list(life.sim.model.parameters())
    if parametrize.is_parametrized(life.sim.model):
        raise Skip
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach() * 0.95, parameters)


@step("optimizer steps", share=2)
def _trained(life: Life, rng: random.Random) -> None:
    sim = life.sim
    kind = rng.choice(["sgd", "adam", "fused", "groups"])
    if kind == "groups":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(sim.param_groups(1e-2, scale_lr=1e-3, bias_decay=0.0))
    elif kind == "sgd":
        optimizer = torch.optim.SGD(sim.parameters(), 1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(sim.parameters(), 1e-2, fused=kind == "fused")
    if rng.random() < 0.7:
        sim.train()
    for _ in range(2):
        args, kwargs = life.call(rng.randrange(1 << 30))
        result = sim(*args, **kwargs)
        optimizer.zero_grad()
        if not result.requires_grad:
            raise Skip
        result.double().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    if rng.random() < 0.5:
        sim.eval()


@step("averaged weights")
def _averaged(life: Life, rng: random.Random) -> None:
    average = AveragedModel(life.sim, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        with torch.no_grad():
            for p in life.sim.model.parameters():
                p.mul_(1.02)
        average.update_parameters(life.sim)
    if rng.random() < 0.5:
        life.sim.load_state_dict(average.module.state_dict())
    else:
        life.sim = average.module


@step("a float checkpoint")
def _checkpoint(life: Life, rng: random.Random) -> None:
    if life.changes:
        raise Skip
    state = life.subject.model(rng.randrange(1 << 30)).to(life.dtype).state_dict()
    life.sim.load_state_dict(state, assign=rng.random() < 0.3 and not life.subject.shares)  # it takes what is shared apart


@step("another state into sim.model")
def _into_model(life: Life, rng: random.Random) -> None:
    state = {name: other(t) if t.is_floating_point() else t for name, t in life.model_state().items()}
    life.sim.model.load_state_dict(state, assign=rng.random() < 0.5 and not life.subject.shares)


@step("another module", share=0.6)
def _module(life: Life, rng: random.Random) -> None:
    layers = {name: m for name, m in life.sim.model.named_modules() if isinstance(m, nn.Linear)}
    name = rng.choice(list(layers))
    was = layers[name]
    if parametrize.is_parametrized(was) or hasattr(was, "weight_orig") or life.subject.shares:
        raise Skip
    if was._forward_hooks or was._forward_pre_hooks:
        raise Skip  # the twin would have them on the new one
    made = nn.Linear(was.in_features, was.out_features, bias=was.bias is not None).to(life.dtype)
    owner, _, own = name.rpartition(".")
    setattr(life.sim.model.get_submodule(owner), own, made.train(was.training))
    life.changes.append(lambda model: None)  # its result stays in float, which is said


@step("a hook that changes results", share=0.4)
def _hook(life: Life, rng: random.Random) -> None:
    names = [name for name, m in life.sim.model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    name, way = rng.choice(names), rng.randrange(2)

    def change(model: nn.Module) -> None:
        module = model.get_submodule(name)
        if way == 0:
            module.register_forward_hook(_halved)
        else:
            module.register_forward_pre_hook(_doubled)

    change(life.sim.model)
    life.changes.append(change)
    life.compiled = None  # torch guards no hooks


def _halved(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
    return result * 0.5


def _doubled(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 2.0, *args[1:])


@step("weight_norm", share=0.3)
def _weight_norm(life: Life, rng: random.Random) -> None:
    layers = {name: m for name, m in life.sim.model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    name = rng.choice(list(layers))
    if parametrize.is_parametrized(layers[name]) or life.subject.shares:
        raise Skip
    parametrizations.weight_norm(layers[name])
    life.changes.append(lambda model: parametrizations.weight_norm(model.get_submodule(name)) and None)


@step("prune", share=0.3)
def _pruned(life: Life, rng: random.Random) -> None:
    layers = {name: m for name, m in life.sim.model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    name = rng.choice(list(layers))
    if parametrize.is_parametrized(layers[name]) or hasattr(layers[name], "weight_orig") or life.subject.shares:
        raise Skip
    prune.random_unstructured(layers[name], "weight", 0.3)
    if rng.random() < 0.6:
        prune.remove(layers[name], "weight")
    else:
        life.changes.append(lambda model: prune.identity(model.get_submodule(name), "weight") and None)


@step("freeze parameters")
def _frozen(life: Life, rng: random.Random) -> None:
    for p in life.sim.model.parameters():
        p.requires_grad_(rng.random() < 0.5)


@step("move to shared memory", pure=True)
def _shared(life: Life, rng: random.Random) -> None:
    life.sim.share_memory()


@step("functional_call", pure=True)
def _functional(life: Life, rng: random.Random) -> None:
    sim, call = life.sim, life.call(rng.randrange(1 << 30))
    if life.subject.is_stateful or sim.training or life.changes:
        raise Skip
    parameters = dict(sim.named_parameters())
    given = {name: other(p) for name, p in parameters.items()}
    was = {name: p.detach().clone() for name, p in parameters.items()}
    with torch.no_grad():
        found = torch.func.functional_call(sim, given, *call)
        for name, p in parameters.items():
            p.copy_(given[name])
        expected = sim(*call[0], **call[1])
        for name, p in parameters.items():
            p.copy_(was[name])
    assert torch.equal(found, expected), "functional_call is not what the simulation with these weights computes"


@step("a step of the statistics")
def _statistics(life: Life, rng: random.Random) -> None:
    norms = [m for m in life.sim.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        raise Skip
    norm = rng.choice(norms)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.no_grad():
        norm.running_mean.add_(0.1)
        norm.running_var.mul_(1.2)
