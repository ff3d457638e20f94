"""What an error or Ctrl-C leaves of a restoration: nothing; and what of one that ended is told to whoever compares with the float model."""

import copy
import warnings

import pytest
import torch
from restorable import batches_of, calibrated, digits_net

import qsim

TRAINING = {
    "distill": lambda sim, forward, loss: sim.distill(batches_of(8), 40, forward, loss=loss, progress=False),
    "restore": lambda sim, forward, loss: sim.restore(batches_of(8), forward, steps=40, progress=False),
}


def interrupted_after(count, raised):
    """A forward that is called so often in training before it raises."""
    calls = []

    def forward(model, x):
        calls.append(torch.is_grad_enabled())
        if sum(calls) > count:
            raise raised
        return model(x)

    return forward


def mean(got, wanted):
    return (got - wanted).square().mean()


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), RuntimeError("out of luck")], ids=["Ctrl-C", "an error"])
@pytest.mark.parametrize("train", TRAINING.values(), ids=TRAINING)
def test_an_interrupted_training_leaves_nothing(train, raised):
    sim, x = calibrated(config=qsim.int4()), batches_of(1)[0]
    with torch.no_grad():
        before, was = copy.deepcopy(sim.state_dict()), sim(x)
    with pytest.raises(type(raised)):
        train(sim, interrupted_after(30, raised), mean)
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items())
    with torch.no_grad():
        assert torch.equal(sim(x), was)
    assert not sim.restored
    assert all(p.requires_grad and p.grad is None for p in sim.model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.compare(x)
    sim.restore(batches_of(4), progress=False)  # not refused


def test_a_loss_that_raises_leaves_nothing_either():
    sim, left = calibrated(config=qsim.int4()), iter(range(30))
    before = copy.deepcopy(sim.state_dict())
    with pytest.raises(StopIteration):
        sim.distill(batches_of(8), 40, loss=lambda got, wanted: mean(got, wanted) + 0 * next(left), progress=False)
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items())


def test_what_ends_while_it_is_written_leaves_nothing(monkeypatch):
    """The biases are fitted last, when the weights are replaced."""
    from qsim.restoration import restore

    sim, calls = calibrated(), []
    before = copy.deepcopy(sim.state_dict())

    def fit(*args):
        calls.append(args)
        if len(calls) > 1:  # the first is measured on and undone
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(restore, "fit_biases", fit)
    with pytest.raises(KeyboardInterrupt):
        sim.restore(batches_of(8), progress=False)
    assert len(calls) == 2
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items())
    assert not sim.restored


def test_a_folder_goes_on_after_an_interrupted_training(tmp_path):
    sim, expected = calibrated(config=qsim.int4()), calibrated(config=qsim.int4())
    with pytest.raises(KeyboardInterrupt):
        sim.restore(batches_of(8), interrupted_after(20, KeyboardInterrupt()), steps=40, path=tmp_path, progress=False)
    report = sim.restore(batches_of(8), steps=40, path=tmp_path, progress=False)
    assert any("path=" in note for note in report.notes)
    expected.restore(batches_of(8), steps=40, progress=False)
    assert all(torch.equal(t, expected.state_dict()[name]) for name, t in sim.state_dict().items())


def test_what_was_trained_alone_is_told():
    """Nothing is solved for: no weight is on a grid."""
    model, x = digits_net(), batches_of(1)[0]
    sim = calibrated(model, qsim.int4().override("*", weight=None))
    assert sim.restore(batches_of(16, 32), steps=200, progress=False).distilled.kept
    assert sim.restored == "distillation"
    with pytest.warns(UserWarning, match=r"restoring replaced its parameters \(distillation\)"):
        sim.compare(x)
    with pytest.raises(ValueError, match=r"solved for already \(distillation\)"):
        sim.restore(batches_of(4), progress=False)
    both = calibrated(model, qsim.int4())
    assert both.restore(batches_of(16, 32), steps=200, progress=False).distilled.kept
    assert both.restored == "4 weights, distillation"


@pytest.mark.parametrize("name", TRAINING)
def test_frozen_parameters_gradients_and_flags_stay(name):
    sim = calibrated(digits_net(), qsim.int4())
    sim.model[0].requires_grad_(False)
    sim.model[2].bias.requires_grad_(False)
    sim(batches_of(1)[0]).sum().backward()
    kept = {name: (p.requires_grad, p.grad, None if p.grad is None else p.grad.clone()) for name, p in sim.named_parameters()}
    before = {name: p.detach().clone() for name, p in sim.named_parameters()}
    frozen = [name for name, p in sim.named_parameters() if not p.requires_grad]
    TRAINING[name](sim, None, mean)
    assert frozen == ["model.0.weight", "model.0.bias", "model.2.bias"]
    solved = name == "restore"  # which takes no gradients
    for key, p in sim.named_parameters():
        required, gradient, values = kept[key]
        assert p.requires_grad == required
        assert p.grad is gradient
        assert values is None or torch.equal(p.grad, values)
        assert solved or torch.equal(p, before[key]) == (key in frozen), key


def test_learned_scales_that_are_frozen_stay():
    config = qsim.Config(weight=qsim.TensorSpec(bits=3, symmetric=True, axis=0, learnable=True), activation=qsim.TensorSpec(bits=4))
    sim = calibrated(config=config)
    scale = sim.quantizers()["0.weight"].scale
    scale.requires_grad_(False)
    before = scale.detach().clone()
    assert sim.distill(batches_of(8), 40, progress=False).kept
    assert torch.equal(scale, before)
    assert not scale.requires_grad


def test_scales_alone_are_learned_where_all_parameters_are_frozen():
    sim, x = calibrated(config=qsim.int4()), batches_of(1)[0]
    sim.model.requires_grad_(False)
    before = copy.deepcopy(sim.model.state_dict())
    assert sim.distill(batches_of(8), 40, progress=False).kept
    assert all(torch.equal(t, before[name]) for name, t in sim.model.state_dict().items())
    assert not sim.restored  # what runs in float is the float model
    assert sim.compare(x).output.sqnr > 0
    none = calibrated(config="fp8")
    none.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"nothing can be learned: no parameter requires a gradient.*requires_grad_\(True\)"):
        none.distill(batches_of(8), 40, progress=False)
    assert any("nothing was distilled" in note for note in none.restore(batches_of(4), steps=4, progress=False).notes)


def test_frozen_weights_are_solved_for():
    model, data = digits_net(), batches_of(8)
    frozen, others = calibrated(model), calibrated(model)
    frozen.model.requires_grad_(False)
    for sim in (frozen, others):
        sim.restore(data, progress=False)
    assert not torch.equal(frozen.model[0].weight, model[0].weight)
    assert all(torch.equal(t, expected) for t, expected in zip(frozen.model.parameters(), others.model.parameters(), strict=True))


def test_correcting_biases_of_layers_without_says_so():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)).eval()
    sim = calibrated(model, data=[torch.randn(8, 4)])
    assert sim.correct_biases([torch.randn(8, 4)], progress=False).skipped == {"0.weight": "it has no bias"}
