"""Sums over ranks in a forward, as tensor parallelism by hand makes them: they are written where no version counter tells."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import nn

import qsim

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Reduced(torch.autograd.Function):
    """Megatron's sum: gradients pass as they are."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def in_place(x):
    dist.all_reduce(x)
    return x


def waited_for(x):
    dist.all_reduce(x, async_op=True).wait()
    return x


def by_a_view(x):
    dist.all_reduce(x.view(-1))
    return x


def scattered(x):
    out = torch.empty(len(x) // dist.get_world_size(), 8)
    dist.reduce_scatter(out, [*x.chunk(dist.get_world_size())])
    return out.repeat(dist.get_world_size(), 1)


SUMS = {
    "in place": in_place,
    "waited for": waited_for,
    "by a view": by_a_view,
    "a function of its own": Reduced.apply,
    "with gradients": lambda x: torch.distributed.nn.functional.all_reduce(x),
    "scattered": scattered,
}


class Parallel(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(8, 8, bias=False), nn.Linear(8, 2), how

    def forward(self, x):
        return self.last(SUMS[self.how](self.first(x)))


def on_a_rank(rank, how):
    torch.manual_seed(rank)
    model = Parallel(how).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", message="QuantSim")
        sim = qsim.QuantSim(model, X, dataclasses.replace(qsim.int8(), bias=False))
        sim.calibrate([X], progress=False)
        found, grids = sim(X), sim.quantizers()
        key = next(key for key in grids if key.startswith("all_reduce.") or key.startswith("reduce_scatter."))
        summed = SUMS[how](grids["first.output"](F.linear(grids["input"](X), grids["first.weight"](model.first.weight))))
        assert not torch.equal(summed, grids[key](summed))
        assert summed.max() > grids["first.output"](summed).max()  # of one rank
        last = sim.model.last
        expected = grids["last.output"](F.linear(grids[key](summed), grids["last.weight"](last.weight), last.bias))
        torch.testing.assert_close(found, expected)
        if how == "in place":  # the others break graphs
            torch.compiler.reset()
            assert torch.equal(torch.compile(sim, backend="eager", fullgraph=True)(X), found)


@pytest.mark.parametrize("how", SUMS)
def test_a_sum_over_ranks_has_a_grid_of_its_own(how, ranks):
    ranks.run(on_a_rank, how)
