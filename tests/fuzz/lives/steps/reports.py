"""Steps that look at a simulation, or write it, and leave it as it was; mistakes among them."""

from __future__ import annotations

import os
import random

import torch
from torch import nn

import qsim

from ..life import Life, Skip
from . import step


@step("summary", share=0.3, pure=True)
def _summary(life: Life, rng: random.Random) -> None:
    assert str(life.sim.summary())
    assert repr(life.sim)
    life.sim.borders()
    life.sim.encodings()


@step("calls in every mode", share=2, pure=True)
def _calls(life: Life, rng: random.Random) -> None:
    if life.sim.training or life.subject.is_stateful:
        raise Skip
    args, kwargs = life.call(rng.randrange(1 << 30))
    with torch.inference_mode():
        life.sim(*args, **kwargs)
    with torch.no_grad():
        life.sim(*args, **kwargs)
    life.sim(*args, **kwargs)
    with life.sim.in_float():
        life.sim(*args, **kwargs)


@step("inference mode with inference tensors", pure=True)
def _inference(life: Life, rng: random.Random) -> None:
    if life.sim.training or life.subject.is_stateful:
        raise Skip
    with torch.inference_mode():
        args, kwargs = life.call(rng.randrange(1 << 30))
        life.sim(*args, **kwargs)


@step("an error in in_float", share=0.3, pure=True)
def _in_float(life: Life, rng: random.Random) -> None:
    try:
        with life.sim.in_float():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


@step("compare", share=0.5, pure=True)
def _compare(life: Life, rng: random.Random) -> None:
    life.sim.compare(life.batches(rng)[0])


@step("sensitivity", share=0.4, pure=True)
def _sensitivity(life: Life, rng: random.Random) -> None:
    life.sim.sensitivity(life.batches(rng, 2), progress=False)


@step("float_plan", share=0.2, pure=True)
def _plan(life: Life, rng: random.Random) -> None:
    plan = life.sim.float_plan(life.batches(rng, 2), target=25.0, seconds=5, progress=False)
    life.sim.config.with_plan(plan)


@step("search_bits", share=0.2, pure=True)
def _bits(life: Life, rng: random.Random) -> None:
    life.sim.search_bits(life.batches(rng, 2), budget=qsim.Budget(size=0.2), probes=4, progress=False)


@step("progressive", share=0.2, pure=True)
def _progressive(life: Life, rng: random.Random) -> None:
    life.sim.progressive(life.batches(rng, 2), progress=False)


@step("bake", share=0.5, pure=True)
def _bake(life: Life, rng: random.Random) -> None:
    life.sim.bake()
    life.sim.integer_state_dict()


@step("export", share=0.5, pure=True)
def _export(life: Life, rng: random.Random) -> None:
    life.sim.export(os.path.join(life.folder, "model.onnx"))


@step("integers", share=0.5, pure=True)
def _integer(life: Life, rng: random.Random) -> None:
    if life.sim.training or life.subject.is_stateful:
        raise Skip
    args, kwargs = life.call(rng.randrange(1 << 30))
    with torch.no_grad(), life.sim.integer():
        life.sim(*args, **kwargs)


@step("evaluate", share=0.5, pure=True)
def _evaluate(life: Life, rng: random.Random) -> None:
    if life.subject.is_stateful:
        raise Skip
    life.sim.evaluate(life.batches(rng)[0], integer=rng.random() < 0.3)


@step("watch and monitor", share=0.5, pure=True)
def _watch(life: Life, rng: random.Random) -> None:
    class Log:
        def log(self, figures: object, step: int) -> None:
            pass

    args, kwargs = life.call(rng.randrange(1 << 30))
    if life.sim.training or life.subject.is_stateful:
        raise Skip
    with life.sim.watch() as watch, life.sim.monitor(Log()) as monitor:
        result = life.sim(*args, **kwargs)
        if result.requires_grad:
            result.double().square().mean().backward()
        watch.step()
        monitor.step()
    life.sim.zero_grad()


@step("hooks that look on", share=0.5, pure=True)
def _hooks(life: Life, rng: random.Random) -> None:
    if life.sim.training or life.subject.is_stateful:
        raise Skip
    args, kwargs = life.call(rng.randrange(1 << 30))
    seen: list[object] = []
    handles = [m.register_forward_hook(lambda m, a, y: seen.append(y)) for m in life.sim.model.modules()]
    handles += [q.register_forward_hook(lambda m, a, y: seen.append(y)) for q in life.sim.quantizers().values()]
    try:
        with torch.no_grad():
            life.sim(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


@step("compile", share=0.1, pure=True)
def _compile(life: Life, rng: random.Random) -> None:
    if life.sim.training or life.subject.is_stateful:
        raise Skip
    args, kwargs = life.call(rng.randrange(1 << 30))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(life.sim, backend="aot_eager")(*args, **kwargs)


@step("a mistake", share=2, pure=True)
def _mistake(life: Life, rng: random.Random) -> None:
    sim = life.sim
    way = rng.randrange(8)
    if way == 0:
        sim.enable("nothing.*")
    elif way == 1:
        sim.calibrate([], progress=False)
    elif way == 2:
        sim.load_state_dict({**sim.state_dict(), "more": torch.zeros(1)})
    elif way == 3:
        state = sim.state_dict()
        sim.load_state_dict({name: t for name, t in state.items() if name != next(iter(state))})
    elif way == 4:
        sim.load_encodings(os.path.join(life.folder, "none.json"))
    elif way == 5:
        sim.load_state_dict(nn.Linear(3, 2).state_dict())
    elif way == 6:
        sim.set_method("best")
    else:
        sim.fallback("nothing.*")
