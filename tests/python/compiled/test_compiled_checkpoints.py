"""Recomputation under torch.compile gives the gradients of eager mode."""

import pytest
import torch
from by_hand import simulated
from models import Forward
from recomputed import Recomputed, X, gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("way", ["leaf", "forward of a leaf", "method", "nested", "segments", "function", "lambda", "in a container"])
def test_compiled(way):
    model = Recomputed("leaf" if way == "in a container" else way, False).double().eval()
    if way == "in a container":  # whose own mode stands around the checkpoint too
        model = Forward(lambda m, x: m.inner(x.sin()), inner=model).eval()
    sim = simulated(model, X)
    expected, wanted = gradients(sim, X, False)
    compiled = torch.compile(sim, backend="aot_eager", fullgraph=way != "segments")
    sim.zero_grad()
    x = X.clone().requires_grad_()
    y = compiled(x)
    y.square().sum().backward()
    torch.testing.assert_close(y.detach(), expected, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip([x.grad, *(p.grad for p in sim.model.parameters())], wanted, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
