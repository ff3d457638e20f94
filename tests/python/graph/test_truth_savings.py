"""Nothing that is saved changes a bit, in any program and whatever writes into parameters."""

import copy
import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn

import qsim


def conv() -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1)


IMAGE = torch.linspace(-3, 3, 8 * 8 * 20 * 20).sin().view(8, 8, 20, 20)  # more than 20,000 elements


def pair(model: nn.Module, *inputs: torch.Tensor, config: qsim.Config | None = None) -> tuple[qsim.QuantSim, qsim.QuantSim]:
    """A simulation that saves and one that does not."""
    sim = qsim.QuantSim(model.eval(), inputs, config)
    sim.calibrate([inputs], progress=False)
    plain = copy.deepcopy(sim)
    plain.savings = False
    return sim, plain


def outcome(sim: qsim.QuantSim, *args, training: bool = False, **kwargs) -> list[torch.Tensor]:
    """Results, and gradients of everything that has one."""
    sim.train(training)
    sim.zero_grad()
    x = args[0].clone().requires_grad_()
    results = sim(x, *args[1:], **kwargs)
    results = list(results) if isinstance(results, tuple) else [results]
    sum((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in results).backward()
    return [*(y.detach().clone() for y in results), x.grad, *(p.grad.clone() for p in sim.model.parameters() if p.grad is not None)]


def assert_same(sim, plain, *args, **kwargs):
    for training in (False, True):
        ours, theirs = (outcome(s, *args, training=training, **kwargs) for s in (sim, plain))
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        ours, theirs = (s.eval()(*args, **kwargs) for s in (sim, plain))
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, theirs)), strict=True):
            assert torch.equal(a, b)


def test_features_that_the_example_did_not_ask_for():
    def forward(m, x, features=False):
        y = m.conv(x)
        out = m.head(F.relu(y).mean((2, 3)))
        return (out, y) if features else out

    sim, plain = pair(Forward(forward, conv=conv(), head=nn.Linear(8, 4)), IMAGE)
    with torch.no_grad():
        assert sim(IMAGE, features=True)[1].min() < -0.1  # the rectifier left it alone
    assert_same(sim, plain, IMAGE, features=True)


def test_a_skip_connection_that_the_example_did_not_ask_for():
    def forward(m, x, skip=False):
        y = m.conv(x)
        z = F.relu(y)
        if skip:
            z = z + y
        return m.conv2(z)

    sim, plain = pair(Forward(forward, conv=conv(), conv2=conv()), IMAGE)
    assert_same(sim, plain, IMAGE, skip=True)


def test_a_list_that_keeps_what_a_rectifier_reads():
    def forward(m, x, deep=False):
        seen = []
        y = m.conv(x)
        seen.append(y)
        y = F.relu(y, inplace=False)
        y = m.conv2(y)
        if deep:
            seen = [t.mean() for t in seen]
            return y, seen[0]
        return y

    sim, plain = pair(Forward(forward, conv=conv(), conv2=conv()), IMAGE)
    assert_same(sim, plain, IMAGE, deep=True)


def test_a_list_of_the_callers():
    def forward(m, x, kept=None):
        y = m.conv(x)
        if kept is not None:
            kept.append(y)
        return m.conv2(F.relu(y))

    sim, plain = pair(Forward(forward, conv=conv(), conv2=conv()), IMAGE)
    found: dict[bool, list[torch.Tensor]] = {}
    for s in (sim, plain):
        kept: list[torch.Tensor] = []
        with torch.no_grad():
            s(IMAGE, kept=kept)
        found[s is sim] = kept
    assert torch.equal(found[True][0], found[False][0])


def test_what_a_closure_keeps():
    def forward(m, x, later=False):
        y = m.conv(x)
        look = lambda: y.amin()  # noqa: E731
        z = m.conv2(F.relu(y))
        return (z, look()) if later else z

    sim, plain = pair(Forward(forward, conv=conv(), conv2=conv()), IMAGE)
    assert_same(sim, plain, IMAGE, later=True)


def broadcast(rank, given):
    import torch
    import torch.distributed as dist

    import qsim

    torch.manual_seed(rank)  # other weights on every rank
    x = torch.linspace(-1, 1, 64).view(8, 8)
    sim = qsim.QuantSim(torch.nn.Linear(8, 8).eval(), x)
    sim.calibrate([x], progress=False)
    sim.eval()
    with torch.no_grad():
        sim(x)
    if given == "broadcast":
        for p in sim.model.parameters():
            dist.broadcast(p, 0)
    else:
        for p in sim.model.parameters():
            dist.all_reduce(p)
    with torch.no_grad():
        kept = sim(x).clone()
        sim.savings = False
        assert torch.equal(kept, sim(x)), given


@pytest.mark.parametrize("collective", ["broadcast", "all_reduce"])
def test_parameters_that_a_collective_writes(ranks, collective):
    ranks.run(broadcast, collective)


def through_data(p):
    p.data.lerp_(torch.ones_like(p), 0.5)


def through_another_data(p):
    p.data.copy_(p.data * 0.5 + 0.1)


def through_numpy(p):
    p.detach().numpy()[...] *= np.float32(0.5)


def through_dlpack(p):
    torch.from_dlpack(p.detach()).mul_(0.5)


def through_storage(p):
    torch.frombuffer((memoryview(p.detach().numpy()).cast("B")), dtype=torch.float32).mul_(0.5)


def through_another_thread(p):
    thread = threading.Thread(target=through_numpy, args=(p,))
    thread.start()
    thread.join()


WRITERS = [through_data, through_another_data, through_numpy, through_dlpack, through_storage, through_another_thread]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("then", ["nothing", "eval of the model"])
def test_parameters_that_something_writes_past_the_version_counter(write, then):
    x = torch.randn(16, 8)
    sim, plain = pair(Forward(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8)), x)
    with torch.no_grad():
        assert torch.equal(sim(x), plain(x))
        for s in (sim, plain):
            for p in s.model.parameters():
                write(p)
        if then == "eval of the model":
            sim.model.eval()
        assert torch.equal(sim(x), plain(x))


def test_parameters_in_memory_that_processes_share():
    x = torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    model.share_memory()
    sim, plain = pair(model, x)
    for s in (sim, plain):
        s.model.share_memory()
    with torch.no_grad():
        sim(x)
        for s in (sim, plain):  # as another process does: past every counter of this one
            for p in s.model.parameters():
                through_numpy(p)
        assert torch.equal(sim(x), plain(x))


_LOADED = """
import io, torch, qsim

def loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)

model, x = torch.nn.Linear(64, 64), torch.randn(4, 64)
sim = qsim.QuantSim(model.eval(), x, qsim.int8(target="onnxruntime"))
sim.calibrate([x], progress=False)
{load}
with torch.no_grad():
    {read}
    for p in sim.model.parameters():
        p.mul_(-2.0)
    found = sim(x)
    sim.savings = False
    assert torch.equal(found, sim(x))
"""


@pytest.mark.parametrize("read", ["sim(x)", "sim.evaluate(x, integer=True)"])
@pytest.mark.parametrize("load", ["sim = loaded(sim)", "sim.load_state_dict(loaded(sim.state_dict()), assign=True)"])
def test_parameters_in_memory_that_torch_load_read(load, read):
    """It has no allocator: writing to it ends the process where it was shared copy-on-write."""
    run = subprocess.run([sys.executable, "-c", _LOADED.format(load=load, read=read)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_moving_average_of_the_weights():
    """As code for EMA does it: ``ema.data.lerp_(p.data, 0.1)`` after each step, and evaluation in between."""
    x = torch.randn(16, 8)
    sim, plain = pair(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), x)
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for _ in range(3):
        for s in (sim, plain):
            for ema, p in zip(s.model.parameters(), other.parameters(), strict=True):
                ema.data.lerp_(p.data, 0.1)
        with torch.no_grad():
            assert torch.equal(sim(x), plain(x))


def test_the_model_may_be_told_to_evaluate_instead_of_the_simulation():
    """One number of many: nothing but `eval` can tell."""
    x = torch.randn(16, 256)
    sim, plain = pair(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)), x)
    with torch.no_grad():
        sim(x)
        for s in (sim, plain):
            s.model[0].weight.data[101, 57] = 0.0
            s.model[0].weight.data[101, 58] += 0.05
        sim.model.eval()
        assert torch.equal(sim(x), plain(x))


@pytest.mark.parametrize("rectify", [lambda t: t.relu_(), torch.relu_, lambda t: F.relu(t, inplace=True)])
@pytest.mark.parametrize("small", [False, True])
def test_a_rectifier_in_place_whose_operand_is_read_again(rectify, small):
    def forward(m, x):
        y = m.conv(x)
        z = rectify(y)
        return m.conv2(z) + z, y

    image = IMAGE[:1, :, :8] if small else IMAGE
    sim, plain = pair(Forward(forward, conv=conv(), conv2=conv()), image)
    with torch.no_grad():
        assert sim(image)[1].min() == 0
    assert_same(sim, plain, image)


@pytest.mark.parametrize("forgets", ["eval", "train"])
def test_memory_that_is_written_past_everything_is_read_anew_after_train_and_eval(forgets):
    """Through an address from before the weight was kept, which nothing holds: what kernels of others do."""
    torch.manual_seed(0)
    layer, x = nn.Linear(512, 512), torch.randn(4, 512)
    sim = qsim.QuantSim(Forward(lambda m, x: m.fc(x), fc=layer).eval(), x, inplace=True)
    sim.calibrate([x], progress=False)
    weight = sim.model.fc.weight
    memory = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    with torch.no_grad():
        before = sim(x)
        memory[123457] = 9.0
        getattr(sim.model, forgets)()
        found = sim(x)
        sim.savings = False
        assert torch.equal(found, sim(x))
    assert not torch.equal(found, before)
