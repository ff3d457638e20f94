"""What runs in float runs simulated: programs that made it raise."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, decibels, linear, on_grid, simulated
from models import Forward
from torch import nn
from torch.optim.swa_utils import AveragedModel

import qsim

X = torch.linspace(-2, 2, 256, dtype=torch.float64).view(32, 8).sin()
WIDE = dataclasses.replace(
    EXACT, weight=dataclasses.replace(EXACT.weight, bits=16), activation=dataclasses.replace(EXACT.activation, bits=16)
)


def layers(*names: str) -> dict[str, nn.Linear]:
    torch.manual_seed(0)
    return {name: nn.Linear(8, 8).double() for name in names}


def gradients(model: nn.Module, owner: nn.Module, x: torch.Tensor, *, training: bool) -> list[torch.Tensor]:
    model.train(training)
    owner.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in owner.parameters() if p.grad is not None)]


def assert_near_float(sim: qsim.QuantSim, model: nn.Module, x: torch.Tensor, *, training: bool = False) -> None:
    """Results and gradients at 16 bits, of a sim whose ranges have room."""
    found, expected = gradients(sim, sim.model, x, training=training), gradients(model, model, x, training=training)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 5e-3 * theirs.abs().max()


def roomy(model: nn.Module, x: torch.Tensor) -> qsim.QuantSim:
    """At 16 bits, calibrated on more than the example: no value lies at the end of its range."""
    sim = qsim.QuantSim(model, x, WIDE)
    sim.calibrate([x * factor for factor in (-2.0, 1.0, 1.5, 2.0)] + [x.roll(1, -1) * 2.0], progress=False)
    return sim


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("big", [False, True])
def test_an_increment_behind_a_rectifier_that_reads_the_same(training, big):
    def forward(m, x):
        x = m.a(x)
        x += m.b(F.relu(x))
        return x

    x = X.repeat(100, 1) if big else X  # more than 20,000 elements
    model = Forward(forward, **layers("a", "b")).eval()
    assert_near_float(roomy(model, x), model, x, training=training)


def test_an_increment_by_hand():
    def forward(m, x):
        x = m.a(x)
        x += m.b(F.relu(x))
        return m.c(x)

    model = Forward(forward, **layers("a", "b", "c")).eval()
    sim = simulated(model, X)
    fa = model.a(X)
    fb = model.b(F.relu(fa))
    y = on_grid(linear(model.a, on_grid(X)), fa)
    z = on_grid(linear(model.b, on_grid(F.relu(y), F.relu(fa))), fb)
    expected = on_grid(linear(model.c, on_grid(y + z, fa + fb)), model.c(fa + fb))
    torch.testing.assert_close(sim(X), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sim.train()(X), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_batch_norm_before_a_recurrent_layer(kind):
    torch.manual_seed(0)
    model = Forward(lambda m, x: m.l(m.n(x.mT).mT)[0], n=nn.BatchNorm1d(8), l=kind(8, 4, batch_first=True)).double()
    with torch.no_grad():
        for _ in range(10):
            model(torch.randn(16, 5, 8, dtype=torch.float64) * 2 + 1)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    sim = simulated(model.eval(), x, config=WIDE)
    with torch.no_grad():
        assert decibels(sim(x), model(x)) > 60


def test_a_batch_norm_directly_before_a_recurrent_layer():
    model = Forward(lambda m, x: m.l(m.n(x))[0], n=nn.BatchNorm1d(8), l=nn.LSTM(8, 4)).double().eval()
    sim = simulated(model, X, config=WIDE)
    with torch.no_grad():
        assert decibels(sim(X), model(X)) > 60


def test_an_operand_that_another_makes_in_training():
    def forward(m, x):
        return x + (torch.ones_like(x) * 0.1 if m.training else m.l(x))

    model = Forward(forward, **layers("l")).eval()
    sim = simulated(model, X)
    torch.testing.assert_close(sim(X), on_grid(on_grid(X) + on_grid(linear(model.l, on_grid(X)), model.l(X)), X + model.l(X)))
    sim.train()
    assert (sim(X) - (X + 0.1)).abs().max() < 0.1


def other_sum(m, x, z):
    z = x + x if m.training else torch.add(z, 0.5)
    return m.l(x.amax(-1, keepdim=True) + z)


def sum_with_a_number(m, x, z):
    return m.l(z + (x if m.training else 0.5))


def sum_with_what_modes_do_not_see(m, x, z):
    h = F.hardswish(x)
    return m.l(z + (h if m.training else 0.5)) + h


def more_to_concatenate(m, x, z):
    return m.l(torch.cat([z, x] if m.training else [z]))


@pytest.mark.parametrize("forward", [other_sum, sum_with_a_number, sum_with_what_modes_do_not_see, more_to_concatenate])
def test_what_training_alone_reads_has_no_range_to_wait_for(forward):
    """Seed 1740786 of the fuzzer: no batch of the calibration reaches an operand that evaluation does not have."""

    class Batch(dict):
        """Not to every function that looks into dicts."""

    model = Forward(lambda m, b: forward(m, b["x"], b["z"]), **layers("l")).eval()
    batch = Batch(x=X, z=X.roll(3, 0) * 1.5)
    sim = qsim.QuantSim(model, (batch,), WIDE)
    sim.calibrate([batch, Batch(x=X * 2, z=X * 3)], forward=lambda m, b: m(b), progress=False)
    for training in (False, True):
        assert decibels(sim.train(training)(batch), model.train(training)(batch)) > 60


@pytest.mark.parametrize("kind", [lambda x: F.relu(torch.randn_like(x)) * 0.1, lambda x: torch.randn_like(x) * 0.1, torch.zeros_like])
def test_noise_in_training(kind):
    model = Forward(lambda m, x: x + (kind(x) if m.training else m.l(x)), **layers("l")).eval()
    sim = simulated(model, X)
    found, expected = [], []
    for results, run in ((found, sim), (expected, model)):
        torch.manual_seed(1)
        results.append(run.train()(X))
    assert (found[0] - expected[0]).abs().max() < 0.1


def test_attention_to_itself_and_to_another():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, z):
            y, _ = self.mix(x, x, x)
            return self.mix(y, z, z)[0] + self.mix(y, x, z)[0]

    model, x, z = Both().double().eval(), torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 6, 8, dtype=torch.float64)[:, :4]
    for inputs in ((x, z), (z, x)):
        sim = simulated(model, *inputs, config=WIDE)
        with torch.no_grad():
            assert decibels(sim(*inputs), model(*inputs)) > 60
    assert_two(simulated(model, x, z, config=WIDE), model, x, z)


def assert_two(sim: qsim.QuantSim, model: nn.Module, x: torch.Tensor, z: torch.Tensor) -> None:
    results = []
    for run, owner in ((sim, sim.model), (model, model)):
        owner.zero_grad()
        run(x, z).square().sum().backward()
        results.append([p.grad.clone() for p in owner.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 0.1 * theirs.abs().max()


BOTH_NAMES = {
    "two layers": lambda m, q, h: m.b(q) + m.c(h),
    "a sum": lambda m, q, h: q + h,
    "a product": lambda m, q, h: q * h,
    "a sum of one and a layer of the other": lambda m, q, h: m.b(q) + h,
}


@pytest.mark.parametrize("read", BOTH_NAMES)
@pytest.mark.parametrize("made", [lambda m, x: m.a(x), lambda m, x: m.a(x) + x])
@pytest.mark.parametrize("training", [False, True])
def test_both_names_of_what_was_changed_in_place(training, made, read):
    def forward(m, x):
        h = made(m, x)
        q = h.relu_()
        return BOTH_NAMES[read](m, q, h)

    model = Forward(forward, **layers("a", "b", "c")).eval()
    assert_near_float(roomy(model, X), model, X, training=training)


@pytest.mark.parametrize("make", [F.hardswish, lambda x: F.hardswish(x.clone(), inplace=True)])
def test_a_view_of_what_no_mode_meets_is_written_to(make):
    """A quantized copy of it would take what is written."""

    def forward(m, x):
        y = make(x)
        y[..., :4].mul_(0.25)
        return y

    x = torch.randn(16, 8)
    model = Forward(forward).eval()
    sim = qsim.QuantSim(model, x, qsim.int16())
    sim.calibrate([x], progress=False)
    assert decibels(sim(x), model(x)) > 60


def test_half_with_swapped_parameters():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        x = torch.randn(16, 8)
        sim = simulated(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), x)
        with torch.no_grad():
            expected = sim(x)
        sim.half()
        with torch.no_grad():
            assert (sim(x.half()).float() - expected).abs().max() < 0.2
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
    sim = qsim.QuantSim(model, nested, qsim.int16())
    sim.calibrate([nested], forward=lambda m, x: m(x), progress=False)
    with torch.no_grad():
        for ours, theirs in zip(sim(nested).unbind(), model(nested).unbind(), strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() < 0.05


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_inside():
    """As the fast path of a transformer makes them of padded sequences."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    sim = qsim.QuantSim(model, {"src": x, "src_key_padding_mask": padding}, qsim.int16())
    sim.calibrate([{"src": x, "src_key_padding_mask": padding}], progress=False)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        assert bool((expected[1, 3:] == 0).all())
        assert decibels(sim(x, src_key_padding_mask=padding), expected) > 60


def test_the_meta_device():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval().to("meta")
    sim = qsim.QuantSim(model, torch.randn(1, 3, 8, 8, device="meta"))
    assert {"0.weight", "0.output", "4.weight", "4.output"} <= set(sim.quantizers())
    masked = Forward(lambda m, x: F.softmax(m.a(x).masked_fill(x > 0, float("-inf")), -1), a=nn.Linear(8, 8, device="meta")).eval()
    assert "a.weight" in qsim.QuantSim(masked, torch.randn(2, 8, device="meta")).quantizers()


def test_an_averaged_model_with_running_ranges():
    x = torch.randn(16, 8)
    config = dataclasses.replace(qsim.int8(), activation=qsim.TensorSpec(method="ema"))
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), x, config)
    sim.calibrate([x], progress=False)
    averaged = AveragedModel(sim, use_buffers=True)
    optimizer = torch.optim.SGD(sim.parameters(), 0.01)
    sim.train()
    for _ in range(3):
        optimizer.zero_grad()
        sim(x).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(sim)
    averaged.eval()
    sim.eval()
    with torch.no_grad():
        assert (averaged(x) - sim(x)).abs().max() < 0.2


def test_a_forward_that_was_compiled():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    expected = qsim.QuantSim(model, torch.randn(4, 8))
    model.forward = torch.compile(model.forward, backend="eager")
    x = torch.randn(16, 8)
    sim = qsim.QuantSim(model, x)
    sim.calibrate([x], progress=False)
    with torch.no_grad():
        assert (sim(x) - model(x)).abs().max() < 0.2
    assert set(sim.quantizers()) in (set(expected.quantizers()), set())


def test_a_failing_recording_is_no_fault_of_folding():
    model = Forward(lambda m, x: m.a(x, x), a=nn.Linear(8, 8)).eval()
    with pytest.raises(Exception, match="positional argument") as raised:
        qsim.QuantSim(model, torch.randn(4, 8))
    assert "fold_batch_norms" not in str(raised.value)


# Operators and builds.


GRADIENTS = ["bool", "int8", "uint8", "float16", "int32", "float64", "complex64", "complex128", "float8_e4m3fn"]


@pytest.fixture(scope="module")
def right_gradients() -> list[str]:
    """The element types whose gradients pass a mask as they are, or are refused: of one process, whose allocator checks every bound."""
    script = f"""
import torch, qsim
def is_right(grad, mask):
    try:
        found = torch.ops.qsim.fake_quantize_mask_backward(grad, mask)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return True
    wide = torch.float32 if grad.element_size() == 1 else grad.dtype
    return found.dtype is grad.dtype and torch.equal(found.to(wide), grad.to(wide))
for name in {GRADIENTS}:
    right = True
    for elements in (8, 1000, 4096):
        mask = torch.full(((elements + 7) // 8,), 255, dtype=torch.uint8)
        for grad in (torch.ones(elements), torch.ones(elements * 2)[::2]):
            right &= is_right(grad.to(getattr(torch, name)), mask)
    print(name if right else "wrong")
"""
    return _run(script, MALLOC_CHECK_="3", MALLOC_PERTURB_="165").splitlines()


@pytest.mark.parametrize("dtype", GRADIENTS)
def test_a_mask_and_a_gradient_of_another_element_size(dtype, right_gradients):
    """Every element is in range, so the gradient passes as it is; or there is an error. Nothing is written out of bounds."""
    assert dtype in right_gradients


def test_a_cuda_build_without_a_gpu():
    """What most have installed on a laptop: asking for the current stream raises there."""
    script = """
import torch
torch.version.cuda = "12.8"
def refuse(*args, **kwargs):
    raise RuntimeError("Found no NVIDIA driver on your system")
torch.cuda.is_current_stream_capturing = refuse
torch.cuda.current_stream = refuse
torch.cuda._lazy_init = refuse
import qsim
x = torch.randn(16, 8)
sim = qsim.QuantSim(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval(), x)
sim.calibrate([x], progress=False)
with torch.no_grad():
    sim(x)
sim.train()
sim(x).sum().backward()
"""
    _run(script)


def _run(script: str, **environment: str) -> str:
    """What a script prints in a process of its own."""
    root = Path(qsim.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Learned scales, other entrances.


def test_a_learned_scales_gradient_does_not_depend_on_the_batch():
    """Esser et al. 2020, section 2.2: the factor counts the features of an activation, not how many samples are in a batch."""
    x = torch.randn(4, 8)
    config = dataclasses.replace(qsim.int8(), activation=dataclasses.replace(qsim.int8().activation, learnable=True))
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), x, config)
    sim.calibrate([x], progress=False)
    sim.train()
    found = []
    for repeats in (1, 4, 16):
        sim.zero_grad()
        sim(x.repeat(repeats, 1)).square().mean().backward()  # the same mean
        found.append([p.grad.clone() for name, p in sim.quantization.named_parameters() if p.grad is not None])
    assert found[0]
    for scales in found[1:]:
        for ours, theirs in zip(scales, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-8)
