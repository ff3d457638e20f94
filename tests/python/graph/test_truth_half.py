"""Half precision rounds every operation, and so fails where the model fails in half precision; and casts cast."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from by_hand import decibels
from models import Calls, Forward
from museum import EXHIBITS
from torch import Tensor, nn

import qsim
from qsim.analysis.deviation import Deviation
from qsim.clinic.targets import TARGETS

EXPRESSIONS = {
    "rms": (lambda x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(), 400.0),
    "rms by rsqrt": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), 400.0),
    "variance": (lambda x: x / ((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(), 900.0),
    "an epsilon that half precision does not know": (lambda x: (x * 0) / ((x * 0).abs() + 1e-8), 1.0),
    "a softmax that is written out": (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), 12.0),
    "a logarithm of exponentials": (lambda x: x.exp().sum(-1, keepdim=True).log(), 12.0),
    "a squared norm": (lambda x: x / x.square().sum(-1, keepdim=True).sqrt(), 300.0),
    "a product of products": (lambda x: (x * x) * (1.0 / (x * x)), 400.0),
    "a local response norm": (lambda x: F.local_response_norm(x[:, :, None], 5, alpha=1.0)[..., 0], 400.0),
    "a hyperbolic shrink": (F.tanhshrink, 0.03),
    "a pool of powers": (lambda x: F.lp_pool1d(x[None].abs(), 2, 4)[0], 400.0),
    "a pool of cubes": (lambda x: F.lp_pool2d(x[None].abs(), 3, 2)[0], 60.0),
    "a covariance": (lambda x: torch.cov(x * torch.linspace(-1, 1, 8).to(x)), 400.0),
    "a correlation": (lambda x: torch.corrcoef(x * torch.linspace(-1, 1, 8).to(x)), 400.0),
    "a small square": (lambda x: x / (x * x + 0.0).sqrt(), 1e-4),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_fails_where_the_model_fails_in_half_precision(name):
    expression, scale = EXPRESSIONS[name]
    x = torch.full((4, 8), scale)
    expected = Calls(expression)(x.half()).float()
    sim = qsim.QuantSim(Calls(expression), x, qsim.fp16())
    sim.calibrate([x], progress=False)
    found = sim(x)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_compiled_as_well(name):
    expression, _ = EXPRESSIONS[name]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3)) * 2
    sim = qsim.QuantSim(Calls(expression), x, qsim.fp16())
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(x), sim(x), rtol=0, atol=0, equal_nan=True)


def one_by_one(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As files have it: `func` gets a function that rounds what is stored, and is given float32."""
    return lambda *given: func(lambda t: t.to(torch.float16).float(), *given)


# What torch computes in one call, keeping in float32 what files in half precision store: what torch.onnx makes of it before opset 23.
IN_FILES = {
    "rms_norm": (lambda x: F.rms_norm(x, (8,), eps=1e-5), lambda r, x: x * r(1 / r(r(r(r(x * x).mean(-1, True)) + 1e-5).sqrt()))),
    "var": (lambda x: x.var(-1), lambda r, x: r(r(r(r(x - r(x.mean(-1, True))).square()).mean(-1)) * 8) / 7),
    "std": (lambda x: x.std(-1), lambda r, x: r(r(r(r(r(x - r(x.mean(-1, True))).square()).mean(-1)) * 8) / 7).sqrt()),
    "std_mean": (lambda x: torch.std_mean(x, -1, correction=0)[0], lambda r, x: r(r(r(x - r(x.mean(-1, True))).square()).mean(-1)).sqrt()),
    "logsigmoid": (F.logsigmoid, lambda r, x: r(x.sigmoid()).log()),
    "logaddexp": (lambda x: torch.logaddexp(x, -x), lambda r, x: r(r(x.exp()) + r((-x).exp())).log()),
    "expm1": (torch.expm1, lambda r, x: r(x.exp()) - 1),
    "log1p": (lambda x: torch.log1p(x.abs()), lambda r, x: r(x.abs() + 1).log()),
    "erfc": (torch.erfc, lambda r, x: 1 - r(x.erf())),
    "logit": (
        lambda x: torch.logit(x.abs() * 0.125, 1e-3),
        lambda r, x: r(r(r(x.abs() * 0.125).clamp(1e-3, 0.999)) / r(1 - r(r(x.abs() * 0.125).clamp(1e-3, 0.999)))).log(),
    ),
    "third norm": (lambda x: x.norm(3, -1), lambda r, x: r(r(x.abs().pow(3)).sum(-1)).pow(1 / 3)),
    "normalize": (lambda x: F.normalize(x, 3.0), lambda r, x: x / r(r(r(r(x.abs().pow(3)).sum(1, True)).pow(1 / 3)).clamp_min(1e-12))),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=0.01), lambda r, x: x + r(r(x * r(torch.tensor(0.01))) * x)),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x.exp(), value=0.01), lambda r, x: x + r(r(x / r(x.exp())) * r(torch.tensor(0.01)))),
    "remainder": (lambda x: x % 0.37, lambda r, x: x - r(r(x / r(torch.tensor(0.37))).floor() * r(torch.tensor(0.37)))),
    "remainder by": (lambda x: 5.0 % (x.abs() + 0.5), lambda r, x: 5 - r(r(5 / r(x.abs() + 0.5)).floor() * r(x.abs() + 0.5))),
    "cosine_similarity": (
        lambda x: F.cosine_similarity(x, x.abs(), dim=-1),
        lambda r, x: r(r(x / r(r(x.norm(dim=-1, keepdim=True)))) * r(x.abs() / r(x.norm(dim=-1, keepdim=True)))).sum(-1),
    ),
    "cross": (
        lambda x: torch.linalg.cross(x[:, :3], x[:, 3:6]),
        lambda r, x: r(x[:, [1, 2, 0]] * x[:, [5, 3, 4]]) - r(x[:, [2, 0, 1]] * x[:, [4, 5, 3]]),
    ),
    "xlog1py": (lambda x: torch.special.xlog1py(x, x.abs()), lambda r, x: x * r(r(x.abs() + 1).log())),
    "ndtr": (torch.special.ndtr, lambda r, x: r(1 + r(r(x * r(torch.tensor(0.5)).sqrt()).erf())) / 2),
    "in place": (lambda x: (x.abs() * 1.0).log1p_(), lambda r, x: r(x.abs() + 1).log()),
}


@pytest.mark.parametrize("scale", [0.003, 1.0, 12.0, 300.0])
@pytest.mark.parametrize("name", IN_FILES)
def test_stores_what_files_store(name, scale):
    expression, written_out = IN_FILES[name]
    x = (torch.randn(16, 8, generator=torch.Generator().manual_seed(3)) * scale).half().float()
    sim = qsim.QuantSim(Calls(expression), x, qsim.fp16())
    expected = one_by_one(written_out)(x).half().float()
    torch.testing.assert_close(sim(x), expected, rtol=2e-3, atol=1e-7, equal_nan=True)  # a last bit here and there
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(x), sim(x), rtol=0, atol=0, equal_nan=True)


def test_a_scaled_product_is_stored_before_it_is_scaled():
    """Attention of BLOOM: what `alpha` makes small again is Inf by then."""
    a, b = torch.full((1, 4, 64), 40.0), torch.full((1, 64, 4), 40.0)
    model = Calls(lambda a: torch.baddbmm(torch.zeros(1, 4, 4), a, b, alpha=0.125))
    assert qsim.QuantSim(model, a, qsim.fp16())(a).isinf().all()
    (finding,) = qsim.doctor(model, [a], "tensorrt-fp16", progress=False).findings
    assert (finding.code, finding.op) == ("QS011", "baddbmm")


@pytest.mark.parametrize(("name", "scale", "code"), [("rms_norm", 400.0, "QS011"), ("std", 400.0, "QS011"), ("logsigmoid", 30.0, "QS010")])
def test_the_doctor_says_so(name, scale, code):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)) * scale
    diagnosis = qsim.doctor(Calls(IN_FILES[name][0]), [x], "tensorrt-fp16", progress=False)
    assert [(f.code, f.severity) for f in diagnosis.findings] == [(code, "error")]


def test_the_doctor_warns_where_the_output_does_not_show_it():
    """A residual of 400 beside a norm of it, which is zero in files."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)) * 400
    diagnosis = qsim.doctor(Calls(lambda x: x + F.rms_norm(x, (8,))), [x], "tensorrt-fp16", progress=False)
    (finding,) = diagnosis.findings
    assert (finding.code, finding.severity, finding.op, finding.evidence["stored in"]) == ("QS011", "warning", "rms_norm", "float16")
    assert not qsim.doctor(Calls(lambda x: x + F.layer_norm(x, (8,))), [x], "tensorrt-fp16", progress=False).findings


# As others write them: by NumPy's names, by the names that torch.linalg has, over masks, norms of every kind.
CALLS = {
    "axis": lambda x: x.mean(axis=1),
    "axis, keepdims": lambda x: torch.sum(x, axis=(1, 2), keepdims=True),
    "std of an axis": lambda x: x.std(axis=1),
    "running sum": lambda x: x.cumsum(axis=1),
    "ord": lambda x: torch.linalg.vector_norm(x, ord=3, dim=1),
    "Frobenius": lambda x: torch.linalg.norm(x, ord="fro", dim=(1, 2)),
    "nuclear": lambda x: torch.linalg.norm(x, "nuc", dim=(1, 2)),
    "nuclear, by torch.norm": lambda x: torch.norm(x, p="nuc", dim=(1, 2)),
    "columns of a matrix": lambda x: torch.linalg.norm(x, 1, dim=(1, 2)),
    "singular": lambda x: torch.linalg.norm(x, 2, dim=(1, 2)),
    "a count": lambda x: x.norm(p=0, dim=1),
    "the least": lambda x: x.norm(p=-torch.inf, dim=1),
    "a mask": lambda x: (x * (x > 0)).sum(1) / (x > 0).sum(1).clamp(min=1),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("target", ["default", "coreml"])
def test_sums_with_narrow_accumulators_are_those_that_the_call_asks_for(name, target):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(3))
    sim = qsim.QuantSim(Calls(CALLS[name]), x, qsim.fp16(target=target))
    torch.testing.assert_close(sim(x), CALLS[name](x), rtol=5e-3, atol=1e-2)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(sim, backend="eager", fullgraph=True)(x), sim(x), rtol=0, atol=0)
    assert qsim.doctor(Calls(CALLS[name]), [x], "coreml-fp16", progress=False).healthy


@pytest.mark.parametrize("name", ["rms", "variance", "a squared norm"])
def test_the_report_says_so(name):
    expression, scale = EXPRESSIONS[name]
    x = torch.randn(4, 8) * scale
    sim = qsim.QuantSim(Calls(expression), x, qsim.fp16())
    report = sim.calibrate([x], progress=False)
    assert "overflow" in str(report)


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_operation_rounds(name, dtype):
    """On ordinary values too: what is lost on the way is lost."""
    expression, _ = EXPRESSIONS[name]
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3)) * 2
    config = qsim.fp16() if dtype is torch.float16 else qsim.bf16()
    sim = qsim.QuantSim(Calls(expression), x, config)
    sim.calibrate([x], progress=False)
    exact, half, found = expression(x.double()), expression(x.to(dtype)), sim(x)
    if bool(half.isnan().any()):
        assert torch.equal(found.isnan(), half.isnan())
        return
    lost, ours = decibels(half, exact), decibels(found, exact)
    assert lost == ours or abs(lost - ours) < 6


def test_a_layer_whose_sum_overflows():
    layer = nn.Linear(64, 8)
    nn.init.constant_(layer.weight, 2.0)
    model = Forward(lambda m, x: F.layer_norm(m.a(x), (8,)), a=layer)
    x = torch.full((2, 64), 600.0)
    sim = qsim.QuantSim(model.eval(), x, qsim.fp16())
    sim.calibrate([x], progress=False)
    assert bool(layer.half()(x.half()).isinf().all())
    assert not bool(sim(x).isfinite().all())


HALF = [name for name, exhibit in EXHIBITS.items() if TARGETS[exhibit.target].format == "float16"]


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("healthy", [False, True])
def test_simulation_and_doctor_agree_on_the_museum(name, healthy):
    exhibit = EXHIBITS[name]
    case = exhibit.make()
    model = case.healthy_model or case.model if healthy else case.model
    data = case.healthy_data or case.data if healthy else case.data
    sim = qsim.QuantSim(model, data[0], qsim.fp16("coreml" if exhibit.target == "coreml-fp16" else "default"))
    sim.calibrate(data, progress=False)
    deviation = Deviation()
    with torch.no_grad():
        for batch in data:
            inputs = batch if isinstance(batch, tuple) else (batch,)
            deviation.add(model(*inputs), sim(*inputs))
    fine = deviation.nonfinite == 0 and deviation.sqnr >= TARGETS[exhibit.target].sqnr
    diagnosis = qsim.doctor(model, data, progress=False, **{"target": exhibit.target, **case.options})
    assert fine == diagnosis.healthy == healthy, str(diagnosis)


# Casts.


def test_half_and_back():
    x = torch.randn(16, 8)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), x)
    sim.calibrate([x], progress=False)
    expected = sim(x)
    sim.half()
    assert all(p.dtype is torch.float16 for p in sim.model.parameters())
    sim.float()
    assert all(p.dtype is torch.float32 for p in sim.model.parameters())
    assert (sim(x) - expected).abs().max() < 0.1


def test_float_is_that_of_modules():
    x = torch.randn(16, 8, dtype=torch.float64)
    sim = qsim.QuantSim(nn.Linear(8, 8).double().eval(), x)
    sim.calibrate([x], progress=False)
    sim.float()
    assert sim.model.weight.dtype is torch.float32
    assert sim(x.float()).dtype is torch.float32


def test_in_float_is_the_context():
    x = torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    sim = qsim.QuantSim(model, x)
    sim.calibrate([x], progress=False)
    with sim.in_float():
        assert torch.equal(sim(x), model(x))
    assert not torch.equal(sim(x), model(x))


def test_a_layer_rounds_before_its_activation():
    """Integer kernels compute both as one; in half precision each has a result of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU()).eval()
    x = 3 * torch.randn(64, 8)
    sim = qsim.QuantSim(model, x, qsim.fp16())
    with torch.no_grad():
        assert torch.equal(sim(x), model.half()(x.half()).float())


# Layers where no example called them: their parameters are rounded as everywhere, and what they compute is in float32, with a warning.


def rounded(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The layer with parameters that half precision has."""
    return copy.deepcopy(layer).to(dtype).float()


UNREACHED = {
    "linear": (nn.Linear(8, 8), lambda layer, x: layer(x)),
    "convolution": (nn.Conv1d(8, 8, 1), lambda layer, x: layer(x.T[None])[0].T),
    "its function": (nn.Linear(8, 8), lambda layer, x: F.linear(x, layer.weight, bias=layer.bias)),
    "attention": (nn.MultiheadAttention(8, 2, bias=True), lambda layer, x: layer(x, x, x, need_weights=False)[0]),
    "recurrent": (nn.LSTM(8, 8), lambda layer, x: layer(x)[0]),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["eager", "compiled", "frugal"])
@pytest.mark.parametrize("kind", UNREACHED)
def test_a_layer_that_no_example_called(kind, how, dtype):
    torch.compiler.reset()
    layer, call = UNREACHED[kind]
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    first = nn.Linear(8, 8)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)).to(dtype).float()
    model = Forward(lambda m, x, other=False: call(m.other, x) if other else m.first(x), first=first, other=layer).eval()
    sim = qsim.QuantSim(model, x, qsim.fp16() if dtype is torch.float16 else qsim.bf16())
    sim.savings = how == "frugal"
    called = torch.compile(sim.model, backend="eager", fullgraph=True) if how == "compiled" else sim.model
    rnn = torch._dynamo.config.patch(allow_rnn=True)
    with rnn, torch.no_grad(), pytest.warns(UserWarning, match=r"where the example inputs did not show it.*its result stays in float"):
        found = called(x, other=True)
    with torch.no_grad():
        torch.testing.assert_close(found, call(rounded(layer, dtype).eval(), x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("config", [qsim.fp16(), qsim.int8()])
def test_a_layer_that_is_called_at_another_place(config, compiled):
    """All of its parameters are its own there too."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)).half().float()
    for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.PReLU(8)):
        torch.compiler.reset()
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        model = Forward(lambda m, x, other=False: m.layer(x) if other else m.layer(x) * 1.0, layer=layer).eval()
        sim = qsim.QuantSim(model, x, dataclasses.replace(config, bias=False))
        sim.calibrate([x], progress=False)
        recorded = []
        hook = sim.model.layer.register_forward_hook(lambda m, args, out, recorded=recorded: recorded.append(out))
        sim(x)
        hook.remove()
        called = torch.compile(sim.model, backend="eager", fullgraph=True) if compiled else sim
        with pytest.warns(UserWarning, match="'layer'"):
            found = called(x, other=True)
        assert torch.equal(found, recorded[0]), layer


def test_what_is_compared_is_rounded_as_the_target_computes_it():
    """And where another path returns it, it overflows there as it does on the target."""

    def forward(_, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)
        return y if y.abs().amax() < 60.0 and x.abs().amax() > 60.0 else x

    model, x = Forward(forward), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    sim = qsim.QuantSim(model, x, qsim.fp16())
    assert torch.equal(sim(x * 400), model((x * 400).half()).float())
    assert not sim(x * 400).any()
