"""What FSDP2 (`torch.distributed.fsdp.fully_shard`), DistributedDataParallel and DataParallel ask of a simulation."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn


def whole(parameter: Tensor) -> Tensor:
    """The parameter; of one that is sharded over ranks (DTensor) the gathered tensor: every rank has to ask for it."""
    gathered: Tensor = parameter.full_tensor() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]
    return gathered


def sharded_as(like: Tensor, t: Tensor) -> Tensor:
    """`t`, which every rank has as a whole, sharded as `like` is."""
    if not is_sharded(like):
        return t
    shard = sys.modules["torch.distributed.tensor"].distribute_tensor
    sharded: Tensor = shard(t, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
    return sharded


def is_sharded(t: Tensor) -> bool:
    """Whether `t` is a DTensor."""
    found = sys.modules.get("torch.distributed.tensor")  # importing it takes as long as qsim; without it there is no DTensor
    return found is not None and isinstance(t, found.DTensor)


def sharded_modules(module: nn.Module) -> dict[str, Any]:
    """The modules that `fully_shard` was called on, by path."""
    found = sys.modules.get("torch.distributed.fsdp")
    return {} if found is None else {path: m for path, m in module.named_modules() if isinstance(m, found.FSDPModule)}


@contextmanager
def sharded_around(module: nn.Module) -> Iterator[None]:
    """Around the body all parameters are sharded, whatever forwards before and in it left gathered."""
    for m in sharded_modules(module).values():
        m.reshard()
    try:
        yield
    finally:
        for m in sharded_modules(module).values():
            m.reshard()


def refuse_wrapped(model: nn.Module) -> None:
    """Raise a ValueError where a model is wrapped before it is simulated: a simulation is what gets wrapped."""
    for path, m in model.named_modules():
        if isinstance(m, nn.parallel.DistributedDataParallel | nn.DataParallel):
            name = f"'{path}'" if path else "the model"
            wrapper = type(m).__name__
            then = "and wrap the simulation" if wrapper == "DistributedDataParallel" else "and wrap it in DistributedDataParallel"
            raise ValueError(f"QuantSim: {name} is in {wrapper}; simulate its .module, {then}")
    for path in sharded_modules(model):
        name = f"'{path}'" if path else "the model"
        raise ValueError(f"QuantSim: {name} is sharded by fully_shard; simulate the model first, and shard the simulation")


def refuse_replicas() -> NoReturn:
    """Replicas of a module, one a device, share quantizers whose state is on one device."""
    raise RuntimeError(
        "QuantSim: nn.DataParallel copies a model to each device for every call, and a simulation cannot be copied so. Show the process "
        "one device (CUDA_VISIBLE_DEVICES=0), or use DistributedDataParallel: torchrun --nproc-per-node ..."
    )


def layout_of(t: Tensor) -> Hashable:
    """Equal for tensors that lie on the same device and are sharded over the same ranks."""
    return (t.device, t.device_mesh, t.placements) if is_sharded(t) else t.device  # type: ignore[attr-defined]


def reduce_over_shards(like: Tensor, summed: Tensor, *, maximum: bool = False) -> None:
    """Sum, in place, what was computed from the local part of tensors laid out as `like` over the ranks with the other parts."""
    if is_sharded(like):
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        for dim, placement in enumerate(like.placements):  # type: ignore[attr-defined]
            if placement.is_shard():
                dist.all_reduce(summed, op, like.device_mesh.get_group(dim))  # type: ignore[attr-defined]


def local(t: Tensor) -> Tensor:
    """The part of `t` that this rank holds, in the same memory."""
    part: Tensor = t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]
    return part
