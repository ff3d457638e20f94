"""Latency as a budget: what is measured in ONNX Runtime, what of a profile counts, and the search within it."""

import itertools
import json

import pytest
import torch
from torch import nn

import qsim
from qsim.analysis import bit_latency
from qsim.analysis.bit_latency import _ROUNDS, Latencies, _least
from qsim.analysis.bit_operations import products_of

pytest.importorskip("onnxruntime")
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two products with weights, and one of two activations."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        y = torch.relu(self.up(x))
        return self.down(y) @ self.down(y).T


def calibrated(config=None):
    torch.manual_seed(0)
    sim = qsim.QuantSim(Net().eval(), X, config or qsim.int8(target="onnxruntime"))
    sim.calibrate([X], progress=False)
    return sim


def test_each_kind_of_product_is_measured_with_every_pair_of_widths():
    sim = calibrated()
    products = products_of(sim)
    assert [product.name for product in products] == ["linear", "linear", "linear", "matmul"]
    found = Latencies(sim, products, (7, 8, "float"), show=False)
    assert len(found._seconds) == 3  # two calls of one layer are one kind
    for product in products:
        for pair in itertools.product((7, 8, "float"), repeat=2):
            assert 0 < found.of(product, *pair) < 1
        assert found.of(product, 7, 8) == found.of(product, 8, 7)  # both are stored in 8 bits
    assert found.total == pytest.approx(sum(found.of(product, "float", "float") for product in products))


def test_of_a_profile_the_fastest_run_counts_without_what_the_neighbours_have(tmp_path):
    names = ["QuantizeLinear", "DequantizeLinear", "Conv", "QuantizeLinear", "DequantizeLinear"]
    events = [{"cat": "Session", "name": "model_run", "dur": 9}]
    for run in range(_ROUNDS):
        events += [{"cat": "Node", "name": f"{n}_kernel_time", "dur": 10**i + run, "args": {"op_name": n}} for i, n in enumerate(names)]
        events.append({"cat": "Node", "name": "x_fence_before", "dur": 7})
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(events))
    assert _least(profile, 1, True) == pytest.approx(1110e-6)
    assert _least(profile, 0, True) == pytest.approx(1111e-6)
    assert _least(profile, 1, False) == pytest.approx(11110e-6)


def made_up(product, left, right):
    """Seconds: integers are fast where both operands are, and slow beside a float."""
    return {(8, 8): 1.0, ("float", "float"): 4.0}.get((left, right), 5.0) * (2 if product.name == "matmul" else 1)


class MadeUp:
    def __init__(self, sim, products, candidates, *, show):
        self.of, self.total = made_up, sum(made_up(product, "float", "float") for product in products)


@pytest.mark.parametrize("most", [0.3, 0.6, 0.8, 1.1])
def test_the_search_stays_within_it_and_counts_as_brute_force_does(monkeypatch, most):
    monkeypatch.setattr("qsim.analysis.bit_search.Latencies", MadeUp)
    sim = calibrated()
    search = sim.search_bits([X], budget=qsim.Budget(latency=most), candidates=(8, "float"), probes=0, progress=False)
    products = products_of(sim)
    for point in search.front:
        seconds = sum(made_up(product, *(point.bits[key] for key in product.operands)) for product in products)
        assert point.costs.latency == pytest.approx(seconds / MadeUp(sim, products, (), show=False).total)
    assert search.best.costs.latency <= most
    assert "latency" in str(search)
    assert "time of float32" in search.page().html()


def test_what_cannot_be_met_and_what_is_not_counted():
    with pytest.raises(ValueError, match=r"got latency=-0\.1; expected a share of 0 or more"):
        qsim.Budget(latency=-0.1)
    sim = calibrated()
    search = sim.search_bits([X], budget=qsim.Budget(tensors=0.5), candidates=(8, 16), probes=0, progress=False)
    assert search.best.costs.latency is None


def test_what_onnx_runtime_cannot_express_is_told(monkeypatch):
    def refuse(*args, **options):
        raise qsim.ExportError("no such integers")

    monkeypatch.setattr(bit_latency, "export", refuse)
    with pytest.raises(ValueError, match=r"a latency is that in ONNX Runtime, which cannot express linear .*no such integers"):
        calibrated().search_bits([X], budget=qsim.Budget(latency=0.5), candidates=(8, "float"), progress=False)
