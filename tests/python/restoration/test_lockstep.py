"""Runs that stop before each weight: the model run alone is the oracle."""

import threading

import pytest
import torch
from torch import nn

import qsim
from qsim.graph.execute.tapped import SharedWeights
from qsim.restoration.lockstep import lockstep


class Net(nn.Module):
    """A functional weight, a module used twice, an attention, noise in eval mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        x = self.twice(torch.relu(self.twice(torch.relu(self.first(x)))))
        x = (x + 0.01 * torch.randn_like(x)).flatten(2).transpose(1, 2)
        return self.attention(x, x, x)[0].mean(1) @ self.matrix


def calibrated(config=None):
    torch.manual_seed(0)
    sim = qsim.QuantSim(Net().eval(), torch.randn(1, 1, 4, 4), config or qsim.w4a8())
    batches = [torch.randn(2, 1, 4, 4) for _ in range(3)]
    sim.calibrate(batches, progress=False)
    return sim, batches


def keys_of(run):
    found = []
    run.advance()
    while run.reached is not None:
        found.append(run.reached.key)
        run.advance()
    return found


def test_results_are_those_of_the_model_and_of_the_simulation_bit_for_bit():
    sim, batches = calibrated()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with lockstep(sim, [lambda x=x: sim.model(x) for x in batches]) as runs, torch.no_grad():
        left = [run for pair in runs for run in pair]
        while left:  # in turns, one weight each
            for run in left:
                run.advance()
            left = [run for run in left if not run.is_over]
    assert torch.equal(torch.get_rng_state(), state)
    for x, (in_float, simulated) in zip(batches, runs, strict=True):
        torch.set_rng_state(state)
        with torch.no_grad():
            assert torch.equal(simulated.result, sim(x))
        torch.set_rng_state(state)
        with sim.in_float(), torch.no_grad():
            torch.testing.assert_close(in_float.result, sim(x))  # attention has a kernel of its own outside the simulation


def test_float_and_simulated_runs_reach_the_same_weights():
    sim, batches = calibrated()
    with lockstep(sim, [lambda: sim.model(batches[0])]) as ((in_float, simulated),):
        keys = keys_of(in_float)
        assert keys == keys_of(simulated)
    assert keys.count("twice.weight") == 2
    assert set(keys) == set(sim.weights())


def test_a_float_run_reads_what_the_float_model_reads():
    sim, batches = calibrated()
    seen = []
    hook = sim.model.twice.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with lockstep(sim, [lambda: sim.model(batches[0])]) as ((run, _),):
        run.advance()
        assert run.reached.key == "first.weight"
        assert torch.equal(run.reached.args[0], batches[0])
        assert run.reached.args[1] is sim.model.first.weight
        run.advance()
        assert torch.equal(run.reached.args[0], seen[0])
    hook.remove()


def test_an_answer_replaces_the_arguments():
    sim, batches = calibrated()
    with lockstep(sim, [lambda: sim.model(batches[0])]) as ((_, run),):
        run.advance()
        while run.reached is not None:
            call = run.reached
            answer = (*call.args[:1], torch.zeros_like(call.args[1]), *call.args[2:]) if call.key == "matrix" else call.args
            run.advance((answer, call.kwargs))
        assert not run.result.any()


def test_errors_come_out_and_no_thread_stays():
    sim, batches = calibrated()

    def fails():
        sim.model(batches[0])
        raise RuntimeError("as the user's code may")

    before = threading.active_count()
    with lockstep(sim, [fails, lambda: sim.model(batches[1])]) as runs:
        for pair in runs:
            for run in pair:
                run.advance()
        keys_of(runs[0][1])
        assert isinstance(runs[0][1].error, RuntimeError)
        assert runs[1][0].reached is not None
    assert threading.active_count() == before
    assert sim.savings
    with torch.no_grad():
        assert sim(batches[0]).shape == (2, 3)


def test_a_body_that_raises_leaves_the_simulation_as_it_was():
    sim, batches = calibrated()
    mode = sim.switch.mode

    def interrupted():
        with lockstep(sim, [lambda: sim.model(batches[0])]) as ((run, _),):
            run.advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sim.switch.mode is mode
    assert all(quantizer.enabled for quantizer in sim.quantizers().values())


def test_a_weight_is_quantized_once_for_all_runs_that_hold_it():
    sim, batches = calibrated()
    quantizer, times = sim.quantizers()["first.weight"], []
    plain = quantizer.forward
    quantizer.forward = lambda x, **options: times.append(x) or plain(x, **options)
    sim.eval()
    with torch.no_grad(), lockstep(sim, [lambda batch=batch: sim(batch) for batch in batches]) as runs:
        for pair in runs:
            for run in pair:
                run.advance()
        held = {id(run.reached.args[run.reached.slot]) for _, run in runs}  # one object, which they all read
    del quantizer.forward
    assert (len(times), len(held)) == (1, 1)


def test_shared_weights_are_quantized_again_when_they_change_or_nobody_holds_them():
    shared, weight, times = SharedWeights(), torch.ones(3), []

    def quantize(x):
        times.append(1)
        return x * 2

    first = shared.quantized("w", quantize, weight)
    assert shared.quantized("w", quantize, weight) is first
    weight += 1
    assert shared.quantized("w", quantize, weight).tolist() == [4, 4, 4]
    assert len(times) == 2
    del first
    held = shared.quantized("w", quantize, weight)  # the last one is gone too
    assert (len(times), held.tolist()) == (3, [4, 4, 4])
