"""Calibration block by block: the same ranges, with each weight read once and activations where they were asked to be."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import qsim
from qsim.errors import CalibrationError


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, scale, *, mask=None):
        y = self.down(torch.relu(self.up(self.norm(x)))) * scale
        return x + (y if mask is None else y.masked_fill(mask, 0.0))


class Network(nn.Module):
    """Something is computed before, between and behind the blocks, and blocks share tensors."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        self.table, self.layers, self.head = (
            nn.Embedding(20, width),
            nn.ModuleList(Block(width) for _ in range(depth)),
            nn.Linear(width, 20),
        )

    def forward(self, ids):
        x, scale = self.table(ids), (ids[..., None] + 1).float().sqrt().expand(*ids.shape, 32).contiguous()
        for number, layer in enumerate(self.layers):
            x = layer(x, scale, mask=(ids < 3)[..., None] if number == 1 else None) * 1.5
        return self.head(x)


def simulated(model, example, config=None, seed=0):
    return qsim.QuantSim(model.eval(), example, config or qsim.int8())


def data(count, rows=4, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(20, (rows + n, 8), generator=made) for n in range(count)]


def states_equal(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name].nan_to_num(-7.0), second[name].nan_to_num(-7.0)) for name in first)


@settings(max_examples=8)
@given(
    count=st.integers(1, 5),
    seed=st.integers(0, 9),
    method=st.sampled_from(["minmax", "mse", "percentile", "entropy", "ema"]),
    blocks=st.sampled_from(["layers.*", ["layers.1"], ["layers.0", "layers.2", "head"], "layers.?.up", ["table", "layers.*"]]),
    to_disk=st.booleans(),
    again=st.booleans(),
)
def test_what_is_observed_is_the_same_to_the_bit(tmp_path_factory, count, seed, method, blocks, to_disk, again):
    torch.manual_seed(seed)
    model, batches = Network(), data(count, seed=seed)
    config = qsim.Config(qsim.TensorSpec(axis=0, symmetric=True), qsim.TensorSpec(method=method))
    plain, sim = simulated(model, batches[0], config), simulated(model, batches[0], config)
    folder = tmp_path_factory.mktemp("kept") if to_disk else None
    kept = [batch.clone() for batch in batches]
    for _ in range(1 + again):
        expected = plain.calibrate(batches, progress=False)
        report = sim.calibrate(batches, progress=False, blocks=blocks, folder=folder)
    assert states_equal(sim, plain)
    assert (report.batches, report.counts, report.problems) == (expected.batches, expected.counts, expected.problems)
    assert all(torch.equal(one, other) for one, other in zip(batches, kept, strict=True))
    assert folder is None or not list(folder.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("qsim batch")]


def test_all_batches_pass_a_block_before_the_next():
    model, batches, order = Network(), data(3), []
    sim = simulated(model, batches[0])
    for number, layer in enumerate(sim.model.layers):
        layer.register_forward_hook(lambda _, args, out, number=number: order.append((number, len(args[0]))))
    sim.calibrate(batches, progress=False, blocks="layers.*")
    assert order == [(block, 4 + batch) for block in range(3) for batch in range(3)]


def test_nan_is_told_of_by_the_batch_that_it_came_with():
    class Doubling(Network):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x, torch.ones(()))
            return self.head(x)

    batches = [torch.randn(2, 32), torch.randn(2, 32), torch.full((2, 32), torch.nan)]
    plain, sim = (simulated(Doubling(), batches[0]) for _ in range(2))
    expected, report = plain.calibrate(batches, progress=False), sim.calibrate(batches, progress=False, blocks="layers.*")
    assert sum("first in batch 2" in problem for problem in report.problems) > 3
    assert len(report.problems) == len(expected.problems)


def test_float_inputs_of_the_caller_are_not_moved(tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    x = torch.randn(64, 64)
    kept, address = x.clone(), x.data_ptr()
    sim = simulated(model, x)
    sim.calibrate([x, x], progress=False, blocks="?", folder=tmp_path)
    assert torch.equal(x, kept)
    assert x.data_ptr() == address


def test_activations_are_in_the_folder_while_others_run(tmp_path):
    model, batches, seen = Network(), data(3), []
    sim = simulated(model, batches[0])

    def look(*_):
        seen.append(sorted(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))

    sim.model.layers[1].register_forward_hook(look)
    sim.calibrate(batches, progress=False, blocks="layers.*", folder=tmp_path)
    first, second, third = (2 * [rows * 8 * 32 * 4] for rows in (4, 5, 6))  # the hidden states, and the scales that all layers read
    assert seen == [second + third, first + third, first + second]


def test_nothing_is_kept_of_a_pass_that_fails():
    model, batches = Network(), [*data(2), torch.full((4, 8), 99)]
    sim, fresh = simulated(model, batches[0]), simulated(model, batches[0])
    with pytest.raises((ValueError, IndexError)):
        sim.calibrate(batches, progress=False, blocks="layers.*")
    assert states_equal(sim, fresh)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("qsim batch")]
    sim.calibrate(batches[:2], progress=False)
    fresh.calibrate(batches[:2], progress=False)
    assert states_equal(sim, fresh)


def test_what_would_be_another_calibration_is_refused():
    class Random(Network):
        def forward(self, ids):
            return super().forward(ids) + torch.randn(())

    class Counting(Network):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, ids):
            self.count += 1
            return super().forward(ids) * self.count

    class Shared(Network):
        def __init__(self):
            super().__init__()
            self.layers[2] = self.layers[0]

    batches = data(2)
    refused = {Random: "draws random numbers", Counting: "writes to its buffers", Shared: "met in more than one block"}
    for model, what in refused.items():
        sim = simulated(model(), batches[0])
        with pytest.raises(CalibrationError, match=what):
            sim.calibrate(batches, progress=False, blocks="layers.*")
    sim = simulated(Network(), batches[0])
    with pytest.raises(ValueError, match=r"blocks='layer\.\*', which matches no module"):
        sim.calibrate(batches, progress=False, blocks="layer.*")
    with pytest.raises(ValueError, match="without blocks"):
        sim.calibrate(batches, progress=False, folder="x")
    with pytest.raises(CalibrationError, match="got no batch"):
        sim.calibrate([], progress=False, blocks="layers.*")


def test_of_an_offloaded_model_each_weight_is_brought_once_for_all_batches(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from qsim.runs.offloaded import Release

    torch.manual_seed(0)
    model, batches = Network(), data(3)
    plain = simulated(model, batches[0])
    plain.calibrate(batches, progress=False)
    accelerate.disk_offload(model, str(tmp_path / "off"), execution_device=torch.device("cpu"))
    sim = simulated(model, batches[0])
    paths, released, before = {module: path for path, module in sim.model.named_modules()}, [], Release.__call__

    def noted(self, module, *rest):
        released.append(paths[module])
        return before(self, module, *rest)

    monkeypatch.setattr(Release, "__call__", noted)
    sim.calibrate(batches, progress=False, blocks="layers.*", folder=tmp_path / "kept")
    assert states_equal(sim, plain)
    ups = [path for path in released if path.endswith("up")]
    assert ups == [f"layers.{block}.up" for block in range(3) for _ in range(3)]
