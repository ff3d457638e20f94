"""Options that are nonsense: an error that names them, before anything runs."""

import pytest
import torch
from restorable import batches_of, calibrated

import qsim

NAN, INF = float("nan"), float("inf")
DATA = batches_of(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"steps": steps}, f"got steps={steps!r}; expected") for steps in (-1, 1.5, "a", True, None, NAN)),
        *(({"memory": memory}, f"got memory={memory!r}; expected") for memory in (0, -1, 1.5, "a", True)),
        *(({"max_batches": n}, f"got max_batches={n!r}; expected") for n in (0, 1.5, "a", True)),
        ({"forward": 3}, r"got forward=3; expected a function, forward\(model, batch\)"),
        ({"group": 3}, "got group=3; expected a torch.distributed.ProcessGroup"),
    ],
)
def test_restore(options, said):
    sim = calibrated()
    before = {name: t.clone() for name, t in sim.state_dict().items()}
    with pytest.raises((TypeError, ValueError), match=f"^QuantSim.restore: {said}"):
        sim.restore(DATA, progress=False, **options)
    assert all(torch.equal(t, before[name]) for name, t in sim.state_dict().items())


@pytest.mark.parametrize("steps", [-1, 0, 1.5, "a", True])
def test_steps_of_learned_rounding_and_distillation(steps):
    sim = calibrated()
    for method in (sim.learn_rounding, sim.distill):
        with pytest.raises((TypeError, ValueError), match=f"^QuantSim.{method.__name__}: got steps={steps!r}; expected"):
            method(DATA, steps=steps, progress=False)


@pytest.mark.parametrize("damping", [-1, 0, NAN, INF, "a", True])
def test_damping(damping):
    with pytest.raises((TypeError, ValueError), match=f"^QuantSim.solve_weights: got damping={damping!r}; expected"):
        calibrated().solve_weights(DATA, damping=damping, progress=False)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (3, "got loss=3; expected a function"),
        (lambda got, wanted: 1.0, "the loss returned a float; expected a tensor of one number"),
        (lambda got, wanted: (got - wanted).square(), r"the loss returned a tensor of shape \(.*\); expected a tensor of one number"),
    ],
)
def test_losses(loss, said):
    with pytest.raises(TypeError, match=f"^QuantSim.distill: {said}"):
        calibrated().distill(DATA, 2, loss=loss, progress=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"probes": probes}, f"got probes={probes!r}; expected") for probes in (-1, 1.5, "a", None)),
        *(({"classes": classes}, f"got classes={classes!r}; ") for classes in (5, 1.5, "a", True)),
        *(({"candidates": c}, "got candidates=") for c in ([], 8, [8], [8, 8], [1, 8], "float", None)),
    ],
)
def test_search_bits(options, said):
    sim = calibrated()
    with pytest.raises((TypeError, ValueError), match=f"^QuantSim.search_bits: {said}"):
        sim.search_bits(DATA, budget=qsim.Budget(size=0.5), progress=False, **options)


@pytest.mark.parametrize(
    "options", [{"goal": NAN}, {"goal": -1}, {"goal": "a"}, {"goal": 2}, {"goal": 0}, {"seconds": -1}, {"seconds": "a"}, {"train": 3}]
)
def test_quantize_to_a_goal(options):
    ((name, value),) = options.items()
    with pytest.raises((TypeError, ValueError), match=f"^qsim.quantize: got {name}={value!r}; expected"):
        qsim.quantize(torch.nn.Linear(4, 2), torch.randn(1, 4), [torch.randn(2, 4)], lambda *_: 1.0, progress=False, **options)


@pytest.mark.parametrize("methods", [[], 3, [3], "awq", ["foo"]])
def test_equalize(methods):
    with pytest.raises((TypeError, ValueError), match=r"^qsim.equalize: got "):
        qsim.equalize(torch.nn.Linear(4, 2), torch.randn(1, 4), [torch.randn(2, 4)], methods=methods)
