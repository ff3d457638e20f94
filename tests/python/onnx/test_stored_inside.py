"""Files in half precision store inside of an operation what the simulation stores there."""

import pytest
import torch
import torch.nn.functional as F
from models import Calls

import qsim
from qsim.onnx.sessions import session

X = (torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3)) * 1.5).half().float()

FUNCTIONS = {
    "rms_norm": lambda x: F.rms_norm(x, (16,)),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(1, correction=0),
    "logsigmoid": F.logsigmoid,
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "expm1": torch.expm1,
    "log1p": lambda x: torch.log1p(x.abs()),
    "erfc": torch.erfc,
    "logit": lambda x: torch.logit(x.abs() * 0.125, 1e-3),
    "sinc": torch.sinc,
    "norm": lambda x: x.norm(3, -1),
    "normalize": lambda x: F.normalize(x, 3.0),
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT, alpha=0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "tanhshrink": F.tanhshrink,
    "lp_pool1d": lambda x: F.lp_pool1d(x.abs(), 2.0, 2),
    "a number": lambda x: x * 3e-8 + x,
}


def of_the_file(sim: qsim.QuantSim, x: torch.Tensor, path) -> torch.Tensor:
    sim.export(path)
    opened = session(path, optimised=False)
    (result,) = opened.run(None, {opened.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(result)


MASK = torch.arange(6)[:, None] >= torch.arange(6) - 1
ATTENTION = {
    "of three dimensions": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "with a mask": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], MASK),
    "with numbers": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], MASK.float() * 0.3, scale=0.2),
    "of groups": lambda x: F.scaled_dot_product_attention(
        x.view(2, 6, 4, 4).transpose(1, 2),
        x[..., :8].reshape(2, 6, 2, 4).transpose(1, 2),
        x[..., 8:].reshape(2, 6, 2, 4).transpose(1, 2),
        enable_gqa=True,
    ),
}


@pytest.mark.parametrize("scale", [1.0, 400.0])
@pytest.mark.parametrize("name", ATTENTION)
def test_scores_of_attention(name, scale, tmp_path):
    """Scores beyond the format are Inf, and their softmax NaN."""
    x = X * scale
    sim = qsim.QuantSim(Calls(ATTENTION[name]), x, qsim.fp16())
    simulated = sim(x)
    assert bool(simulated.isnan().any()) == (scale > 1)
    torch.testing.assert_close(of_the_file(sim, x, tmp_path / "m.onnx"), simulated, rtol=2e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("scale", [0.003, 1.0, 12.0, 200.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_half_precision(name, scale, tmp_path):
    x = X * scale
    if name == "logsigmoid":
        x = x.clamp(min=-8)  # ONNX Runtime's Sigmoid has few digits of small results
    sim = qsim.QuantSim(Calls(FUNCTIONS[name]), x, qsim.fp16())
    torch.testing.assert_close(of_the_file(sim, x, tmp_path / "m.onnx"), sim(x), rtol=2e-3, atol=1e-7, equal_nan=True)  # a last bit


KEPT = ("logsigmoid", "lp_pool1d")  # whose float16 kernels keep more, in runs of them


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in KEPT])
def test_where_it_falls_back(name, tmp_path):
    """Torch writes what it computes in float32 there, of `F.rms_norm`: squares beyond the format are no loss."""
    x = X * (200.0 if name == "rms_norm" else 1.0)
    sim = qsim.QuantSim(Calls(FUNCTIONS[name]), x, qsim.int8())
    sim.calibrate([x], progress=False)
    sim.fallback("*", to="fp16")
    torch.testing.assert_close(of_the_file(sim, x, tmp_path / "m.onnx"), sim(x), rtol=5e-3, atol=2e-3)


def test_with_a_batch_of_any_size(tmp_path):
    causal = ATTENTION["causal"]
    sim = qsim.QuantSim(Calls(lambda x: F.rms_norm(x, (16,)) * x.std(-1, keepdim=True) + causal(x)[:, 0]), X, qsim.fp16())
    sim.export(tmp_path / "m.onnx", dynamic_shapes=(({0: torch.export.Dim("batch")},),))
    opened = session(tmp_path / "m.onnx", optimised=False)
    more = X.repeat(3, 1, 1)
    (result,) = opened.run(None, {opened.get_inputs()[0].name: more.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), sim(more), rtol=2e-3, atol=1e-6)
