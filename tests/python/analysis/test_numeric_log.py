"""The numeric log: beside what hooks of the test itself see, in training and in evaluation, through crashes and at its bound."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act = nn.Linear(6, 8), nn.ReLU(inplace=True)
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.factor = 1.0

    def forward(self, x):
        y = self.act(self.fc1(x))
        return self.tail(self.act(y + 1)) * self.factor


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_each_entry_is_what_the_module_returned(net, tmp_path):
    net.eval()
    batches = [torch.randn(5, 6), torch.randn(2, 6) * 100]
    with qsim.numeric_log(net, tmp_path / "log"):
        for x in batches:
            net(x)
    log = qsim.read_numeric_log(tmp_path / "log")
    assert log.layers == ["fc1", "act", "tail.0", "tail.1", "tail.2", ""]
    assert (log.steps, log.training, log.first_nonfinite) == ([0, 1], [False, False], {})
    for step, x in enumerate(batches):
        y = F.relu(F.linear(x, net.fc1.weight, net.fc1.bias))
        twice = torch.cat([y, F.relu(y + 1)])  # two calls, one entry
        hidden = net.tail[0](F.relu(y + 1))
        for name, expected in {"fc1": net.fc1(x), "act": twice, "tail.0": hidden, "tail.1": hidden, "": net(x)}.items():
            entry = log[name]
            found = entry.min[step], entry.max[step], entry.rms[step]
            assert found == pytest.approx((expected.min().item(), expected.max().item(), expected.square().mean().sqrt().item()), rel=1e-5)
            assert entry.nonfinite[step] == 0
    assert not net._forward_hooks
    assert not net.fc1._forward_hooks


def test_nan_and_inf_are_counted_and_the_range_is_of_the_rest(net, tmp_path):
    x = torch.randn(5, 6)
    with qsim.numeric_log(net, tmp_path / "log"):
        net(x)
        net.factor = torch.tensor([1.0, math.inf, math.nan])
        net(x)
        with torch.no_grad():
            net.tail[0].weight[0, 0] = math.nan
        net(x)
    log = qsim.read_numeric_log(tmp_path / "log")
    assert (log[""].nans, log[""].infs) == ([0, 5, 15], [0, 5, 0])
    assert math.isfinite(log[""].max[1])
    assert math.isnan(log[""].rms[1])
    assert math.isnan(log[""].max[2])
    assert log.first_nonfinite == {"": 1, "tail.0": 2, "tail.1": 2, "tail.2": 2}
    assert list(log.first_nonfinite) == ["", "tail.0", "tail.1", "tail.2"]
    line = next(line for line in str(log).splitlines() if "tail.0" in line)
    assert line.split()[-2:] == ["5", "2"]  # one channel of five rows; first in step 2
    assert "(the model)" in str(log)


def test_training_is_as_without(net, tmp_path):
    x, y = torch.randn(16, 6), torch.randn(16, 3)

    def trained(steps):
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            yield model

    *_, expected = trained(4)
    steps = trained(4)
    model = next(steps)
    with qsim.numeric_log(model, tmp_path / "log"):
        list(steps)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    log = qsim.read_numeric_log(tmp_path / "log")
    assert log.training == [True] * 3
    assert len(set(log["fc1"].rms)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_and_results_that_are_trees(dtype, tmp_path):
    class Tree(nn.Module):
        def forward(self, x):
            return {"a": [x, x * 2], "ids": torch.arange(3), "empty": x[:0]}

    x = torch.randn(7, 9).to(dtype)
    with qsim.numeric_log(Tree(), tmp_path / "log") as logger:
        logger._model(x)
    entry = qsim.read_numeric_log(tmp_path / "log")[""]
    both = torch.cat([x, x * 2]).double()
    assert (entry.min[0], entry.max[0]) == pytest.approx((both.min().item(), both.max().item()), rel=1e-5)
    assert entry.rms[0] == pytest.approx(both.square().mean().sqrt().item(), rel=1e-3)


def test_a_forward_that_raises_leaves_what_was_seen(net, tmp_path):
    path = tmp_path / "log"
    with qsim.numeric_log(net, path):
        net(torch.randn(2, 6))
        net.factor = "no number"
        with pytest.raises(TypeError):
            net(torch.randn(2, 6))
    log = qsim.read_numeric_log(path)
    assert log.steps == [0, 1]
    assert (log["tail.2"].steps, log[""].steps) == ([0, 1], [0])


def test_each_step_is_on_disk_when_it_ends_and_a_torn_line_is_left_out(net, tmp_path):
    path = tmp_path / "log"
    with qsim.numeric_log(net, path):
        for step in range(3):
            net(torch.randn(2, 6))
            assert qsim.read_numeric_log(path).steps == list(range(step + 1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert qsim.read_numeric_log(path).steps == [0, 1]
    path.write_bytes(whole.replace(b'{"step":1', b'{"step":,'))
    with pytest.raises(ValueError, match="no JSON"):
        qsim.read_numeric_log(path)


def test_it_stays_within_its_bound_and_keeps_the_latest_steps(net, tmp_path):
    path, bound = tmp_path / "log", 1 << 16
    net.eval()
    with qsim.numeric_log(net, path, max_bytes=bound) as logger:
        net.factor = math.inf
        net(torch.randn(2, 6))
        net.factor = 1.0
        for _ in range(900):
            net(torch.randn(2, 6))
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) < bound + 1000
    assert logger.steps == 901
    log = qsim.read_numeric_log(path)
    assert log.steps == list(range(log.steps[0], 901))
    assert 90 < len(log.steps) < 901
    assert log.first_nonfinite == {"": 0}
    with qsim.numeric_log(net, path):  # a new log replaces all of it
        net(torch.randn(2, 6))
    assert qsim.read_numeric_log(path).steps == [0]
    with pytest.raises(ValueError, match="at least 65536"):
        qsim.numeric_log(net, path, max_bytes=100)


def test_other_files_are_refused(tmp_path):
    for text in ("", "hello\n", "[1]\n", json.dumps({"format": "other"}) + "\n"):
        (tmp_path / "log").write_text(text)
        with pytest.raises(ValueError, match=r"numeric log|no JSON"):
            qsim.read_numeric_log(tmp_path / "log")
    with pytest.raises(FileNotFoundError):
        qsim.read_numeric_log(tmp_path / "nothing")


def test_a_simulation_by_the_names_of_its_model(net, tmp_path):
    x = torch.randn(16, 6)
    sim = qsim.QuantSim(net.eval(), x)
    sim.calibrate([x], progress=False)
    expected = sim(x)
    with qsim.numeric_log(sim, tmp_path / "log"):
        assert torch.equal(sim(x), expected)
    log = qsim.read_numeric_log(tmp_path / "log")
    assert log.layers == ["fc1", "act", "tail.0", "tail.1", "tail.2", ""]
    assert log[""].max[0] == pytest.approx(expected.max().item(), rel=1e-5)
    assert not [note for note in sim.summary().notes if "in float" in note]


def test_what_is_called_outside_of_the_model_is_no_step(net, tmp_path):
    with qsim.numeric_log(net, tmp_path / "log"):
        net.fc1(torch.randn(2, 6))
    assert qsim.read_numeric_log(tmp_path / "log").steps == []
    assert str(qsim.read_numeric_log(tmp_path / "log")) == "no step"


class Shared(nn.Module):
    """Hands on what a layer returns that others call too."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class Repeating(nn.Module):
    """Calls things again whose results others hand on."""

    def __init__(self):
        super().__init__()
        self.layer, self.same = nn.Linear(6, 6), nn.Dropout(0.5)
        self.first, self.second = Shared(self.layer), Shared(self.layer)

    def forward(self, x):
        y = self.same(self.first(x))
        y = self.same(self.second(y * 50) * 3)
        for _ in range(2):
            y = self.layer(y)
        return y


def test_what_modules_hand_on_is_theirs_alone_however_often_others_are_called(tmp_path):
    torch.manual_seed(0)
    model, seen = Repeating().eval(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _m, _a, out, name=name: seen.setdefault(name, []).append(out.detach().clone().flatten()))
    x = torch.randn(5, 6)
    with qsim.numeric_log(model, tmp_path / "log"):
        for scale in (1.0, math.nan, 3.0):
            x[0, 0] = scale
            model(x)
    log = qsim.read_numeric_log(tmp_path / "log")
    for name, results in seen.items():
        calls = len(results) // 3
        for step in range(3):
            t = torch.cat(results[step * calls : (step + 1) * calls])
            entry, finite = log[name], t[t.isfinite()]
            assert entry.nonfinite[step] == len(t) - len(finite), (name, step)
            if step != 1:
                found = entry.min[step], entry.max[step], entry.rms[step]
                expected = t.min().item(), t.max().item(), t.square().mean().sqrt().item()
                assert found == pytest.approx(expected, rel=1e-5), (name, step)
