"""`QuantSim.restore` and its parts: what they gain, what they leave alone, and that they never lose."""

import copy
import math

import pytest
import torch
from restorable import W3A8, batches_of, calibrated, digits_net, error
from torch import nn

import qsim


def test_gains_on_data_it_never_saw_and_writes_weights_on_their_grids():
    model, unseen = digits_net(), batches_of(4, seed=9)
    sim = calibrated(model)
    before = error(sim, model, unseen)
    report = sim.restore(batches_of(8), progress=False)
    assert error(sim, model, unseen) < before / 8
    assert report.kept
    assert report.after > report.before + 8
    assert [row.key for row in report.weights] == ["0.weight", "2.weight", "4.weight", "7.weight"]
    assert all(row.after >= row.before for row in report.weights)
    assert (report.batches, report.held_back) == (6, 2)
    for key, weight in sim.weights().items():
        assert torch.equal(sim.quantizers()[key](weight), weight)
    assert "restored" not in sim.state_dict()
    assert "results:" in str(report)


def test_what_it_predicts_is_what_the_simulation_gives():
    sim, model = calibrated(), digits_net()
    data = batches_of(4)
    report = sim.restore(data, progress=False)
    held, deviation = data[3], 0.0
    with torch.no_grad():
        deviation = 10 * math.log10(model(held).square().sum() / (sim(held) - model(held)).square().sum())
    assert report.after == pytest.approx(deviation, abs=1e-3)


class Recurrent(nn.Module):
    """Reads its weights once for each step."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


@pytest.mark.parametrize("seed", range(3))
def test_what_it_predicts_of_a_recurrent_network_is_what_the_simulation_gives_and_it_never_loses(seed):
    torch.manual_seed(seed)
    model, data = Recurrent().eval(), [torch.randn(16, 8, 8) for _ in range(4)]
    sim = qsim.QuantSim(model, data[0], W3A8)
    sim.calibrate(data, progress=False)

    def level():
        with torch.no_grad():
            return 10 * math.log10(model(data[3]).square().sum() / (sim(data[3]) - model(data[3])).square().sum())

    before = level()
    report = sim.restore(data, progress=False)
    assert report.before == pytest.approx(before, abs=1e-3)
    assert level() == pytest.approx(report.after if report.kept else report.before, abs=1e-3)
    assert level() >= before - 1e-3


def test_the_same_twice_and_nothing_but_weights_biases_and_scales_changes():
    first, second = calibrated(), calibrated()
    flags = {name: module.training for name, module in first.named_modules()}
    activations = {key: q.encoding for key, q in first.quantizers().items() if not key.endswith(".weight")}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for sim in (first, second):
        sim.restore(batches_of(8), progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert {name: module.training for name, module in first.named_modules()} == flags
    assert all(first.quantizers()[key].encoding == encoding for key, encoding in activations.items())


def test_eight_bits_and_wide_grids_lose_nothing():
    for config in (qsim.int8(), qsim.int16()):
        model = digits_net()
        sim = calibrated(model, config)
        before = error(sim, model, batches_of(4, seed=9))
        sim.restore(batches_of(8), progress=False)
        assert error(sim, model, batches_of(4, seed=9)) <= before * 1.02


def test_parts_do_their_part_only():
    data = batches_of(8)
    ranges = calibrated()
    report = ranges.search_weight_ranges(data, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(ranges.model.parameters(), digits_net().parameters(), strict=True))
    assert report.after > report.before
    before = calibrated()
    solved = calibrated()
    solved.solve_weights(data, progress=False)
    for name, parameter in solved.model.named_parameters():
        assert torch.equal(parameter, before.model.get_parameter(name)) == name.endswith("bias")
    assert all(solved.quantizers()[key].encoding == q.encoding for key, q in before.quantizers().items())
    corrected = calibrated()
    corrected.correct_biases(data, progress=False)
    for name, parameter in corrected.model.named_parameters():
        assert torch.equal(parameter, before.model.get_parameter(name)) == name.endswith("weight")


def test_a_corrected_bias_makes_the_means_those_of_the_float_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    data = [torch.rand(64, 8) for _ in range(8)]
    sim = qsim.QuantSim(model, data[0][:1], W3A8)
    sim.calibrate(data, progress=False)
    with torch.no_grad():
        before = torch.cat([sim(x) - model(x) for x in data]).mean(0)
        sim.correct_biases(data, progress=False)
        after = torch.cat([sim(x) - model(x) for x in data]).mean(0)
    assert after.abs().max() < 0.2 * before.abs().max()


@pytest.mark.parametrize("method", ["gptq", "gpfq", "nearest"])
def test_every_method_gains(method):
    model, unseen = digits_net(), batches_of(4, seed=9)
    sim = calibrated(model)
    before = error(sim, model, unseen)
    sim.solve_weights(batches_of(8), method, progress=False)
    assert error(sim, model, unseen) < before / 1.3


def test_learned_rounding_gains_at_least_what_gptq_does_at_two_bits():
    config = qsim.Config(weight=qsim.TensorSpec(bits=2, symmetric=True, axis=0, method="mse"), activation=qsim.TensorSpec(bits=8))
    model, unseen = digits_net(), batches_of(4, seed=9)
    solved, learned = calibrated(model, config), calibrated(model, config)
    solved.restore(batches_of(16, 32), progress=False)
    report = learned.learn_rounding(batches_of(16, 32), steps=300, progress=False)
    assert error(learned, model, unseen) < 1.25 * error(solved, model, unseen)  # no worse on the moments; on unseen data 0.98 to 1.19
    assert {row.how for row in report.weights} <= {"ranges + learned rounding + bias", "bias", "kept"}
    for key, weight in learned.weights().items():
        assert torch.equal(learned.quantizers()[key](weight), weight)
    with pytest.raises(ValueError, match="steps=0"):
        calibrated().learn_rounding(batches_of(4), steps=0, progress=False)


def test_batches_with_nan_are_left_out_and_named():
    data = batches_of(8)
    data[2] = data[2].clone()
    data[2][3, 0, 1, 1] = math.nan
    sim = calibrated(data=batches_of(8))
    report = sim.restore(data, progress=False)
    assert report.left_out == {2: "'0' read NaN or Inf"}
    assert "batch 2 left out" in str(report)
    assert report.kept
    assert all(bool(p.isfinite().all()) for p in sim.model.parameters())
    with pytest.raises(qsim.CalibrationError, match="every batch"):
        calibrated().restore([x * math.nan for x in data], progress=False)


def test_a_single_batch_is_split_and_a_single_sample_says_what_was_measured():
    sim = calibrated()
    report = sim.restore([torch.cat(batches_of(8))], progress=False)
    assert (report.batches, report.held_back) == (1, 1)
    assert report.after > report.before + 8
    alone = calibrated().restore([batches_of(1, size=1)[0]], progress=False)
    assert alone.held_back == 0
    assert "nothing was held back" in str(alone)


def test_memory_bounds_the_batches_and_says_so():
    report = calibrated().restore(batches_of(8), memory=1, progress=False)
    assert report.batches + report.held_back == 2
    assert "6 of 8 batches were not used" in str(report)


class Odd(nn.Module):
    """An embedding, a module used twice, a weight that no batch reaches, tied weights, a batched matrix."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.twice = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
        self.batched = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, tokens, rare: bool = False):
        x = self.twice(torch.tanh(self.twice(self.words(tokens))))
        x = self.never(x) if rare else x
        return self.head(x @ self.batched)


def test_what_is_left_alone_says_why():
    torch.manual_seed(0)
    data = [torch.randint(0, 11, (3, 5)) for _ in range(6)]
    sim = qsim.QuantSim(Odd().eval(), [(data[0], True), (data[0], False)], W3A8)
    sim.calibrate([(x, i % 2 == 0) for i, x in enumerate(data)], progress=False)
    report = sim.restore([(x, False) for x in data], progress=False)
    assert report.skipped["never.weight"] == "no batch reached it"
    assert "3 dimensions" in report.skipped["batched"]
    assert any(row.key == "twice.weight" for row in report.weights)
    assert not any(row.key.startswith(("words", "head")) for row in report.weights if "kept" not in row.how)


def test_paths_that_differ_by_batch_are_each_followed():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x, way: bool):
            return self.c(torch.relu(self.a(x) if way else self.b(x)))

    torch.manual_seed(0)
    model = Gate().eval()
    data = [(torch.randn(64, 6), i % 2 == 0) for i in range(8)]
    sim = qsim.QuantSim(model, [data[0], data[1]], W3A8)
    sim.calibrate(data, progress=False)
    report = sim.restore(data, progress=False)
    assert {row.key for row in report.weights} == {"a.weight", "b.weight", "c.weight"} - report.skipped.keys()
    assert report.after > report.before


def test_refusals():
    sim = calibrated()
    sim.restore(batches_of(4), progress=False)
    with pytest.raises(ValueError, match=r"solved for already .* make a new one"):
        sim.solve_weights(batches_of(4), progress=False)
    with pytest.raises(qsim.NoEncodingError):
        qsim.QuantSim(digits_net(), batches_of(1)[0], W3A8).restore(batches_of(4), progress=False)
    with pytest.raises(qsim.CalibrationError, match="no batch"):
        calibrated().restore([], progress=False)
    with pytest.raises(ValueError, match="got method='adaround'; expected one of 'gptq'"):
        calibrated().solve_weights(batches_of(4), "adaround", progress=False)
    with pytest.raises(ValueError, match="damping"):
        calibrated().solve_weights(batches_of(4), damping=0.0, progress=False)
    with pytest.raises(ValueError, match="steps=0"):
        calibrated().distill(batches_of(4), 0, progress=False)


def test_what_compares_with_the_model_in_float_says_that_it_is_none_any_more():
    sim, x = calibrated(), batches_of(1)
    with sim.in_float():
        sim(x[0])
    sim.compare(x[0])
    sim.restore(batches_of(4), progress=False)
    for look in (lambda: sim.compare(x[0]), lambda: sim.sensitivity(x, progress=False), sim.in_float):
        with pytest.warns(UserWarning, match="restoring replaced its parameters"):
            look()
    ranges = calibrated()
    ranges.search_weight_ranges(batches_of(4), progress=False)
    assert ranges.compare(x[0]).output.sqnr > 0  # its weights stayed: no warning


def test_a_model_that_raises_changes_nothing():
    sim = calibrated()
    before = copy.deepcopy(sim.state_dict())
    calls = []

    def forward(model, x):
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("out of luck")
        return model(x)

    with pytest.raises(RuntimeError, match="out of luck"):
        sim.restore(batches_of(8), forward, progress=False)
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items())
    assert not sim.restored


def test_groups_of_a_language_models_weights_and_operations_in_float():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)).eval()
    data = [torch.randn(32, 32) @ torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) for _ in range(8)]
    config = qsim.Config(weight=qsim.TensorSpec(bits=3, symmetric=False, axis=1, block_size=16, method="mse"), activation=None)
    sim = qsim.QuantSim(model, data[0], config)
    sim.calibrate(data, progress=False)
    sim.fallback("3", to="fp16")
    report = sim.restore(data, progress=False)
    assert report.skipped == {"3.weight": "it is in float now"}
    assert report.weights[0].after > report.weights[0].before + 1


def test_batch_norm_that_stays_and_a_model_in_training_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    data = batches_of(8)
    for x in data:
        model(x)
    model.eval()
    sim = qsim.QuantSim(model, data[0], qsim.Config(weight=W3A8.weight, activation=W3A8.activation, batch_norm="keep"))
    sim.calibrate(data, progress=False)
    sim.train()
    statistics = sim.model[1].running_mean.clone()
    report = sim.restore(data, progress=False)
    assert report.after > report.before
    assert torch.equal(sim.model[1].running_mean, statistics)
    assert sim.training
    assert sim.model[1].training


def test_integers_are_those_of_the_restored_weights():
    sim = calibrated(config=qsim.int8(target="onnxruntime"))
    x = batches_of(1)[0]
    with sim.integer(), torch.no_grad():
        sim(x)
    sim.restore(batches_of(8), progress=False)
    fresh = copy.deepcopy(sim)
    with torch.no_grad(), sim.integer(), fresh.integer():
        assert torch.equal(sim(x), fresh(x))


def restored_on_a_rank(rank, shares):
    import torch.distributed as dist

    sim = calibrated(data=batches_of(8))
    report = sim.restore(shares[rank], group=dist.group.WORLD, progress=False)
    return {name: t.clone() for name, t in sim.state_dict().items() if "observer" not in name}, report.before, report.after


def test_ranks_solve_with_what_all_of_them_saw(ranks):
    """Sums in another order may round a weight that lies between two steps to the other one."""
    data = batches_of(8)
    (first, *levels), (second, *others) = ranks.run(restored_on_a_rank, [data[:4], data[4:]])
    assert levels == others
    alone = calibrated(data=data)
    report = alone.restore(data, progress=False)  # holds back the same batches
    assert levels[0] == pytest.approx(report.before, rel=1e-6)
    assert levels[1] == pytest.approx(report.after, rel=0.02)
    assert levels[1] > report.before + 10
    assert all(torch.equal(t, second[name]) for name, t in first.items())
    same = [torch.isclose(t.double(), alone.state_dict()[name].double(), rtol=1e-4, atol=1e-5).flatten() for name, t in first.items()]
    assert torch.cat(same).double().mean() >= 0.95


def disagreeing_on_a_rank(rank, shares):
    with pytest.raises(qsim.CalibrationError, match="ranks disagree about"):
        restored_on_a_rank(rank, shares)
    return True


def test_ranks_that_take_different_ways_are_told_so(ranks):
    data = batches_of(4)
    assert ranks.run(disagreeing_on_a_rank, [data, [x * math.nan for x in data]]) == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_types(dtype):
    data = [x.to(dtype) for x in batches_of(8)]
    sim = calibrated(digits_net().to(dtype), data=data)
    report = sim.restore(data, progress=False)
    assert report.after > report.before + 3
    assert all(p.dtype is dtype for p in sim.model.parameters())
