"""method="ema": running ranges in Quantizer, QuantSim, Config and under torch.compile."""

import copy
import dataclasses

import pytest
import torch
from models import ConvNet, Perceptron, seeded
from torch._dynamo.testing import CompileCounterWithBackend

import qsim
from qsim import CalibrationError, Config, Encoding, NoEncodingError, Quantizer, TensorSpec

GRANULARITIES = [(None, None), (1, None), (-1, None), (1, 2)]
SHAPE = (4, 5, 3)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def running(**options):
    return TensorSpec(method="ema", **options)


def ema_config(**options):
    return qsim.int8().override("*", method="ema", **options)


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_follows_batches_in_training_and_rests_in_eval(axis, block_size, symmetric):
    spec = running(averaging=0.3, axis=axis, block_size=block_size, symmetric=symmetric, bits=6)
    quantizer = Quantizer(spec)
    batches = [torch.randn(SHAPE) * (step + 1) for step in range(3)]
    ends = []
    for step, x in enumerate(batches):
        y = quantizer(x)
        exact = qsim.Observer(axis, block_size)
        exact(x)
        ends.append((exact.min.double(), exact.max.double()))
        if step == 0:
            low, high = ends[0]
        else:
            low, high = 0.7 * low + 0.3 * ends[step][0], 0.7 * high + 0.3 * ends[step][1]
        torch.testing.assert_close(quantizer.min.double(), low)
        torch.testing.assert_close(quantizer.max.double(), high)
        scale, zero_point = qsim.ops.choose_qparams(quantizer.min, quantizer.max, -32, 31, symmetric)
        assert torch.equal(quantizer.scale, scale)
        assert torch.equal(y, qsim.ops.fake_quantize(x, scale, zero_point, -32, 31, axis=axis, block_size=block_size))
    quantizer.eval()
    before = quantizer.encoding
    expected = qsim.reference.fake_quantize(batches[0], scale, zero_point, -32, 31, axis=axis, block_size=block_size)
    assert torch.equal(quantizer(batches[0]), expected)
    assert quantizer.encoding == before == quantizer.compute_encoding()
    assert quantizer.counts.elements == 3 * 60


def test_switches_in_training():
    quantizer = Quantizer(running())
    x = torch.randn(10)
    quantizer(x)
    quantizer.observing = False
    before = quantizer.encoding
    quantizer(100 * x)
    assert quantizer.encoding == before
    quantizer.enabled = False
    assert torch.equal(quantizer(x), x)
    quantizer.observing = True
    assert torch.equal(quantizer(100 * x), 100 * x)
    assert quantizer.encoding != before
    assert quantizer.counts.elements == 20


def test_batches_that_are_not_finite():
    quantizer = Quantizer(running(), name="a")
    assert quantizer(torch.full((3,), torch.nan)).isnan().all()
    quantizer.eval()
    with pytest.raises(NoEncodingError, match="'a' has no encoding"):
        quantizer(torch.ones(3))
    with pytest.raises(CalibrationError, match="none of what it observed is finite"):
        quantizer.compute_encoding()
    quantizer.train()
    quantizer(torch.tensor([-1.0, 1.0, torch.inf]))
    assert (quantizer.min.item(), quantizer.max.item()) == (-1, 1)
    assert quantizer.eval()(torch.tensor([torch.inf])).isfinite().all()


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("known", [False, True])
def test_state_dict(axis, block_size, known):
    make = lambda: Quantizer(running(axis=axis, block_size=block_size), shape=SHAPE if known else None)  # noqa: E731
    quantizer, names = make(), list(make().state_dict())
    x = torch.randn(SHAPE)
    quantizer(x)
    assert list(quantizer.state_dict()) == names
    fresh = make()
    fresh.load_state_dict(quantizer.state_dict())
    assert torch.equal(fresh.eval()(x), quantizer.eval()(x))
    assert torch.equal(fresh.min, quantizer.min)
    twin = copy.deepcopy(quantizer.train())
    twin(9 * x)
    assert torch.equal(fresh.scale, quantizer.scale)
    assert not torch.equal(twin.scale, quantizer.scale)


def test_training_goes_on_from_a_given_encoding():
    quantizer = Quantizer(running(averaging=0.5))
    quantizer.set_encoding(Encoding(torch.tensor(0.1), torch.tensor(-28, dtype=torch.int32), -128, 127))
    assert (quantizer.min.item(), quantizer.max.item()) == pytest.approx((-10, 15.5))
    quantizer(torch.tensor([-20.0, 10.5]))
    assert (quantizer.min.item(), quantizer.max.item()) == pytest.approx((-15, 13))


def test_a_running_range_tells_nothing_else():
    first, second = Quantizer(running(), name="a"), Quantizer(running())
    first(torch.ones(3))
    with pytest.raises(ValueError, match=r"'a': a running range .* depends on the order of its batches"):
        first.merge(second)
    with pytest.raises(ValueError, match="'a': keeps a running range alone, and method 'mse'"):
        first.compute_encoding("mse")
    with pytest.raises(ValueError, match="needs the sketch"):
        first.observer.histogram()
    exact = Quantizer(TensorSpec(), name="b")
    exact.observer(torch.ones(3))
    for choose in (exact.compute_encoding, lambda method: exact.compute_encoding_from(torch.ones(3), method)):
        with pytest.raises(ValueError, match="'b': method='ema' follows the batches in training"):
            choose("ema")
    with pytest.raises(ValueError, match="learnable=True trains the scale"):
        running(learnable=True)
    with pytest.raises(ValueError, match="averaging=0; expected a number above 0, at most 1"):
        running(averaging=0)


def test_weights_start_at_their_range():
    weight = torch.randn(4, 6)
    quantizer = Quantizer(running(axis=0, symmetric=True), shape=weight.shape)
    exact = Quantizer(TensorSpec(axis=0, symmetric=True, method="minmax"), shape=weight.shape)
    for _ in range(2):
        assert quantizer.compute_encoding_from(weight) == exact.compute_encoding_from(weight)


def test_the_gradient_is_that_of_the_grid():
    quantizer = Quantizer(running(bits=4, averaging=0.5))
    quantizer(torch.tensor([-1.0, 1.0]))
    x = torch.tensor([-3.0, -0.5, 0.0, 0.5, 9.0], requires_grad=True)
    quantizer(x).sum().backward()
    scale, zero_point = quantizer.scale, quantizer.zero_point
    expected, _, _ = qsim.reference.fake_quantize_backward(torch.ones(5), x.detach(), scale, zero_point, -8, 7)
    assert torch.equal(x.grad, expected)
    assert 0 < expected.sum() < 5


def test_compiled_training_step_follows_the_switches_without_recompiling():
    quantizer = Quantizer(running(averaging=0.3), shape=(6,))
    twin = copy.deepcopy(quantizer)
    weight, other = (torch.randn(6, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    compiles = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=compiles)
    def step(x, weight):
        return quantizer(x * weight).square().mean()

    for i in range(6):
        for q in (quantizer, twin):
            q.observing, q.enabled = i % 2 == 0, i % 3 != 2
        x = torch.randn(5, 6) * (i + 1)
        step(x, weight).backward()
        twin(x * other).square().mean().backward()
        assert torch.equal(quantizer.min, twin.min)
        torch.testing.assert_close(weight.grad, other.grad)
    assert compiles.frame_count == 1
    assert quantizer.counts.elements == 3 * 30


def test_simulation_trains_compiled_and_eager_alike():
    model, x = seeded(Perceptron), torch.randn(16, 6)
    config = Config(weight=running(symmetric=True, axis=0), activation=running(), bias=False)
    sims = [qsim.QuantSim(model, x, config) for _ in range(2)]
    compiled = torch.compile(sims[0], fullgraph=True, backend="aot_eager")
    for sim in sims:
        sim.train()
    for i in range(4):
        for quantizer in [q for sim in sims for q in sim.quantizers().values()]:
            quantizer.observing = i != 2
        batch = torch.randn(16, 6)
        outputs = [compiled(batch), sims[1](batch)]
        torch.testing.assert_close(*outputs)
        for sim, y in zip(sims, outputs, strict=True):
            sim.zero_grad()
            y.square().sum().backward()
            with torch.no_grad():
                for p in sim.parameters():
                    p -= 0.01 * p.grad
    for sim in sims:
        sim.eval()
    for (key, mine), theirs in zip(sims[0].quantizers().items(), sims[1].quantizers().values(), strict=True):
        torch.testing.assert_close(mine.scale, theirs.scale, msg=key)
        assert mine.counts == theirs.counts


def test_calibrate_runs_over_the_batches():
    model, batches = seeded(ConvNet), [torch.randn(4, 1, 12, 12) * scale for scale in (1, 2, 3)]
    sim = qsim.QuantSim(model, batches[0], ema_config(averaging=0.5))
    assert not sim.training
    report = sim.calibrate(batches, progress=False)
    assert not report.problems
    low = high = None
    for x in batches:
        low = x.min() if low is None else (low + x.min()) / 2
        high = x.max() if high is None else (high + x.max()) / 2
    seen = sim.quantizers()["input"]
    torch.testing.assert_close(torch.stack([seen.min, seen.max]), torch.stack([low, high]))
    before = sim.encodings()
    sim(9 * batches[0])  # evaluation moves nothing
    assert sim.encodings() == before
    sim.set_method("mse")  # running ranges stay running
    assert sim.encodings()["input"] == before["input"]
    sim.train()
    assert all(q.observing and q.enabled for q in sim.quantizers().values())
    sim(9 * batches[0])
    assert sim.encodings()["input"] != before["input"]


def test_training_without_calibration():
    sim = qsim.QuantSim(seeded(ConvNet), torch.randn(4, 1, 12, 12), ema_config())
    sim.train()
    sim(torch.randn(4, 1, 12, 12)).sum().backward()
    sim.eval()
    assert sim(torch.randn(4, 1, 12, 12)).isfinite().all()
    assert set(sim.encodings()) == set(sim.quantizers())


def test_config_and_json():
    config = dataclasses.replace(qsim.w4a8(), activation=running(averaging=0.1))
    assert Config.from_json(config.to_json()) == config
    assert config.override("fc", method="minmax").spec_for("fc", "linear", "activation").method == "minmax"
    float_format = TensorSpec(dtype="float16", method="ema")
    assert torch.equal(Quantizer(float_format)(torch.tensor([0.1])), torch.tensor([0.1]).half().float())
