"""Reports on a simulation that FSDP shards are those of one that is whole."""

from pathlib import Path

import torch
from torch import nn

import qsim


def simulated(sharded: bool) -> tuple[qsim.QuantSim, torch.Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(16, 8)
    sim = qsim.QuantSim(model, x, qsim.int4())
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(sim)
    sim.calibrate([x], progress=False)
    return sim, x


def reports(rank: int, sharded: bool, folder: str) -> tuple[qsim.Comparison, ...]:
    sim, x = simulated(sharded)
    path = Path(folder) / f"{rank}.json"
    return sim.compare(x), sim.compare(x, memory=1), sim.sensitivity([x], path=path, progress=False), sim.sensitivity([x], path=path)


def test_comparison_and_sensitivity(ranks, tmp_path):
    whole = ranks.run(reports, False, str(tmp_path))
    sharded = ranks.run(reports, True, str(tmp_path))  # goes on from the scores of the whole one: they are of the same weights
    assert sharded[0] == sharded[1] == whole[0]


def summary_of_one(rank: int) -> list[tuple[str, float | None]]:
    sim, _ = simulated(sharded=True)
    return [(row.key, row.clipped) for row in sim.summary().rows if row.role == "activation"] if rank == 0 else []


def test_a_summary_asks_no_other_rank(ranks):
    whole = [(row.key, row.clipped) for row in simulated(sharded=False)[0].summary().rows if row.role == "activation"]
    assert ranks.run(summary_of_one) == [whole, []]
