"""A state dict knows whether what quantizers observed was observed with the parameters that are in it."""

import pytest
import saved
import torch
from models import Perceptron, seeded

import qsim

ROWS = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


def calibrated(data=ROWS):
    sim = qsim.QuantSim(seeded(Perceptron), ROWS, qsim.int8())
    sim.calibrate([data], progress=False)
    return sim


def trained(sim):
    with torch.no_grad():
        for p in sim.parameters():
            p.mul_(0.1)


def through_a_file(sim):
    return saved.through_a_file(sim, qsim.QuantSim(seeded(Perceptron), ROWS, qsim.int8()))


def into_itself(sim):
    sim.load_state_dict(sim.state_dict())
    return sim


@pytest.mark.parametrize("copied", [through_a_file, into_itself, lambda sim: through_a_file(through_a_file(sim))])
@pytest.mark.parametrize("is_trained", [False, True])
def test_it_is_forgotten_where_they_were_trained_since(copied, is_trained):
    sim, expected = calibrated(), calibrated()
    for each in (sim, expected):
        if is_trained:
            trained(each)
    sim = copied(sim)
    for each in (sim, expected):
        each.calibrate([2 * ROWS], progress=False)
    assert sim.encodings() == expected.encodings()
    counts = {key: q.counts for key, q in sim.quantizers().items()}
    assert counts == {key: q.counts for key, q in expected.quantizers().items()}
    assert counts["input"].elements == (1 if is_trained else 2) * ROWS.numel()


def test_it_is_where_it_was_trained_after_it_was_loaded():
    sim = through_a_file(calibrated())
    trained(sim)
    sim.calibrate([ROWS], progress=False)
    assert sim.quantizers()["input"].counts.elements == ROWS.numel()


def test_a_state_that_is_refused_changes_nothing_of_it():
    sim = calibrated()
    trained(sim)
    state = sim.state_dict()
    assert bool(state["quantization.observed_before"])
    with pytest.raises(RuntimeError, match="another model"):
        sim.load_state_dict({**state, "quantization.observed_before": torch.zeros((), dtype=torch.uint8), "unknown": torch.zeros(1)})
    sim.calibrate([ROWS], progress=False)
    assert sim.quantizers()["input"].counts.elements == ROWS.numel()


def test_a_calibration_without_data_changes_nothing_of_it():
    sim = calibrated()
    trained(sim)
    with pytest.raises(qsim.CalibrationError):
        sim.calibrate([], progress=False)
    fresh = through_a_file(sim)
    for each in (sim, fresh):
        each.calibrate([ROWS], progress=False)
        assert each.quantizers()["input"].counts.elements == ROWS.numel()


def test_states_from_before_it_was_kept_are_added_to():
    state = calibrated().state_dict()
    del state["quantization.observed_before"]
    fresh = qsim.QuantSim(seeded(Perceptron), ROWS, qsim.int8())
    fresh.load_state_dict(state)
    fresh.calibrate([ROWS], progress=False)
    assert fresh.quantizers()["input"].counts.elements == 2 * ROWS.numel()


def test_on_the_meta_device():
    with torch.device("meta"):
        sim = qsim.QuantSim(seeded(Perceptron), ROWS.to("meta"), qsim.int8())
    with sim.in_float():
        assert sim(ROWS.to("meta")).is_meta
    assert sim.restored == ""
    sim.load_state_dict(calibrated().state_dict(), assign=True)
    assert torch.equal(sim(ROWS), calibrated()(ROWS))
