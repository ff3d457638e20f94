"""Slices of everything, casts to the same type, additions of zero: dropped, but what takes away, turns, copies or is a result stays."""

import pytest
import torch
from torch import Tensor, nn

from qsim.trace.idle_nodes import drop_idle_nodes

X = torch.arange(24.0).reshape(2, 3, 4)


def sliced(forward, open_batch: bool):
    """What is left of a program's slices, casts and additions, and what it computes then."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    shapes = ({0: torch.export.Dim("batch")},) if open_batch else None
    exported = torch.export.export(Model(), (X,), dynamic_shapes=shapes)
    drop_idle_nodes(exported.graph)
    exported.graph_module.recompile()
    left = sum(getattr(node.target, "__name__", "").startswith(("slice.", "to.", "type_as.", "add.")) for node in exported.graph.nodes)
    return left, exported.module()(X)


@pytest.mark.parametrize("open_batch", [False, True])
@pytest.mark.parametrize(
    ("forward", "left"),
    [
        (lambda x: x[:, :3] - 1, 0),
        (lambda x: x[:, : x.shape[1]].relu() + x[..., 0:9], 1),
        (lambda x: x[:, :2] - 1, 1),
        (lambda x: x[:, 1:][:, :2] - 1, 1),
        (lambda x: x[:, ::2] - 1, 1),
        (lambda x: x.float().to(x.dtype).type_as(x) - 1, 0),
        (lambda x: x.to("cpu", torch.float32).to(x) - 1, 0),
        (lambda x: x.half().float() - 1, 2),
        (lambda x: x.to(torch.float32, copy=True).sub_(1), 1),
        (lambda x: sum([x, x.exp()]), 1),
        (lambda x: (x + 0.0).exp() - (0 + x), 0),
        (lambda x: (x.long() + 0.0).exp() + (x + torch.zeros(3, 1)), 4),
    ],
)
def test_what_is_dropped(forward, left, open_batch):
    found, got = sliced(forward, open_batch)
    assert found == left
    torch.testing.assert_close(got, forward(X), rtol=0, atol=0)


@pytest.mark.parametrize("open_batch", [False, True])
def test_results_of_the_model_stay(open_batch):
    _, got = sliced(lambda x: (x[:, :3], x.float(), 0 + x, x[:, :3] - 1), open_batch)
    for one, wanted in zip(got, (X, X, X, X - 1), strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=0)
