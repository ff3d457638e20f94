"""Steps that make another simulation of one and go on with that: copies, pickles, files, dtypes, targets."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random

import torch

import qsim

from ...programs.results import same_bits
from ..life import Life, Skip, run
from . import step


def same_switches(sim: qsim.QuantSim, other: qsim.QuantSim) -> None:
    """No state dict has them."""
    for key, q in sim.quantizers().items():
        other.quantizers()[key].enabled, other.quantizers()[key].observing = q.enabled, q.observing
    for name, module in sim.named_modules():
        other.get_submodule(name).training = module.training


@step("go on with a copy", pure=True)
def _copy(life: Life, rng: random.Random) -> None:
    if life.changes:
        raise Skip  # nor does it copy what was pruned
    life.sim = copy.deepcopy(life.sim)


@step("go on with what was pickled", pure=True)
def _pickled(life: Life, rng: random.Random) -> None:
    if life.changes:
        raise Skip  # torch pickles no parametrized module
    life.sim = pickle.loads(pickle.dumps(life.sim))


@step("go on with what torch.save wrote", pure=True)
def _saved(life: Life, rng: random.Random) -> None:
    if life.changes:
        raise Skip
    file = io.BytesIO()
    torch.save(life.sim, file)
    file.seek(0)
    life.sim = torch.load(file, weights_only=False)


@step("a state dict of its own", pure=True)
def _own(life: Life, rng: random.Random) -> None:
    state = {name: t.clone() for name, t in life.sim.state_dict().items()}
    life.sim.load_state_dict(state, assign=rng.random() < 0.5 and not life.subject.shares)


@step("a state dict through a file", pure=True)
def _state(life: Life, rng: random.Random) -> None:
    file = io.BytesIO()
    torch.save(life.sim.state_dict(), file)
    file.seek(0)
    if life.is_rebuilt or len(life.changes) > life.folded_later:
        raise Skip
    fresh = life.fresh()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    same_switches(life.sim, fresh)
    if any(q.spec != fresh.quantizers()[key].spec for key, q in life.sim.quantizers().items()):
        raise Skip  # methods that were chosen later are in no state dict
    for (_, p), (_, own) in zip(life.sim.named_parameters(), fresh.named_parameters(), strict=True):
        own.requires_grad_(p.requires_grad)
    fresh.frozen = set(life.sim.frozen)
    assert fresh.restored == life.sim.restored
    life.sim = fresh


@step("an earlier state", share=0.5)
def _earlier(life: Life, rng: random.Random) -> None:
    state = copy.deepcopy(life.sim.state_dict())
    with torch.no_grad():
        for p in life.sim.parameters():
            p.mul_(1.05)
    args, kwargs = life.call(rng.randrange(1 << 30))
    with torch.no_grad():
        life.sim(*args, **kwargs)
    life.sim.load_state_dict(state)


@step("another dtype", share=0.6)
def _dtype(life: Life, rng: random.Random) -> None:
    dtype = rng.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16])
    life.sim.to(dtype)


@step("float32 again")
def _float(life: Life, rng: random.Random) -> None:
    life.sim.float()


@step("encodings through a file", pure=True)
def _encodings(life: Life, rng: random.Random) -> None:
    if any(q.spec.is_running for q in life.sim.quantizers().values()):
        raise Skip  # a running range goes on from what the encoding spans
    if any(bool((q.scale < 0).any()) for q in life.sim.quantizers().values()):
        raise Skip  # a learned scale that crossed zero comes back positive, which is the same grid
    path = os.path.join(life.folder, "own.json")
    life.sim.save_encodings(path)
    life.sim.load_encodings(path)


@step("encodings through AIMET's file", share=0.5, keeps=True, parameters=True)
def _aimet(life: Life, rng: random.Random) -> None:
    path = os.path.join(life.folder, "own.encodings")
    life.sim.save_encodings(path, rng.choice(["aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0"]))
    life.sim.load_encodings(path, strict=rng.random() < 0.5)


@step("a compressed checkpoint", share=0.7, keeps=True)
def _compressed(life: Life, rng: random.Random) -> None:
    folder = os.path.join(life.folder, f"compressed{rng.randrange(1 << 30)}")
    life.sim.save_compressed(folder)
    life.sim.load_compressed(folder)


@step("retarget", share=0.5)
def _retarget(life: Life, rng: random.Random) -> None:
    life.sim = life.sim.retarget(rng.choice(["default", "onnxruntime", "tensorrt", "openvino"]))
    life.config, life.is_rebuilt = life.sim.config, True


@step("retarget to the target that it has", share=0.5, pure=True)
def _same_target(life: Life, rng: random.Random) -> None:
    if life.changes:
        raise Skip
    sim, call = life.sim, life.call(rng.randrange(1 << 30))
    other = sim.retarget(life.config.target)
    for name, module in sim.named_modules():
        other.get_submodule(name).training = module.training
    problem = same_bits(run(other, call), run(sim, call))
    assert not problem, problem


@step("savings off and on", pure=True)
def _savings(life: Life, rng: random.Random) -> None:
    life.sim.savings = not life.sim.savings


@step("equalize and begin again", share=0.3)
def _equalized(life: Life, rng: random.Random) -> None:
    if life.changes or life.dtype is not torch.float32:
        raise Skip
    model = life.subject.model(rng.randrange(1 << 30))
    qsim.equalize(model, life.raw_examples())
    life.begin(model)
