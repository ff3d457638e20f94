"""Products with a weight in front, and with batches of matrices: ONNX Runtime made kernels of them that it refused to run."""

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsim

X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))


class Product(nn.Module):
    def __init__(self, product, behind, *shape):
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.before, self.last = nn.Parameter(torch.randn(shape)), nn.Linear(16, 16), nn.Linear(24, 24)
        self.product, self.behind = product, behind

    def forward(self, x):
        return self.behind(self, self.product(self.weight, torch.relu(self.before(x))))


PRODUCTS = {
    "a matrix": (lambda w, x: w @ x.transpose(1, 2), (24, 16)),
    "a vector": (lambda w, x: (w @ x[0, 0])[:, None], (24, 16)),
    "mm": (lambda w, x: torch.mm(w, x[0].t()), (24, 16)),
    "a batch": (lambda w, x: w @ x.transpose(1, 2), (3, 24, 16)),
    "bmm": (lambda w, x: torch.bmm(w, x.transpose(1, 2)), (3, 24, 16)),
    "a batch behind": (lambda w, x: (x @ w).mT, (3, 16, 24)),
}
BEHIND = {
    "float": lambda self, y: F.softplus(y),
    "returned": lambda self, y: y,
    "a layer": lambda self, y: self.last(y.mT),
    "a rectifier": lambda self, y: self.last(torch.relu(y).mT),
    "both": lambda self, y: self.last(y.mT) + F.softplus(y).mean(),
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("product", PRODUCTS)
def test_onnx_runtime_runs_what_is_written_and_gets_the_simulation(product, behind, tmp_path):
    function, shape = PRODUCTS[product]
    sim = qsim.QuantSim(Product(function, BEHIND[behind], *shape).eval(), X, qsim.int8(target="onnxruntime"))
    sim.calibrate([X], progress=False)
    report = sim.export(tmp_path / "model.onnx")
    session = _session(tmp_path / "model.onnx", report)
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    with torch.no_grad():
        simulated = sim(X)
        with sim.integer():
            on_integers = sim(X)
    assert found.shape == tuple(simulated.shape)
    torch.testing.assert_close(torch.from_numpy(found), simulated, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(on_integers, simulated, rtol=1e-5, atol=2e-5)


def _session(path, report):
    options = onnxruntime.SessionOptions()
    for name, value in report.session_options.items():
        options.add_session_config_entry(name, value)
    return onnxruntime.InferenceSession(path, options)


def test_a_weight_in_front_is_multiplied_on_integers(tmp_path):
    function, shape = PRODUCTS["a matrix"]
    sim = qsim.QuantSim(Product(function, BEHIND["a layer"], *shape).eval(), X, qsim.int8(target="onnxruntime"))
    sim.calibrate([X], progress=False)
    sim.export(tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert "QLinearMatMul" in kinds
    assert "MatMul" not in kinds
