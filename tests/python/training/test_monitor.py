"""The monitor of a training simulation: every figure beside what the loop itself can compute."""

import pytest
import torch
from torch import nn

import qsim
from qsim import reference

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


class Kept:
    def __init__(self):
        self.steps = {}

    def log(self, figures, step):
        self.steps[step] = figures


def simulated(config=None):
    torch.manual_seed(0)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), X, config or qsim.w4a8())
    sim.calibrate([X], progress=False)
    return sim.train()


def clipped(x, encoding):
    """Share of finite values that round beyond the grid, in float64 and by hand."""
    shape = [-1 if axis == encoding.axis else 1 for axis in range(x.ndim)]
    scale, zero = encoding.scale.double().reshape(shape), encoding.zero_point.double().reshape(shape)
    finite = x.isfinite()
    rounded = torch.where(finite, (x.double() / scale + zero).round(), 0.0)
    return ((rounded < encoding.quant_min) | (rounded > encoding.quant_max)).sum().item() / finite.sum().item()


def test_figures_are_those_of_the_step():
    sim, kept = simulated(), Kept()
    x = X * 3  # beyond what was calibrated
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    x[2:] = x[2:].clamp(-50, 50)
    with sim.monitor(kept) as monitor:
        sim(x[2:]).square().sum().backward()
        grads = {name: p.grad.clone() for name, p in sim.model.named_parameters()}
        monitor.step()
    figures, encodings = kept.steps[0], sim.encodings()
    assert figures["clipped/input"] == pytest.approx(clipped(x[2:], encodings["input"]), abs=0)
    assert figures["clipped/input"] > 0
    for key in ("0.weight", "2.weight"):
        weight = sim.model.get_parameter(key).detach()
        assert figures[f"clipped/{key}"] == pytest.approx(clipped(weight, encodings[key]), abs=0)
        assert figures[f"gradient_norm/{key}"] == pytest.approx(grads[key].norm().item(), rel=1e-6)
        assert figures[f"range_high/{key}"] == encodings[key].max.max().item()
    assert figures["gradient/norm"] == pytest.approx(torch.cat([g.flatten() for g in grads.values()]).norm().item(), rel=1e-6)
    assert figures["gradient/nonfinite"] == 0
    hidden = torch.relu(reference.fake_quantize(x[2:], *_grid(encodings["input"])) @ _quantized(sim, "0").T + sim.model[0].bias.detach())
    assert figures["clipped/0.output"] == pytest.approx(clipped(hidden, encodings["0.output"]), abs=2 / hidden.numel())


def _grid(encoding):
    return encoding.scale, encoding.zero_point, encoding.quant_min, encoding.quant_max


def _quantized(sim, layer):
    weight, encoding = sim.model[int(layer)].weight.detach(), sim.encodings()[f"{layer}.weight"]
    return reference.fake_quantize(weight, *_grid(encoding), axis=encoding.axis)


def test_nan_and_inf_are_counted():
    sim, kept = simulated(), Kept()
    x = X.clone()
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -torch.inf
    with sim.monitor(kept) as monitor:
        sim(x).sum().backward()
        monitor.step()
    assert kept.steps[0]["nonfinite/input"] == 3
    assert kept.steps[0]["gradient/nonfinite"] == sum((~p.grad.isfinite()).sum().item() for p in sim.parameters() if p.grad is not None) > 0


def test_only_every_nth_step_is_looked_at():
    sim, kept = simulated(), Kept()
    with sim.monitor(kept, every=3) as monitor:
        for step in range(7):
            quantizers = [q for key, q in sim.quantizers().items() if not key.endswith(".weight")]
            assert all(bool(q._forward_pre_hooks) == (step % 3 == 0) for q in quantizers)
            sim(X).sum().backward()
            monitor.step()
    assert list(kept.steps) == [0, 3, 6]
    assert monitor.steps == 7
    assert not any(q._forward_pre_hooks for q in sim.quantizers().values())


@pytest.mark.parametrize(
    "config",
    [
        qsim.int8(),
        qsim.fp16(),
        qsim.fp8(),
        qsim.w8a8_dynamic(),
        qsim.int8().override("*", activation={"method": "ema"}),
        qsim.int8().override("*", activation={"learnable": True}, weight={"learnable": True}),
    ],
    ids=["int8", "fp16", "fp8", "dynamic", "ema", "learnable"],
)
def test_training_goes_on_as_without_it(config):
    outcomes = []
    for watched in (False, True):
        sim, kept = simulated(config), Kept()
        optimizer = torch.optim.SGD(sim.parameters(), 0.1)
        monitor = sim.monitor(kept, every=2, histograms=True)
        if watched:
            monitor.__enter__()
        for _ in range(4):
            optimizer.zero_grad()
            sim(X).square().mean().backward()
            if watched:
                monitor.step()
            optimizer.step()
        monitor.__exit__(None, None, None)
        outcomes.append({name: value.clone() for name, value in sim.state_dict().items() if isinstance(value, torch.Tensor)})
        assert all(0 <= value <= 1 for figures in kept.steps.values() for name, value in figures.items() if name.startswith("clipped/"))
    assert outcomes[0].keys() == outcomes[1].keys()
    assert all(torch.equal(a, outcomes[1][name]) or (a.isnan() & outcomes[1][name].isnan()).all() for name, a in outcomes[0].items())


def test_histograms_are_of_the_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    sim = simulated()
    with SummaryWriter(tmp_path) as writer, sim.monitor(writer, histograms=True) as monitor:
        for factor in (1.0, 2.0):
            sim(X * factor).sum().backward()
            monitor.step()
    events = EventAccumulator(str(tmp_path), {"histograms": 0})
    events.Reload()
    kept = [event.histogram_value for event in events.Histograms("values/input")]
    assert [value.max for value in kept] == pytest.approx([X.max().item(), 2 * X.max().item()])
    assert [value.num for value in kept] == [X.numel()] * 2
    assert [event.step for event in events.Scalars("clipped/0.output")] == [0, 1]


def test_what_is_wrong_is_told():
    sim = simulated()
    with pytest.raises(ValueError, match=r"QuantSim\.monitor: got every=0; expected at least 1"):
        sim.monitor(Kept(), every=0)
    with pytest.raises(TypeError, match=r"QuantSim\.monitor: got a str; expected a SummaryWriter"):
        sim.monitor("runs")
    with pytest.raises(RuntimeError, match=r"QuantSim\.monitor: step\(\) was called outside of the context"):
        sim.monitor(Kept()).step()
