"""Scales from each token, put behind products: integers are those of `qsim.reference.fake_quantize_dynamic`, on ONNX Runtime too."""

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx_graphs import session
from torch import nn

import qsim
from qsim.errors import ExportError

TOKEN = qsim.TensorSpec(method="dynamic", axis=-1, symmetric=True)
ZERO_POINTS = dataclasses.replace(TOKEN, symmetric=False)
SPECS = {
    "per token": TOKEN,
    "per token, narrow": dataclasses.replace(TOKEN, signed=True, narrow=True),
    "per token, 4 bits": dataclasses.replace(TOKEN, bits=4),
    "per token, 3 bits, narrow": dataclasses.replace(TOKEN, bits=3, signed=True, narrow=True),
    "per tensor": dataclasses.replace(TOKEN, axis=None),
    "per token, 2 bits": dataclasses.replace(TOKEN, bits=2),
    "with a smallest scale": dataclasses.replace(TOKEN, min_scale=0.01),
    **{f"zero points, {bits} bits": dataclasses.replace(ZERO_POINTS, bits=bits) for bits in (8, 5, 4, 2)},
    "zero points, unsigned": dataclasses.replace(ZERO_POINTS, signed=False),
    "zero points, narrow": dataclasses.replace(ZERO_POINTS, signed=True, narrow=True),
    "zero points, per tensor": dataclasses.replace(ZERO_POINTS, axis=None),
    "zero points, with a smallest scale": dataclasses.replace(ZERO_POINTS, min_scale=0.01),
}
WEIGHT = qsim.TensorSpec(symmetric=True, signed=True, method="minmax", axis=0)


def simulated(model, example, spec=TOKEN, target="onnxruntime"):
    sim = qsim.QuantSim(model.eval(), example, qsim.Config(WEIGHT, spec, bias=False, target=target))
    sim.calibrate([example], progress=False)
    return sim


def tokens(*shape, huge):
    """Of many magnitudes, zeros and one-sided ones among them."""
    torch.manual_seed(0)
    x = torch.randn(*shape) * 10.0 ** torch.randint(-6, 6, (*shape[:-1], 1))
    rows = x.reshape(-1, shape[-1])
    rows[0] = 0
    rows[1].abs_()
    rows[2] = -rows[2].abs()
    if huge:
        rows[3] = torch.linspace(-1, 1, shape[-1]) * torch.finfo(torch.float32).max
    return rows.reshape(shape)


def on_runtime(path, *inputs):
    running = session(str(path))
    given = {end.name: x.numpy() for end, x in zip(running.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in running.run(None, given)]


def kernels(path, folder):
    options, saved = onnxruntime.SessionOptions(), folder / "optimised.onnx"
    options.optimized_model_filepath, options.log_severity_level = str(saved), 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(saved).graph.node]


class Identity(nn.Module):
    """Multiplies by the identity, whose grid has the scale 1 in these tests: what comes out is what was read, bit for bit."""

    def __init__(self, columns, how):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.eye(columns)), how

    def forward(self, x):
        return self.how(x, self.weight)


WAYS = {
    "linear": (F.linear, (5, 12)),
    "linear, three axes": (F.linear, (2, 5, 12)),
    "matmul": (torch.matmul, (2, 5, 12)),
    "mm": (torch.mm, (5, 12)),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [*((way, name) for way in WAYS for name in ("per token", "zero points, 8 bits")), *(("linear", name) for name in SPECS)],
)
def test_what_a_product_reads_is_what_the_reference_gives(way, name, tmp_path):
    how, shape = WAYS[way]
    spec = SPECS[name]
    x = tokens(*shape, huge=spec.axis is not None)
    sim = simulated(Identity(12, how), torch.randn(shape), spec)
    (weight,) = (quantizer for key, quantizer in sim.quantizers().items() if key.endswith("weight"))
    weight.set_encoding(dataclasses.replace(weight.encoding, scale=torch.ones_like(weight.encoding.scale)))
    expected = x
    for _ in range(2):  # where it comes in, and where it goes out
        options = {"axis": spec.axis, "symmetric": spec.symmetric, "min_scale": spec.min_scale}
        expected = qsim.reference.fake_quantize_dynamic(expected, spec.quant_min, spec.quant_max, **options)
    with sim.integer(), torch.no_grad():
        assert torch.equal(sim(x), expected)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert all(name.startswith("Mul_") for name in report.lint)  # of the result with its scale
    assert torch.equal(on_runtime(report.path, x)[0], expected)


def sqnr(x, y):
    return float(10 * torch.log10(x.square().mean() / (x - y).square().mean()))


class Block(nn.Module):
    """A result read by two products and an addition, one product with a bias, and one of two activations."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x):
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        return x + y, y @ x.mT


def test_a_network_computes_what_its_integers_do(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 7, 32)
    config = qsim.w8a8_dynamic().override(position="last", weight=qsim.w8a8_dynamic().weight, activation=TOKEN)
    sim = qsim.QuantSim(Block().eval(), x, config)
    sim.calibrate([x], progress=False)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime", verify=[x])
    assert kernels(report.path, tmp_path).count("QGemm") == 3
    assert not report.lint
    assert not report.verification.in_float
    assert any("2 activations take a scale from each token" in note for note in report.notes)
    assert "qsim.encodings" in {entry.key for entry in onnx.load(report.path).metadata_props}
    with torch.no_grad():
        simulation = sim(x)
        with sim.integer():
            integers = sim(x)
    for ours, theirs, float_sums in zip(integers, on_runtime(report.path, x), simulation, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert sqnr(float_sums, ours) > 50  # an integer at an edge of the next grid may differ
    other = torch.randn(5, 7, 32)
    with torch.no_grad(), sim.integer():
        for ours, theirs in zip(sim(other), on_runtime(report.path, other), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(4, 6, 3, bias=False)

    def forward(self, x):
        return self.c(x)


def test_zero_points_take_no_sum_over_weights_at_run_time(tmp_path):
    """They are in the file, whichever way the weight lies; that of what the model computes is not."""

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.randn(*shape)) for shape in ((12, 8), (6, 8), (8,)))

        def forward(self, x):
            y = torch.addmm(self.c, x, self.a)
            return y @ self.b.t(), F.linear(y, self.b)

    torch.manual_seed(0)
    x = torch.randn(5, 12)
    sim = simulated(Products(), x, ZERO_POINTS)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime", verify=[x])
    found = kernels(report.path, tmp_path)
    assert "ReduceSum" not in found
    assert {kernel.kernel for kernel in sim.kernels()} == {"QGemm", "MatMulIntegerToFloat"}
    with torch.no_grad(), sim.integer():
        for ours, theirs in zip(sim(x), on_runtime(report.path, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_line_of_a_scale_may_lie_along_any_axis(tmp_path):
    """A product over another axis than the scale's reads numbers in float: those of the simulation, bit for bit."""
    torch.manual_seed(0)
    x = tokens(3, 5, 12, huge=False)
    sim = simulated(Identity(12, F.linear), x, dataclasses.replace(ZERO_POINTS, axis=1))
    for quantizer in sim.quantizers().values():
        if not quantizer.spec.is_dynamic:
            quantizer.enabled = False
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    with torch.no_grad():
        assert torch.equal(on_runtime(report.path, x)[0], sim(x))


def test_what_is_no_product_along_the_last_axis_is_multiplied_where_it_is_read(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    model = Convolution()
    sim = simulated(model, x)
    with torch.no_grad():
        expected = sim(x)
    step = float(expected.abs().max() / 127)
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    with sim.integer(), torch.no_grad():
        torch.testing.assert_close(sim(x), expected, rtol=0, atol=step)
    torch.testing.assert_close(on_runtime(report.path, x)[0], expected, rtol=0, atol=step)


def test_switched_off_it_is_the_float_product(tmp_path):
    x = torch.randn(5, 12)
    layer = nn.Linear(12, 3)
    sim = simulated(layer, x)
    sim.disable("*")
    report = sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert np.allclose(on_runtime(report.path, x)[0], layer(x).detach(), atol=1e-6)
    assert not any("token" in note for note in report.notes)


def test_switched_off_and_on_again_integers_follow():
    x = tokens(5, 12, huge=False)
    sim = simulated(nn.Linear(12, 3), x)
    with sim.integer(), torch.no_grad():
        on = sim(x)
        sim.disable("input")
        off = sim(x)
        sim.enable("input")
        assert not torch.equal(on, off)
        assert torch.equal(sim(x), on)


@pytest.mark.parametrize(
    "changes",
    [{"block_size": 4}, {"bits": 9}, {"rounding": "reciprocal"}, {"dtype": "float8_e4m3fn"}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_no_kernel_takes_is_refused_by_name(changes, tmp_path):
    x = torch.randn(5, 12)
    spec = qsim.TensorSpec(method="dynamic", axis=-1, **changes) if "dtype" in changes else dataclasses.replace(TOKEN, **changes)
    sim = simulated(nn.Linear(12, 3), x, spec)
    with sim.integer(), pytest.raises(ValueError, match="'input' and 1 others have method='dynamic'"):
        sim(x)
    with pytest.raises(ExportError, match=r"'input'.*method='dynamic'.*at most 8 bits"):
        sim.export(tmp_path / "model.onnx", target="onnxruntime")
    assert not (tmp_path / "model.onnx").exists()


def test_other_targets_refuse_it(tmp_path):
    x = torch.randn(5, 12)
    sim = simulated(nn.Linear(12, 3), x)
    with pytest.raises(ExportError, match="none for this target"):
        sim.export(tmp_path / "model.onnx", target="openvino")
