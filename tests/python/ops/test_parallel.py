"""A simulation in DistributedDataParallel and under fully_shard: two ranks step as one process on the whole batch does."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from models import Perceptron, seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import qsim

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return self.out(x)


def config(kind: str) -> qsim.Config:
    base = qsim.int8()
    replace = dataclasses.replace
    return {
        "fixed": base,
        "learnable weights": replace(base, weight=replace(base.weight, learnable=True)),
        "learnable": replace(base, weight=replace(base.weight, learnable=True), activation=replace(base.activation, learnable=True)),
        "running": replace(base, activation=replace(base.activation, method="ema")),
    }[kind]


def simulated(kind: str, *, calibrate: bool = True) -> qsim.QuantSim:
    sim = qsim.QuantSim(seeded(Blocks), BATCH, config(kind))
    if calibrate:
        sim.calibrate(BATCH.split(4), progress=False)  # as ranks do: products of another number of rows may differ in a bit
    return sim


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def train(sim: qsim.QuantSim, run: nn.Module, x: Tensor, clip: bool = False, steps: int = 2) -> dict[str, Tensor]:
    """Parameters after some steps on the mean over the batch; a norm that is clipped comes along."""
    run.train()
    groups = [{"params": list(sim.model.parameters())}, {"params": list(sim.quantization.parameters())}]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], 0.05)
    found = {}
    for _ in range(steps):
        optimizer.zero_grad()
        run(x).float().square().mean().backward()
        if clip:
            found["norm"] = qsim.clip_grad_norm_(sim.parameters(), 0.1)
        optimizer.step()
    return found | {name: whole(p.detach()) for name, p in sim.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, rtol=tolerance, atol=tolerance / 10, msg=lambda text, name=name: f"{name}: {text}")


def share(rank: int) -> Tensor:
    return BATCH[4 * rank : 4 * rank + 4]


def ddp(rank: int, kind: str, off: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sim = simulated(kind)
    if off:
        sim.disable(*off)
    parallel = DistributedDataParallel(sim, find_unused_parameters=bool(off))
    return train(sim, parallel, share(rank)), dict(sim.quantization.named_buffers())


@pytest.mark.parametrize(("kind", "off"), [("fixed", ()), ("learnable weights", ()), ("learnable weights", ("out.*",))])
def test_ddp_steps_as_one_process(ranks, kind, off):
    sim = simulated(kind)
    if off:
        sim.disable(*off)
    expected = train(sim, sim, BATCH)
    for found, _ in ranks.run(ddp, kind, off):
        same(found, expected)


def scale_gradients(rank: int) -> dict[str, Tensor]:
    sim = simulated("learnable")
    parallel = DistributedDataParallel(sim)  # kept: it averages as long as it lives
    parallel(share(rank)).square().mean().backward()
    return {name: p.grad for name, p in sim.quantization.named_parameters() if name.endswith("output.scale")}


def test_gradients_of_activation_scales_are_those_of_one_process(ranks):
    sim = simulated("learnable")
    sim(BATCH).square().mean().backward()
    for found in ranks.run(scale_gradients):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, sim.quantization.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def ddp_after_shards(rank: int) -> dict[str, Tensor]:
    sim = simulated("fixed", calibrate=False)
    sim.calibrate([share(rank)], progress=False)
    parallel = DistributedDataParallel(sim)  # copies rank 0's encodings, and not what the ranks saw
    parallel(share(rank)).sum().backward()
    sim.synchronize()
    return sim.quantization.state_dict()


def test_ddp_leaves_alone_what_ranks_observed(ranks):
    expected = simulated("fixed").quantization.state_dict()
    for found in ranks.run(ddp_after_shards):
        assert all(torch.equal(found[key], t) for key, t in expected.items())


def test_ddp_broadcasts_running_ranges(ranks):
    (_, first), (_, second) = ranks.run(ddp_forwards_of_different_data)
    differ = {key for key, t in first.items() if not torch.equal(t, second[key])}
    assert not any(key.endswith((".scale", ".zero_point", ".lowest", ".highest")) for key in differ)


def ddp_forwards_of_different_data(rank: int) -> tuple[None, dict[str, Tensor]]:
    sim = simulated("running")
    parallel = DistributedDataParallel(sim)
    parallel.train()
    parallel(share(rank) * (1 + rank)).sum().backward()
    for quantizer in sim.quantizers().values():
        quantizer.observing = False
    parallel(share(rank)).sum().backward()
    return None, dict(sim.quantization.named_buffers())


SHARDED = ["root", "blocks and root"]


def sharded(sim: qsim.QuantSim, how: str, **options: object) -> qsim.QuantSim:
    if how == "blocks and root":
        for block in sim.model.blocks:
            fully_shard(block, **options)
    return fully_shard(sim, **options)


def device_mesh() -> dict[str, object]:
    return {"mesh": torch.distributed.device_mesh.init_device_mesh("cpu", (2,))}


def fsdp(rank: int, kind: str, how: str, calibrate_sharded: bool) -> dict[str, Tensor]:
    sim = sharded(simulated(kind, calibrate=not calibrate_sharded), how, **device_mesh())
    if calibrate_sharded:
        sim.calibrate([share(rank)], forward=lambda network, batch: network(batch), progress=False)
        sim.synchronize()
        assert sim.encodings() == simulated(kind).encodings()
        sim.set_method("mse")
    found = train(sim, sim, share(rank), clip=True)
    assert any(hasattr(p, "full_tensor") for p in sim.quantization.parameters()) == (kind == "learnable weights")
    with torch.no_grad(), sim.in_float():
        sim.eval()
        assert sim(BATCH).isfinite().all()
    return found


@pytest.mark.parametrize("calibrate_sharded", [False, True])
@pytest.mark.parametrize("how", SHARDED)
@pytest.mark.parametrize("kind", ["fixed", "learnable weights"])
def test_fsdp_steps_as_one_process(ranks, kind, how, calibrate_sharded):
    sim = simulated(kind)
    if calibrate_sharded:
        sim.set_method("mse")
    expected = train(sim, sim, BATCH, clip=True)
    for found in ranks.run(fsdp, kind, how, calibrate_sharded):
        same(found, expected)


def average(scale: Tensor) -> None:
    dist.all_reduce(scale.grad)
    scale.grad /= dist.get_world_size()


def fsdp_with_scalars(rank: int, mixed: bool) -> tuple[dict[str, Tensor], str]:
    sim = simulated("learnable")
    scales = list(sim.quantization.parameters())
    for scale in scales:
        scale.register_post_accumulate_grad_hook(average)
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
    fully_shard(sim, ignored_params=set(scales), **policy, **device_mesh())
    message = ""
    try:
        fully_shard(simulated("learnable"), **device_mesh())
    except ValueError as error:
        message = str(error)
    return train(sim, sim, share(rank), steps=1), message


@pytest.mark.parametrize("mixed", [False, True])
def test_fsdp_beside_scalar_scales(ranks, mixed):
    sim = simulated("learnable")
    expected = train(sim, sim, BATCH, steps=1)
    (first, message), (second, _) = ranks.run(fsdp_with_scalars, mixed)
    assert "scalar parameters" in message
    same(first, second, 0)
    if mixed:  # sums of gradients that cancel, in bfloat16
        first = {name: t for name, t in first.items() if not name.endswith(("output.scale", "input.scale"))}
        expected = {name: t for name, t in expected.items() if name in first}
    same(first, expected, 3e-2 if mixed else 1e-5)


def checkpointed(rank: int) -> tuple[dict[str, Tensor], bool]:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sim = sharded(simulated("learnable weights"), "blocks and root", **device_mesh())
    state = get_model_state_dict(sim, options=StateDictOptions(full_state_dict=True))
    saved = {key: t.clone() for key, t in state.items()}
    fresh = sharded(simulated("learnable weights", calibrate=False), "blocks and root", **device_mesh())
    set_model_state_dict(fresh, state if rank == 0 else {}, options=options)
    return saved, torch.equal(fresh(BATCH), sim(BATCH))


def test_distributed_checkpoints(ranks):
    (state, same_outputs), (_, also_same) = ranks.run(checkpointed)
    assert same_outputs
    assert also_same
    sim = simulated("learnable weights", calibrate=False)
    sim.load_state_dict(state)  # of one process
    assert torch.equal(sim(BATCH), simulated("learnable weights")(BATCH))


def with_batch_norm(rank: int) -> tuple[Tensor, str]:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU()).eval()
    sim = qsim.QuantSim(model, BATCH, dataclasses.replace(qsim.int8(), batch_norm="keep"))
    fully_shard(sim, **device_mesh())
    sim.calibrate([BATCH], progress=False)
    sim.reestimate_batch_norms([BATCH[:4], BATCH[4:]], progress=False)
    try:
        sim.fold_batch_norms()
    except ValueError as error:
        return sim.model[1].running_mean, str(error)
    return sim.model[1].running_mean, "folded"


def test_batch_norm_under_fsdp(ranks):
    for mean, message in ranks.run(with_batch_norm):
        assert mean.abs().max() > 0
        assert "fully_shard holds the weights" in message


def wrapped_too_early(rank: int) -> list[str]:
    messages = []
    for wrap in (DistributedDataParallel, lambda model: fully_shard(model, **device_mesh())):
        try:
            qsim.QuantSim(wrap(seeded(Perceptron)), BATCH)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_wrapped_model_is_no_model_to_simulate(ranks):
    for ddp_message, fsdp_message in ranks.run(wrapped_too_early):
        assert re.match(r"QuantSim: the model is in DistributedDataParallel; simulate its \.module, and wrap", ddp_message)
        assert re.match(r"QuantSim: the model is sharded by fully_shard; simulate the model first", fsdp_message)
