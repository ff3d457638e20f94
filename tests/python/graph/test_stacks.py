"""A simulation in what people train with: mixed precision, checkpointing, averaged weights, copies, random numbers."""

import copy
import dataclasses
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from models import ConvNet, Forward, Perceptron, seeded
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import qsim

IMAGES = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
HALVES = [torch.bfloat16, torch.float16]


def config(kind: str) -> qsim.Config:
    base = qsim.int8()
    changes = {"fixed": {}, "learnable": {"learnable": True}, "running": {"method": "ema"}}[kind]
    weight = {} if kind == "running" else changes
    return dataclasses.replace(
        base, weight=dataclasses.replace(base.weight, **weight), activation=dataclasses.replace(base.activation, **changes)
    )


def calibrated(model: nn.Module, x: Tensor, kind: str = "fixed") -> qsim.QuantSim:
    sim = qsim.QuantSim(model, x, config(kind))
    sim.calibrate([x], progress=False)
    return sim


def network(kind: str = "fixed") -> qsim.QuantSim:
    model = seeded(ConvNet)
    model.dropout.p = 0.0
    return calibrated(model, IMAGES, kind)


def gradients(sim: qsim.QuantSim) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in sim.named_parameters()}


def similar(found: Tensor, expected: Tensor, least: float = 0.98) -> None:
    """In direction: half precision decides many roundings otherwise."""
    assert torch.cosine_similarity(found.flatten().double(), expected.flatten().double(), dim=0) > least


@pytest.mark.parametrize("kind", ["fixed", "learnable", "running"])
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(dtype, kind):
    sim = network(kind).train()
    expected = sim(IMAGES)
    with torch.autocast("cpu", dtype):
        y = sim(IMAGES)
    assert y.dtype is dtype
    similar(y, expected)
    y.float().square().mean().backward()
    found = gradients(sim)
    sim.zero_grad()
    sim(IMAGES).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in sim.parameters())
    weights = [name for name in found if name.endswith("weight")]
    similar(torch.cat([found[name].flatten() for name in weights]), torch.cat([gradients(sim)[name].flatten() for name in weights]), 0.9)


def test_calibration_under_autocast_observes_what_autocast_computes():
    with torch.autocast("cpu", torch.bfloat16):
        sim = network()
    highest = sim.quantizers()["fc.output"].max
    assert highest == highest.bfloat16()
    assert highest != network().quantizers()["fc.output"].max


def test_gradient_scaler_skips_a_step_that_overflows():
    sim = network().train()
    optimizer, scaler = torch.optim.SGD(sim.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = [p.detach().clone() for p in sim.parameters()]
    for factor, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = sim(IMAGES).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert moves == any(not torch.equal(p, old) for p, old in zip(sim.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0**7


@pytest.mark.parametrize("kind", ["fixed", "learnable", "running"])
@pytest.mark.parametrize("dtype", HALVES)
def test_whole_models_in_half_precision(dtype, kind):
    sim = network(kind)
    expected = sim(IMAGES)
    sim = sim.to(dtype).train()
    assert {p.dtype for p in sim.model.parameters()} == {dtype}
    assert all(quantizer.scale.dtype is torch.float32 for quantizer in sim.quantizers().values())
    y = sim(IMAGES.to(dtype))
    assert y.dtype is dtype
    similar(y, expected)
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype is p.dtype for p in sim.parameters())


class Checkpointed(nn.Module):
    """Its first part is recomputed in backward, unless `reentrant` is None."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.last = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) if self.reentrant is None else checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.last(h)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["fixed", "learnable"])
def test_checkpointing_changes_nothing(kind, reentrant):
    found = []
    for how in (reentrant, None):
        sim, x = calibrated(seeded(Checkpointed, how), ROWS, kind).train(), ROWS.clone().requires_grad_()
        torch.manual_seed(5)
        y = sim(x)
        y.square().sum().backward()
        found.append([y, x.grad, *gradients(sim).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_whole_simulation_is_checkpointed():
    plain, recomputed = network().train(), network().train()
    plain(IMAGES).sum().backward()
    checkpoint(recomputed, IMAGES, use_reentrant=False).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain).values(), gradients(recomputed).values(), strict=True))


@pytest.mark.parametrize("kind", ["fixed", "learnable", "running"])
def test_averaged_weights(kind):
    sim = network(kind).train()
    averaged = AveragedModel(sim, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    averaged.update_parameters(sim)  # the first one copies
    before = {name: p.detach().clone() for name, p in sim.named_parameters()}
    optimizer = torch.optim.SGD(sim.parameters(), 0.1)
    sim(IMAGES).square().mean().backward()
    optimizer.step()
    averaged.update_parameters(sim)
    for name, p in averaged.module.named_parameters():
        torch.testing.assert_close(p, 0.75 * before[name] + 0.25 * sim.get_parameter(name))
    averaged.eval()
    assert averaged(IMAGES).isfinite().all()
    assert kind == "learnable" or averaged.module.encodings() == sim.encodings()
    assert not torch.equal(averaged(IMAGES), sim.eval()(IMAGES))


def test_gradients_accumulate():
    sim = network().train()
    sim(IMAGES).sum().backward()
    expected = gradients(sim)
    sim.zero_grad()
    for part in IMAGES.split(2):
        sim(part).sum().backward()
    for name, p in sim.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5)


def saved(sim: qsim.QuantSim) -> qsim.QuantSim:
    buffer = io.BytesIO()
    torch.save(sim, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


MODELS = {
    "module": lambda: seeded(ConvNet),
    "traced": lambda: torch.fx.symbolic_trace(seeded(ConvNet)),
    "traced part": lambda: nn.Sequential(torch.fx.symbolic_trace(seeded(ConvNet)), nn.ReLU()).eval(),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sim: pickle.loads(pickle.dumps(sim)), saved], ids=["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("model", MODELS)
def test_copies(model, copied):
    sim = calibrated(MODELS[model](), IMAGES)
    expected = sim(IMAGES)
    twin = copied(copied(sim))
    assert torch.equal(twin(IMAGES), expected)
    assert twin.encodings() == sim.encodings()
    twin.disable("*")
    assert not torch.equal(twin(IMAGES), expected)  # simulated by quantizers of its own
    assert torch.equal(sim(IMAGES), expected)
    with sim.in_float():
        assert torch.equal(sim(IMAGES), twin(IMAGES))


def test_threads_train_on_one_simulation():
    sim = network().train()
    sim(IMAGES).sum().backward()
    expected = gradients(sim)
    found = []

    def work() -> None:
        for _ in range(5):
            found.append(torch.autograd.grad(sim(IMAGES).sum(), list(sim.parameters())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, expected.values(), strict=True))


def test_random_numbers_stay():
    model = Forward(lambda self, x: self.fc(x) * float(np.random.rand() + 1), fc=nn.Linear(6, 3)).eval()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    expected = np.random.rand(3)  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    calibrated(model, ROWS)
    assert (np.random.rand(3) == expected).all()  # noqa: NPY002


def adjacency(h: Tensor) -> Tensor:
    return (h @ h.t()).relu().to_sparse()


SPARSE = {
    "intermediate": lambda self, x: torch.sparse.mm(adjacency(self.fc(x)) * 2.0, self.fc(x)),
    "softmax": lambda self, x: torch.sparse.mm(torch.sparse.softmax(adjacency(self.fc(x)), 1), self.fc(x)),
    "dense again": lambda self, x: self.fc(x) + (adjacency(self.fc(x)) * 0.5).to_dense()[:, :6],
    "buffer": lambda self, x: torch.sparse.mm(self.graph, self.fc(x)),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors_pass_through(kind):
    model = Forward(SPARSE[kind], fc=nn.Linear(6, 6)).eval()
    model.register_buffer("graph", torch.eye(16).to_sparse())
    sim = calibrated(model, ROWS)
    assert "fc.weight" in sim.encodings()
    similar(sim(ROWS), model(ROWS))
    assert not torch.equal(sim(ROWS), model(ROWS))
    sim.train()
    sim(ROWS).sum().backward()
    assert sim.model.fc.weight.grad.isfinite().all()
    assert kind == "buffer" or any("is not dense" in note and "stays in float" in note for note in sim.summary().notes)


def test_states_load_without_running_code():
    buffer = io.BytesIO()
    sim = calibrated(seeded(Perceptron), ROWS, "learnable")
    torch.save(sim.state_dict(), buffer)
    buffer.seek(0)
    fresh = qsim.QuantSim(seeded(Perceptron), ROWS, config("learnable"))
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh(ROWS), sim(ROWS))
