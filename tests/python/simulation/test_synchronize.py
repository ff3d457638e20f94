"""Ranks that calibrate on shards know, once synchronized, what one process knows that saw everything: the same bits."""

import contextlib
import copy
import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from models import ConvNet, Perceptron, seeded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qsim

IMAGES = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(3)) * torch.tensor([1, 3, 0.1, 9, 1, 2]).view(6, 1, 1, 1)
BATCHES = list(IMAGES.split(1))


def with_activations(**options: object) -> qsim.Config:
    config = qsim.int8()
    return dataclasses.replace(config, activation=dataclasses.replace(config.activation, **options))


CONFIGS = {
    "int8": qsim.int8(),
    "int4 entropy": dataclasses.replace(qsim.int4(), activation=qsim.TensorSpec(bits=4, method="entropy")),
    "percentile": with_activations(method="percentile", percentile=99.0),
    "fp16": qsim.fp16(),
    "fp8": qsim.fp8(),
    "per channel": with_activations(axis=1, method="minmax"),
    "learnable": with_activations(learnable=True),
}
FORMS = {"convolutions": lambda: seeded(ConvNet), "computed weights": lambda: weight_normed()}


def weight_normed() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(144, 5))
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU()).eval()


def simulated(config: qsim.Config, form: str = "convolutions") -> qsim.QuantSim:
    return qsim.QuantSim(FORMS[form](), IMAGES, config)


def state(sim: qsim.QuantSim) -> dict[str, Tensor]:
    return {key: t.clone() for key, t in sim.quantization.state_dict().items()}


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, t in expected.items():
        assert found[key].dtype == t.dtype
        assert torch.equal(found[key].nan_to_num(-1.0), t.nan_to_num(-1.0)), key


def calibrate_shard(sim: qsim.QuantSim, batches: list[Tensor]) -> None:
    with contextlib.suppress(qsim.CalibrationError):  # of a rank without data
        sim.calibrate(batches, progress=False)


def synchronized(rank: int, config: str, form: str, shards: list[list[Tensor]]) -> dict[str, Tensor]:
    sim = simulated(CONFIGS[config], form)
    calibrate_shard(sim, shards[rank])
    sim.synchronize()
    return state(sim)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_shards_give_what_one_process_gives(ranks, config, form):
    if (config, form) == ("per channel", "computed weights"):
        pytest.skip("flattened features have other axes")
    data = [batch.clone() for batch in BATCHES]
    data[1][0, 0, 0, 0], data[4][0, 0, 3, 3] = torch.nan, torch.inf
    whole = simulated(CONFIGS[config], form)
    whole.calibrate(data, progress=False)
    for found in ranks.run(synchronized, config, form, [data[:2], data[2:]]):
        same_bits(found, state(whole))


@pytest.mark.parametrize("config", ["int8", "per channel", "fp16"])
@pytest.mark.parametrize("empty", [0, 1])
def test_a_rank_without_data(ranks, config, empty):
    whole = simulated(CONFIGS[config])
    whole.calibrate(BATCHES, progress=False)
    for found in ranks.run(synchronized, config, "convolutions", [[], BATCHES] if empty == 0 else [BATCHES, []]):
        same_bits(found, state(whole))


def synchronized_often(rank: int, reset: bool) -> dict[str, Tensor]:
    sim = simulated(CONFIGS["int8"])
    for part in (BATCHES[:2], BATCHES[2:4], []):  # the last time there is nothing new
        calibrate_shard(sim, part[rank::2])
        sim.synchronize()
    if reset:
        for quantizer in sim.quantizers().values():
            quantizer.reset()
    calibrate_shard(sim, BATCHES[4:][rank::2])
    sim.synchronize()
    return state(sim)


@pytest.mark.parametrize("reset", [False, True])
def test_no_value_counts_twice(ranks, reset):
    whole = simulated(CONFIGS["int8"])
    whole.calibrate(BATCHES[4:] if reset else BATCHES, progress=False)
    for found in ranks.run(synchronized_often, reset):
        same_bits(found, state(whole))


def loaded(rank: int) -> tuple[int, int]:
    sim = simulated(CONFIGS["int8"])
    sim.calibrate(BATCHES[rank::2], progress=False)
    saved = copy.deepcopy(sim.state_dict())
    sim.synchronize()
    together = sim.quantizers()["input"].counts.elements
    sim.load_state_dict(saved)
    sim.synchronize()
    return together, sim.quantizers()["input"].counts.elements


def test_a_loaded_state_is_what_the_rank_observed(ranks):
    assert ranks.run(loaded) == [(IMAGES.numel(), IMAGES.numel())] * 2


def running(rank: int, shards: list[list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sim = simulated(with_activations(method="ema", averaging=0.25))
    calibrate_shard(sim, shards[rank])
    before = state(sim)
    sim.synchronize()
    return before, state(sim)


def test_running_ranges_are_averaged(ranks):
    alone, together = zip(*ranks.run(running, [BATCHES[:3], BATCHES[3:]]), strict=True)
    same_bits(together[0], together[1])
    ends = [key for key in together[0] if key.endswith(("lowest", "highest")) and "weight" not in key]
    assert ends
    for key in ends:
        assert torch.equal(together[0][key], ((alone[0][key].double() + alone[1][key].double()) / 2).float())
        assert not torch.equal(alone[0][key], alone[1][key]) or key.endswith("lowest")
    low, high = (together[0][f"quantization.input.observer.{end}".removeprefix("quantization.")] for end in ("lowest", "highest"))
    encoding = qsim.ops.choose_qparams(low, high, -128, 127)
    assert torch.equal(together[0]["input.scale"], encoding[0])
    assert together[0]["input.observer.counters"][0] == IMAGES.numel()


def test_running_ranges_of_a_rank_without_data(ranks):
    alone, together = zip(*ranks.run(running, [[], BATCHES]), strict=True)
    for found in together:
        same_bits(found, alone[1])


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            return self.never(x)
        return self.positive(x) if x.sum() > 0 else self.negative(x)


def read_by_ranks(rank: int) -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    x = torch.ones(2, 4)
    sim = qsim.QuantSim(Ways().eval(), [(x,), (-x,)], qsim.int8(target="tensorrt").override("*", activation=None))
    sim.calibrate([x if rank else -x], progress=False)
    alone = [found.tensor for found in sim.borders().unread]
    sim.synchronize()
    return alone, [found.tensor for found in sim.borders().unread]


def test_a_weight_that_any_rank_read_was_reached(ranks):
    assert ranks.run(read_by_ranks) == [
        (["positive.weight", "never.weight"], ["never.weight"]),
        (["negative.weight", "never.weight"], ["never.weight"]),
    ]


def failing(rank: int, kind: str) -> str:
    model = seeded(Perceptron)
    config = qsim.int8()
    if rank == 1 and kind == "weights":
        model.fc2.weight.data[0, 0] += 1e-3
    if rank == 1 and kind == "bits":
        config = config.override("fc1", bits=4)
    if rank == 1 and kind == "fewer":
        config = config.override("fc2", off=True)
    sim = qsim.QuantSim(model, torch.ones(2, 6), config)
    if kind != "no data":
        sim.calibrate([torch.randn(2, 6)], progress=False)
    if kind == "reset":
        sim.synchronize()
        if rank == 1:
            sim.quantizers()["fc1.output"].reset()
    try:
        sim.synchronize()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("weights", r"ValueError.*'fc2\.weight' has a weight of hash -?\d+ on rank 1 and -?\d+ on rank 0"),
        ("bits", r"ValueError.*'fc1\.weight' has spec TensorSpec\(bits=4.* on rank 1"),
        ("fewer", r"ValueError.*rank 1 has no quantizer 'fc2\.weight', which rank 0 has"),
        ("reset", r"ValueError.*'fc1\.output' has counts of the last synchronize None on rank 1"),
        ("no data", r"CalibrationError.*'input' has no range: no batch reached it"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(ranks, kind, message):
    for found in ranks.run(failing, kind):
        assert re.match(f"(?s){message}", found), found


class Task(nn.Module):
    def __init__(self, sim: nn.Module) -> None:
        super().__init__()
        self.sim = sim

    def forward(self, x: Tensor) -> Tensor:
        return self.sim(x).square().mean()


WRAPPERS = {
    "alone": lambda sim: sim,
    "task": Task,
    "sequential": nn.Sequential,
    "compiled": lambda sim: torch.compile(sim, backend="eager"),
    "copy": lambda sim: Task(copy.deepcopy(sim)),
}


def wrapped(rank: int, around: str, when: str) -> dict[str, Tensor] | str:
    """What a simulation holds that DistributedDataParallel wraps, by itself or in another module, after calibrating on shards."""
    sim = simulated(CONFIGS["int8"])
    if when != "before calibration":
        calibrate_shard(sim, BATCHES[rank::2])
    if when == "synchronized before":
        sim.synchronize()
    wrapper = WRAPPERS[around](sim)
    DistributedDataParallel(wrapper)
    held = next(m for m in wrapper.modules() if isinstance(m, qsim.QuantSim))
    if when == "before calibration":
        calibrate_shard(held, BATCHES[rank::2])
    try:
        held.synchronize()
    except RuntimeError as error:
        return str(error)
    return state(held)


@pytest.mark.parametrize("around", WRAPPERS)
@pytest.mark.parametrize("when", ["before calibration", "after calibration", "synchronized before"])
def test_what_ranks_observed_under_a_broadcast(ranks, around, when):
    whole = simulated(CONFIGS["int8"])
    whole.calibrate(BATCHES, progress=False)
    for found in ranks.run(wrapped, around, when):
        if when == "after calibration" and around != "alone":
            assert re.match(r"QuantSim\.synchronize: at 'input' and \d+ other quantizers rank 1 holds what another rank observed: ", found)
        else:
            same_bits(found, state(whole))


def broadcast_in_a_forward(rank: int) -> str:
    sim = simulated(CONFIGS["int8"])
    parallel = DistributedDataParallel(Task(sim))
    calibrate_shard(sim, BATCHES if rank else [])  # of rank 0, which observed nothing, too
    with sim.in_float():
        parallel(IMAGES)
    try:
        sim.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_broadcast_in_a_forward_is_noticed(ranks):
    assert all("rank 1 holds what another rank observed" in found for found in ranks.run(broadcast_in_a_forward))


def calibrated_in_training(rank: int | None, again: list[int]) -> dict[str, Tensor]:
    """On shards that reach different branches, and once more, with other parameters, on those batches of `again`; None is one process."""
    torch.manual_seed(0)
    x = torch.ones(2, 4)
    sim, batches = qsim.QuantSim(Ways().eval(), [(x,), (-x,)]), [x, -2 * x]
    for used in ([0, 1], again):
        calibrate_shard(sim, [batches[i] for i in used if rank in (None, i)])
        if rank is not None:
            sim.synchronize()
        with torch.no_grad():
            for parameter in sim.parameters():
                parameter.mul_(1.5)
    return state(sim)


@pytest.mark.parametrize("again", [[0, 1], [0], [1]])
def test_again_after_training_where_shards_reach_different_branches(ranks, again):
    whole = calibrated_in_training(None, again)
    for found in ranks.run(calibrated_in_training, again):
        same_bits(found, whole)


def in_a_subgroup(rank: int) -> str | int:
    group = dist.new_group([0])
    sim = simulated(CONFIGS["int8"])
    sim.calibrate(BATCHES[:1], progress=False)
    try:
        sim.synchronize(group)
    except RuntimeError as error:
        return str(error)
    return sim.quantizers()["input"].counts.elements


def test_groups(ranks):
    inside, outside = ranks.run(in_a_subgroup)
    assert inside == BATCHES[0].numel()
    assert "rank 1 is not in the group" in outside


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"there is no process group; call torch\.distributed\.init_process_group"):
        simulated(CONFIGS["int8"]).synchronize()
