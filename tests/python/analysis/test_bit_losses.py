"""Distances and their estimates: beside formulas written out, exact covariances, and what is measured."""

import pytest
import torch
from models import ConvNet, Perceptron, seeded

import qsim
from qsim.analysis.bit_choices import choices_of, config_with
from qsim.analysis.bit_losses import Distance, estimated
from qsim.analysis.bit_probe import BitProbe, grids_of, measured

ROWS = [torch.linspace(-2, 2, 32 * 6).reshape(32, 6).mul(17 + i).sin() for i in range(3)]
IMAGES = [torch.randn(16, 1, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def calibrated(model_class, batches, config=None):
    sim = qsim.QuantSim(seeded(model_class), batches[0], config or qsim.int4())
    sim.calibrate(batches, progress=False)
    return sim


def test_distances_by_their_formulas():
    x, y = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    values, classes = Distance(None), Distance(1)
    for part in (slice(0, 2), slice(2, 5)):
        values.add([x[part]], [y[part]])
        classes.add([x[part]], [y[part]])
    assert values.value == pytest.approx((x - y).square().sum().item() / x.square().sum().item())
    divergence = torch.nn.functional.kl_div(y.log_softmax(1), x.log_softmax(1), reduction="sum", log_target=True) / 20
    assert classes.value == pytest.approx(divergence.item(), rel=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_random_vectors_have_the_hessian_as_covariance(axis):
    logits = torch.tensor([0.3, -1.0, 0.9])
    many = logits.expand(60_000, 3) if axis else logits.expand(60_000, 3).T
    drawn = Distance(axis).cotangent(many, torch.Generator().manual_seed(0)).movedim(axis, -1)
    p = logits.softmax(0)
    expected = torch.diag(p) - torch.outer(p, p)
    assert (drawn.T @ drawn / len(drawn) - expected).abs().max() < 6e-3
    signs = Distance(None).cotangent(torch.zeros(60_000, 3), torch.Generator().manual_seed(0))
    assert (signs.T @ signs / len(signs) - torch.eye(3)).abs().max() < 2e-2


@pytest.mark.parametrize("classes", [None, 1])
@pytest.mark.parametrize(("model", "data"), [(Perceptron, ROWS), (ConvNet, IMAGES)])
def test_estimates_are_near_what_is_measured_where_errors_are_small(model, data, classes):
    sim = calibrated(model, data)
    choices, grids = choices_of(sim, (8,)), grids_of(sim, (8,))
    probe = BitProbe(sim, grids, data, None, classes, show=False)
    exact = probe.measure([dict.fromkeys(choice.keys, 8) for choice in choices])
    found = [estimated(sim, choices, grids, data, classes, show=False)[i, 8] for i in range(len(choices))]
    assert sum(found) == pytest.approx(sum(exact), rel=0.5)  # one random vector for each result
    ratios = torch.tensor(found).log() - torch.tensor(exact).log()
    assert ratios.abs().median() < 0.7
    both = torch.stack([torch.tensor(found).log(), torch.tensor(exact).log()])
    assert torch.corrcoef(both)[0, 1] > 0.8


def test_an_operation_that_is_last_and_linear_is_estimated_exactly():
    """The error of what the model returns is that of its last quantizer, whatever the random signs."""
    sim = calibrated(Perceptron, ROWS)
    choices, grids = choices_of(sim, (2, 4)), grids_of(sim, (2, 4))
    last = next(i for i, choice in enumerate(choices) if choice.name == "fc2.output")
    found = estimated(sim, choices, grids, [batch[:1] for batch in ROWS], None, show=False)
    with torch.no_grad(), sim.in_float():
        results = [sim(batch[:1]) for batch in ROWS]
    for bits in (2, 4):
        errors = [grids[bits]["fc2.output"].quantize(y) - y for y in results]
        signs = torch.Generator().manual_seed(0)
        products = [(e * Distance(None).cotangent(e, signs)).sum().double().square() for e in errors]
        assert found[last, bits] == pytest.approx((sum(products) / sum(y.double().square().sum() for y in results)).item(), rel=1e-5)


@pytest.mark.parametrize("config", [qsim.int4(), qsim.int8(target="tensorrt"), qsim.w4a8(target="onnxruntime")])
def test_probes_measure_what_a_simulation_with_these_bits_computes(config):
    sim = calibrated(ConvNet, IMAGES, config)
    choices = choices_of(sim, (3, 6))
    bits = [(3, 6)[i % 2] for i in range(len(choices))]
    assignment = {key: chosen for choice, chosen in zip(choices, bits, strict=True) for key in choice.keys}
    probe = BitProbe(sim, grids_of(sim, (3, 6)), IMAGES, None, None, show=False)
    made = qsim.QuantSim(seeded(ConvNet), IMAGES[0], config_with(sim, choices, bits))
    made.calibrate(IMAGES, progress=False)
    assert {key: quantizer.spec.bits for key, quantizer in made.quantizers().items()} == assignment
    weights = {key: chosen for key, chosen in assignment.items() if key in sim.weights()}
    others = [key for key in assignment if key not in weights]
    both, alone = measured(made, IMAGES, None, None), probe.measure([{}, weights, assignment])
    assert (alone[0], alone[2]) == (0.0, pytest.approx(both, rel=1e-9))
    made.disable(*others)
    assert alone[1] == pytest.approx(measured(made, IMAGES, None, None), rel=1e-9)


def test_nothing_of_the_simulation_changes():
    sim = calibrated(ConvNet, IMAGES)
    sim.train()
    parameter = next(iter(sim.weights().values()))
    parameter.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in sim.state_dict().items()}
    choices, grids = choices_of(sim, (4, 8)), grids_of(sim, (4, 8))
    estimated(sim, choices, grids, IMAGES, None, show=False)
    BitProbe(sim, grids, IMAGES, None, None, show=False).measure([{}, dict.fromkeys(sim.quantizers(), 8)])
    assert sim.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in sim.state_dict().items())
    assert sim.training
    assert sim.savings
    assert not parameter.requires_grad
    assert all(weight.grad is None for weight in sim.parameters())
    assert all(quantizer.enabled and not quantizer._forward_hooks for quantizer in sim.quantizers().values())


def test_what_has_no_gradient_is_an_error():
    class Classes(Perceptron):
        def forward(self, x):
            return super().forward(x).argmax(1)

    sim = calibrated(Classes, ROWS)
    with pytest.raises(ValueError, match="return logits, not classes"):
        sim.search_bits(ROWS, budget=qsim.Budget(tensors=0.5), progress=False)
