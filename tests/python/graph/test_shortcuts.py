"""Savings at work: what is kept and when it is forgotten, what is overwritten and who may look at it."""

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import Forward, Perceptron, seeded
from torch import Tensor, nn

import qsim
from qsim.graph.execute import ownership, shortcuts
from qsim.quantizers.quantizer import Quantizer


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are written in place too."""
    monkeypatch.setattr(ownership, "SMALLEST", 0)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each quantizer computed."""
    counts: Counter[str] = Counter()
    quantize = Quantizer.quantize

    def counting(self: Quantizer, x: Tensor, **options: bool) -> Tensor:
        counts[self.name] += 1
        return quantize(self, x, **options)

    counting.__name__ = "quantize"  # by which bound ones are pickled
    monkeypatch.setattr(Quantizer, "quantize", counting)
    monkeypatch.setattr(shortcuts, "_settled", lambda quantizer, few=0: None)  # what computes without Python is not seen
    return counts


X = torch.linspace(-2, 2, 8 * 6).reshape(8, 6)


def perceptron() -> qsim.QuantSim:
    sim = qsim.QuantSim(seeded(Perceptron), X)
    sim.calibrate([X], progress=False)
    return sim


def unsaved(sim: qsim.QuantSim, x: Tensor = X) -> Tensor:
    sim.savings = False
    y = sim(x)
    sim.savings = True
    return y


@torch.no_grad()
def test_weights_are_quantized_once(quantized):
    sim = perceptron()
    quantized.clear()
    for _ in range(3):
        sim(X)
    assert quantized["fc1.weight"] == quantized["fc2.weight"] == 1
    sim.savings = False
    sim(X)
    assert quantized["fc1.weight"] == 2


def test_not_where_gradients_are_needed(quantized):
    sim = perceptron()
    quantized.clear()
    for _ in range(2):
        sim(X).sum().backward()
    assert quantized["fc1.weight"] == 2
    sim.requires_grad_(False)
    for _ in range(2):
        sim(X)
    assert quantized["fc1.weight"] == 3
    with torch.inference_mode():
        sim(X)
    assert quantized["fc1.weight"] == 3


def other_encoding(sim: qsim.QuantSim) -> None:
    quantizer = sim.quantizers()["fc1.weight"]
    encoding = quantizer.encoding
    quantizer.set_encoding(type(encoding)(**{**vars(encoding), "scale": encoding.scale * 1.5}))


def loaded(sim: qsim.QuantSim) -> None:
    state = {name: value * 1.25 if name.endswith("fc1.weight") else value for name, value in sim.state_dict().items()}
    sim.load_state_dict(state)


def swapped_twice(sim: qsim.QuantSim) -> None:
    """The first memory may come back at its address."""
    weight = sim.model.fc1.weight
    weight.data = weight.data * 2
    weight.data = weight.data * 2


def trained(sim: qsim.QuantSim) -> None:
    optimizer = torch.optim.SGD(sim.parameters(), 0.1)
    with torch.enable_grad():
        sim(X).sum().backward()
    optimizer.step()


def written_behind_its_back(sim: qsim.QuantSim) -> None:
    sim.model.fc1.weight.data.mul_(2)
    sim.eval()


CHANGES: dict[str, Callable[[qsim.QuantSim], object]] = {
    "in place": lambda sim: sim.model.fc1.weight.mul_(2),
    "a view": lambda sim: sim.model.fc1.weight[0].zero_(),
    "data": lambda sim: setattr(sim.model.fc1.weight, "data", sim.model.fc1.weight.data * 2),
    "data, twice": swapped_twice,
    "another parameter": lambda sim: setattr(sim.model.fc1, "weight", nn.Parameter(sim.model.fc1.weight * 2)),
    "data in place, and eval": written_behind_its_back,
    "step": trained,
    "bias": lambda sim: sim.model.fc1.bias.add_(1),
    "encoding": other_encoding,
    "input encoding": lambda sim: sim.quantizers()["input"].scale.mul_(1.5),
    "state": loaded,
    "dtype": lambda sim: sim.double(),
    "switch": lambda sim: sim.disable("fc1.weight"),
    "method": lambda sim: sim.set_method("percentile", percentile=90),
    "calibration": lambda sim: sim.calibrate([X * 3], progress=False),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change):
    sim = perceptron()
    before = sim(X)
    CHANGES[change](sim)
    x = X.to(sim.model.fc1.weight.dtype)
    after = sim(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, unsaved(sim, x))


@torch.no_grad()
def test_nothing_kept_is_copied_or_saved(quantized):
    sim = perceptron()
    size, keys = len(pickle.dumps(sim)), list(sim.state_dict())
    expected = sim(X)
    assert (len(pickle.dumps(sim)), list(sim.state_dict())) == (size, keys)
    for other in (copy.deepcopy(sim), pickle.loads(pickle.dumps(sim))):
        quantized.clear()
        assert torch.equal(other(X), expected)
        assert quantized["fc1.weight"] == 1
        other.model.fc1.weight.mul_(2)
        assert not torch.equal(other(X), expected)
    assert torch.equal(sim(X), expected)


@torch.no_grad()
def test_a_tied_parameter_is_kept_once(quantized):
    model = Forward(lambda m, x: F.linear(F.linear(x, m.fc.weight), m.fc.weight), fc=nn.Linear(6, 6))
    sim = qsim.QuantSim(model.eval(), X)
    sim.calibrate([X], progress=False)
    quantized.clear()
    for _ in range(2):
        sim(X)
    assert quantized["fc.weight"] == 1


def test_threads_share_a_simulation():
    sim = perceptron()
    inputs = [torch.randn(8, 6) for _ in range(4)]
    with torch.no_grad():
        expected = [unsaved(sim, x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(sim(inputs[i]), expected[i]):
                    wrong.append(i)
                if i == 0:
                    sim.quantizers()["fc1.weight"].scale.mul_(1)  # a new version of the same values

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def convolutions() -> tuple[qsim.QuantSim, Tensor]:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 1, 16, 16)
    sim = qsim.QuantSim(model.eval(), x)
    sim.calibrate([x], progress=False)
    return sim, x


@pytest.mark.parametrize("training", [False, True])
def test_rectifiers_are_left_to_the_quantizer_while_its_encoding_allows(training, monkeypatch):
    calls: Counter[str] = Counter()
    for name in ("relu", "relu_"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda x, plain=plain: calls.update(["relu"]) or plain(x))
    sim, x = convolutions()
    sim.train(training)
    calls.clear()
    with torch.set_grad_enabled(training):
        sim(x)
        assert calls["relu"] == 0
        quantizer = sim.quantizers()["0.output"]
        quantizer.zero_point.fill_(3)  # negative values are on the grid now
        found = sim(x)
        assert calls["relu"] == 1
        assert torch.equal(found, unsaved(sim, x))
        quantizer.zero_point.fill_(0)
        quantizer.observing = True
        quantizer.reset()
        calls.clear()
        sim(x)
    assert calls["relu"] == 1
    assert quantizer.min >= 0


@pytest.mark.parametrize("leaf", ["0", "1", "3"])
def test_hooks_find_what_they_were_shown(leaf):
    sim, x = convolutions()
    shown = []
    sim.model.get_submodule(leaf).register_forward_hook(lambda m, args, y: shown.append((args[0], y)))
    with torch.no_grad():
        found, expected = sim(x), unsaved(sim, x)
    assert torch.equal(found, expected)
    for ours, theirs in zip(*shown, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_forward_pre_hook", "register_forward_hook"])
def test_hooks_of_quantizers_see_operands_unchanged(hook):
    sim, x = convolutions()
    before = []
    for quantizer in sim.quantizers().values():
        if hook == "register_forward_hook":
            quantizer.register_forward_hook(lambda q, args, y: before.append((args[0], args[0].clone(), y)))
        elif hook == "register_forward_pre_hook":
            quantizer.register_forward_pre_hook(lambda q, args: before.append((args[0], args[0].clone(), None)))
        else:
            quantizer.register_full_backward_hook(lambda q, dx, dy: before.append((dx[0], dx[0].clone(), dy)))
    y = sim(x.requires_grad_())
    y.sum().backward()
    assert before
    assert all(torch.equal(now, then) for now, then, _ in before)


def test_what_backward_hooks_of_layers_see():
    sim, x = convolutions()
    x.requires_grad_()
    seen: list[Tensor] = []
    for m in (sim.model[0], sim.model[1]):
        m.register_full_backward_hook(lambda m, dx, dy: seen.append(dy[0].clone()))
    y = sim(x)
    y.sum().backward()
    ours = list(seen)
    seen.clear()
    unsaved(sim, x).sum().backward()
    assert len(ours) == len(seen) == 2
    assert all(map(torch.equal, ours, seen))


@pytest.mark.parametrize("training", [False, True])
def test_autocast(training):
    sim, x = convolutions()
    sim.train(training)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
        found, expected = sim(x), unsaved(sim, x)
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, expected)
    if training:
        gradients = []
        for y in (found, expected):
            sim.zero_grad()
            y.float().sum().backward()
            gradients.append([p.grad.clone() for p in sim.parameters()])
        assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_after_eager(grad):
    torch._dynamo.reset()
    sim, x = convolutions()
    with torch.set_grad_enabled(grad):
        expected = sim(x)
        compiled = torch.compile(sim, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        sim.model[0].weight.data.mul_(2)  # compiled code quantizes in each call
        sim.eval()
        assert torch.equal(compiled(x), sim(x))
        assert not torch.equal(sim(x), expected)


def test_exported_programs_hold_no_quantized_weights():
    sim = perceptron()
    with torch.no_grad():
        expected = sim(X)
        program = torch.export.export(sim, (X,), strict=False)
    targets = [str(node.target) for node in program.graph.nodes if "fake_quantize" in str(node.target)]
    assert len(targets) == 7  # input, two weights, biases and outputs
    assert torch.equal(program.module()(X), expected)


def test_less_memory_in_training():
    sim, _ = convolutions()
    sim.train()
    x = torch.randn(16, 1, 32, 32)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    totals = []
    for on in (True, False):
        sim.savings = on
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = sim(x)
        totals.append(sum(saved.values()))
        del y
    assert totals[0] < 0.7 * totals[1]  # a rectifier's result is not saved beside the quantized one


@pytest.mark.parametrize("part", ["", "model", "model.0"])
def test_state_dicts_leave_parameters_where_they_are(part: str) -> None:
    """What reads a state dict may write too, for all that torch knows, and a kept parameter would be copied for it."""
    torch.manual_seed(0)
    x = torch.randn(2, 128)
    sim = qsim.QuantSim(nn.Sequential(nn.Sequential(nn.Linear(128, 128))).eval(), x, qsim.int8(), inplace=True)
    sim.calibrate([x], progress=False)
    weight = sim.model[0][0].weight
    address = weight.data_ptr()
    with torch.no_grad():
        expected = sim(x)
        assert torch._C._is_cow_tensor(weight.data)
        state = sim.get_submodule(part).state_dict()
        assert next(t for name, t in state.items() if name.endswith("weight")).data_ptr() == address
        assert torch.equal(sim(x), expected)
        sim.load_state_dict(sim.state_dict())
        assert weight.data_ptr() == address
        assert torch.equal(sim(x), expected)
