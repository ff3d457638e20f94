"""Ranks of torch.distributed that calibrate on shards of the data, and what they have then seen together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qsim.quantizers.quantizer import Quantizer
from qsim.runs.sharding import is_sharded


def merge(quantizers: Mapping[str, Quantizer], weights: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Give every observer what those of all ranks have seen; `QuantSim.synchronize` explains it.

    Parameters
    ----------
    quantizers : mapping of str to Quantizer
        Of all keys; those of `weights` stay as they are.
    weights : mapping of str to Tensor
        The parameters that have a quantizer: the same ones on every rank.
    group : ProcessGroup, optional
    """
    _check_group(group)
    seen = {key: quantizer for key, quantizer in quantizers.items() if key not in weights}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {key: _describe(quantizer, weights.get(key)) for key, quantizer in quantizers.items()}, group)
    _check_own(everyone)
    for key, shape in _agreed(everyone).items():
        if shape is not None and quantizers[key].observer.held_shape is None:
            quantizers[key].observer.adopt(shape)
    running = [quantizer.observer for quantizer in seen.values() if quantizer.spec.is_running]
    exact = [quantizer.observer for quantizer in seen.values() if not quantizer.spec.is_running]
    _reduce([observer.lowest for observer in exact], dist.ReduceOp.MIN, group)
    _reduce([observer.highest for observer in exact], dist.ReduceOp.MAX, group)
    _reduce_or([observer.low_bits for observer in exact if observer.sketched], group)
    _average([end for observer in running for end in (observer.lowest, observer.highest)], group)
    _add_news(list(seen.values()), group)


def read_by_any(read: frozenset[str] | None, group: dist.ProcessGroup | None) -> frozenset[str] | None:
    """`Simulation.read` of all ranks together; None where none has calibrated."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, read, group)
    known = [mine for mine in everyone if mine is not None]
    return frozenset[str]().union(*known) if known else None


def forget_outdated(quantizers: Mapping[str, Quantizer], outdated: set[str], group: dist.ProcessGroup | None) -> None:
    """Reset what other parameters gave, in quantizers that other ranks have reached with those of now: see `ObservedWith.outdated`."""
    _check_group(group)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, outdated, group)
    reached = outdated - set.intersection(*everyone)
    for key in reached:
        quantizers[key].reset()
    outdated -= reached


def rank_local(quantizers: Mapping[str, Quantizer]) -> list[str]:
    """Buffers in a bank of quantizers that DistributedDataParallel is to leave alone: what each rank observed, for `merge`.

    Running ranges are not among them: the scales that it broadcasts follow from them.
    """
    return [
        f"{name}.{buffer}"
        for name, quantizer in quantizers.items()
        for buffer, _ in quantizer.named_buffers()
        if buffer.endswith((".counters", ".sketch", ".low_bits", "observed_by"))
        or (buffer.startswith("observer.") and not quantizer.spec.is_running)
    ]


def _check_group(group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("QuantSim.synchronize: there is no process group; call torch.distributed.init_process_group on every rank first")
    if dist.get_rank(group) < 0:
        raise RuntimeError(f"QuantSim.synchronize: rank {dist.get_rank()} is not in the group that was given; call it on its ranks alone")


def _describe(quantizer: Quantizer, weight: Tensor | None) -> dict[str, Any]:
    """What has to be the same on all ranks, by the words that an error uses for it, and the shape, which a rank without data lacks."""
    told = None if quantizer.merged is None else quantizer.merged[0].tolist()
    return {
        "spec": quantizer.spec,
        "a weight of hash": None if weight is None or is_sharded(weight) else _hash(weight),
        "counts of the last synchronize": told,
        "shape": quantizer.observer.held_shape,
        "own": weight is not None or quantizer.is_own,
    }


def _check_own(everyone: list[dict[str, dict[str, Any]]]) -> None:
    """A RuntimeError where a rank lost what it observed, and another rank's would count twice."""
    for rank, described in enumerate(everyone):
        if lost := [key for key, mine in described.items() if not mine["own"]]:
            raise RuntimeError(
                f"QuantSim.synchronize: at {lost[0]!r} and {len(lost) - 1} other quantizers rank {rank} holds what another rank observed: "
                "DistributedDataParallel gives all ranks the buffers of rank 0 where it is around a module that holds the simulation. "
                "Expected what each rank observed. Call quantizer.reset() of all sim.quantizers() on all ranks, then calibrate, and "
                "synchronize before DistributedDataParallel is made, or called"
            )


def _hash(t: Tensor) -> int:
    if t.numel() == 0:
        return 0
    return int(torch.hash_tensor(t.detach()).view(torch.int64))  # int() of a uint64 may overflow


def _agreed(everyone: list[dict[str, dict[str, Any]]]) -> dict[str, tuple[int, ...] | None]:
    """The shapes that those ranks know that have seen data; a ValueError where ranks do not fit together."""
    first = everyone[0]
    shapes = {key: described["shape"] for key, described in first.items()}
    for rank, described in enumerate(everyone):
        for key in [*first, *described]:
            if key not in described or key not in first:
                has, lacks = (0, rank) if key in first else (rank, 0)
                raise _differ(f"rank {lacks} has no quantizer {key!r}, which rank {has} has")
            mine = described[key]
            for what in mine.keys() - {"shape", "own"}:
                if mine[what] != first[key][what]:
                    raise _differ(f"quantizer {key!r} has {what} {mine[what]} on rank {rank} and {first[key][what]} on rank 0")
            if shapes[key] is None:
                shapes[key] = mine["shape"]
            if mine["shape"] not in (None, shapes[key]):
                raise _differ(f"quantizer {key!r} has ranges of shape {mine['shape']} on rank {rank} and {shapes[key]} on another")
    return shapes


def _differ(what: str) -> ValueError:
    return ValueError(f"QuantSim.synchronize: the simulations differ: {what}. Make them from one model and config, and reset or load all.")


def _reduce(tensors: list[Tensor], op: Any, group: dist.ProcessGroup | None) -> None:
    """all_reduce of many tensors of one dtype as one."""
    if not tensors:
        return
    flat = torch.cat([t.to(tensors[0].device).flatten() for t in tensors])
    dist.all_reduce(flat, op, group)
    for t, merged in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        t.copy_(merged.view(t.shape))


def _reduce_or(bits: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """all_reduce of int32 numbers by OR, which NCCL lacks: the largest of each bit."""
    places = torch.arange(31)
    apart = [t.view(1) >> places.to(t.device) & 1 for t in bits]
    _reduce(apart, dist.ReduceOp.MAX, group)
    for t, merged in zip(bits, apart, strict=True):
        t.copy_((merged << places.to(t.device)).sum())


def _average(ends: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """The mean, over the ranks that have a range, of each end of each running range."""
    sums = [torch.where(end.isfinite(), end, 0.0).double() for end in ends]
    ranks = [end.isfinite().double() for end in ends]
    _reduce(sums + ranks, dist.ReduceOp.SUM, group)
    for end, total, count in zip(ends, sums, ranks, strict=True):
        end.copy_(torch.where(count > 0, total / count, end.double()))


def _add_news(quantizers: list[Quantizer], group: dist.ProcessGroup | None) -> None:
    """Add up all counters; what the ranks were given by an earlier merge is theirs only once."""
    held = [[torch.zeros_like(t) for t in q.additive] if q.merged is None else q.merged for q in quantizers]
    for quantizer, known in zip(quantizers, held, strict=True):
        for t, before in zip(quantizer.additive, known, strict=True):
            t.sub_(before.to(t.device))
    _reduce([t for quantizer in quantizers for t in quantizer.additive], dist.ReduceOp.SUM, group)
    for quantizer, known in zip(quantizers, held, strict=True):
        for t, before in zip(quantizer.additive, known, strict=True):
            t.add_(before.to(t.device))
        quantizer.note_merged(quantizer.additive)
