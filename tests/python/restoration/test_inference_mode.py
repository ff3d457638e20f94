"""What is called under `torch.inference_mode()` ends as it does outside, and says so where it cannot."""

import pytest
import torch
from restorable import batches_of, calibrated

import qsim

WAYS = {
    "distill": lambda sim, data: sim.distill(data, 40, loss=cosine, progress=False),
    "steps": lambda sim, data: sim.restore(data, steps=40, progress=False),
    "restore": lambda sim, data: sim.restore(data, progress=False),
    "learn_rounding": lambda sim, data: sim.learn_rounding(data, steps=40, progress=False),
    "forward": lambda sim, data: sim.distill([(x, 0) for x in data], 40, lambda model, batch: model(batch[0]), progress=False),
}


def cosine(got, wanted):
    """Keeps both for its gradient."""
    return 1 - torch.nn.functional.cosine_similarity(got, wanted).mean()


@pytest.mark.parametrize("way", WAYS)
def test_it_ends_as_outside(way):
    outside, within, computed = (calibrated(config=qsim.int4()) for _ in range(3))
    WAYS[way](outside, batches_of(8))
    with torch.inference_mode():
        WAYS[way](within, (x.clone() for x in batches_of(8)))
        data = [x.clone() for x in batches_of(8)]
    WAYS[way](computed, data)  # as features of another model are
    for sim in (within, computed):
        assert all(torch.equal(t, outside.state_dict()[name]) for name, t in sim.state_dict().items())
        assert not any(p.is_inference() for p in sim.parameters())
        sim(batches_of(1)[0]).sum().backward()


def test_a_simulation_that_was_made_there_is_refused_by_name():
    with torch.inference_mode():
        sim, data = calibrated(config=qsim.int4()), batches_of(8)
    for way in WAYS.values():
        with pytest.raises(ValueError, match=r"QuantSim\.\w+: the simulation was made or calibrated under torch\.inference_mode\(\)"):
            way(sim, data)
