"""Reports on a simulation that FSDP shards are those of one that is whole."""

from pathlib import Path

import pytest
import torch
from torch import nn

import qsim


def simulated(sharded: str = "") -> tuple[qsim.QuantSim, torch.Tensor]:
    """Sharded as one, or some of its modules by themselves too; "warm" has run, which leaves what the root holds gathered."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), block, nn.Linear(16, 4)).eval(), torch.randn(16, 8)
    sim = qsim.QuantSim(model, x, qsim.int4())
    if sharded:
        from torch.distributed.fsdp import fully_shard

        if "blocks" in sharded:
            fully_shard(sim.model[2])
        fully_shard(sim)
    sim.calibrate([x], progress=False)
    if "warm" in sharded:
        sim(x)
    return sim, x


def reports(rank: int, sharded: str, folder: str) -> tuple[qsim.Comparison, ...]:
    sim, x = simulated(sharded)
    path = Path(folder) / f"{sharded} {rank}.json"
    before = sim(x).tolist() if "warm" in sharded else None
    found = (
        sim.compare(x),
        sim.compare(x, memory=1),
        sim.sensitivity([x, x], path=path, progress=False),
        sim.sensitivity([x, x], path=path),
        sim.sensitivity([x], lambda model, data: float(model(data[0]).square().mean()), progress=False),
        sim.progressive([x], progress=False),
        sim.float_plan([x], target=20.0, progress=False),
    )
    after = sim(x).tolist()
    assert before in (None, after)
    return *found, after


@pytest.mark.parametrize("sharded", ["root", "blocks", "root warm", "blocks warm"])
def test_reports_are_computed_on_shards(ranks, tmp_path, sharded):
    whole = ranks.run(reports, "", str(tmp_path))
    assert ranks.run(reports, sharded, str(tmp_path)) == [whole[0], whole[0]]


def summary_of_one(rank: int) -> list[tuple[str, float | None]]:
    sim, _ = simulated("root")
    return [(row.key, row.clipped) for row in sim.summary().rows if row.role == "activation"] if rank == 0 else []


def test_a_summary_asks_no_other_rank(ranks):
    whole = [(row.key, row.clipped) for row in simulated()[0].summary().rows if row.role == "activation"]
    assert ranks.run(summary_of_one) == [whole, []]
