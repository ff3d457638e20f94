"""Training against the float model's results: it gains, keeps the best, and undoes what does not gain."""

import copy

import pytest
import torch
from html_reader import Reader
from restorable import batches_of, calibrated, digits_net, error

import qsim


def test_distillation_gains_keeps_the_best_and_undoes_what_does_not_gain():
    model, unseen = digits_net(), batches_of(4, seed=9)
    sim = calibrated(model, qsim.int4())
    before = error(sim, model, unseen)
    distilled = sim.distill(batches_of(16, 32), 200, progress=False)
    assert distilled.kept > 0
    assert len(distilled.losses) == 200
    assert error(sim, model, unseen) < before / 1.5
    assert all(p.grad is None for p in sim.parameters())
    assert not any(q.scale.requires_grad for q in sim.quantizers().values())
    worse = calibrated(model, qsim.int4())
    state = copy.deepcopy(worse.state_dict())
    found = worse.distill(batches_of(8), 20, loss=lambda got, wanted: -(got - wanted).square().sum(), progress=False)
    assert found.kept == 0
    assert "gained nothing" in str(found)
    assert all(torch.equal(t, state[name]) for name, t in worse.state_dict().items())


def test_steps_follow_what_was_solved_and_lose_nothing_of_it():
    model = digits_net()
    solved, further = calibrated(model, qsim.int4()), calibrated(model, qsim.int4())
    first = solved.restore(batches_of(16, 32), progress=False)
    report = further.restore(batches_of(16, 32), steps=40, progress=False)
    assert report.weights == first.weights
    assert report.distilled.levels[0] == pytest.approx(first.after, abs=1e-3)
    assert report.after >= first.after
    held = [x for i, x in enumerate(batches_of(16, 32)) if i % 4 == 3]
    assert error(further, model, held) <= error(solved, model, held) * 1.0001


def test_a_distillation_on_results_without_a_gradient_says_so():
    sim = calibrated()
    with pytest.raises(ValueError, match="does not depend on the simulation"):
        sim.distill(batches_of(4), 5, lambda model, x: model(x).detach(), progress=False)


def test_learned_scales_and_a_model_that_trains_on():
    config = qsim.Config(
        weight=qsim.TensorSpec(bits=3, symmetric=True, axis=0, learnable=True), activation=qsim.TensorSpec(bits=8, learnable=True)
    )
    sim = calibrated(config=config)
    report = sim.restore(batches_of(8), steps=8, progress=False)
    assert report.after > report.before
    assert all(q.scale.requires_grad for q in sim.quantizers().values())
    sim.train()
    sim(batches_of(1)[0]).square().sum().backward()
    assert all(q.scale.grad is not None for q in sim.quantizers().values())


def test_it_is_a_report_as_others_are(tmp_path):
    sim = calibrated(digits_net(), qsim.int4())
    distilled = sim.distill(batches_of(4, 16), 12, progress=False)
    distilled.save(tmp_path / "page.html")
    rows = Reader((tmp_path / "page.html").read_text()).rows
    assert [int(row[0]) for row in rows if row and row[0].isdigit()] == list(distilled.levels)
    assert "Loss of every step" in distilled._repr_html_()
    distilled.save(tmp_path / "numbers.csv")
    assert f"sqnr,after,{distilled.levels[distilled.kept]}" in (tmp_path / "numbers.csv").read_text()
    assert distilled.figures().scalars["loss/last"] == distilled.losses[-1]


class Remembering(torch.nn.Module):
    """A mean of what it has seen, without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        y = torch.relu(self.first(x))
        self.seen.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return self.second(y - self.seen)


@pytest.mark.parametrize("distill", ["distill", "restore"])
def test_what_the_model_remembers_stays_and_is_in_no_graph(distill):
    """Scales are learned, so what the simulation writes to buffers depends on parameters: each step begins with what was there."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    sim = calibrated(Remembering().eval(), qsim.int4(), x.split(16))
    sim.model.seen.fill_(0.25)
    if distill == "distill":
        assert sim.distill(x.split(16), 6, progress=False).steps == 6
    else:
        sim.restore(x.split(16), steps=6, progress=False)
    assert torch.equal(sim.model.seen, torch.full((8,), 0.25))
    assert not sim.model.seen.requires_grad
    copy.deepcopy(sim)
