"""Ranks of torch.distributed that restore together: each sees its own data, all solve the same problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qsim.errors import CalibrationError

Group = dist.ProcessGroup | None  # None: this process alone


def agree(what: Any, about: str, group: Group) -> None:
    """Raise a CalibrationError on every rank unless all are at the same point."""
    if group is None:
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, what, group)
    if any(other != everyone[0] for other in everyone):
        shown = ", ".join(f"rank {rank}: {each!r}" for rank, each in enumerate(everyone))
        raise CalibrationError(f"QuantSim: the ranks disagree about {about} ({shown}); give each of them data that takes the same way")


def is_first(group: Group) -> bool:
    """Whether this is the rank that writes for all."""
    return group is None or dist.get_rank(group) == 0


def add_up(tensors: Iterable[Tensor], group: Group) -> None:
    """Sum over the ranks, in place; the same bits on each of them."""
    for t in tensors if group is not None else ():
        dist.all_reduce(t, group=group)


def total(numbers: list[float], group: Group, device: torch.device) -> list[float]:
    """Sums over the ranks of each of the numbers."""
    if group is None:
        return numbers
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(found, group=group)
    return found.tolist()  # type: ignore[no-any-return]


def share(tensors: Iterable[Tensor], group: Group) -> None:
    """Give every rank what the first has: processors may differ in the last bit of what they compute."""
    for t in tensors if group is not None else ():
        dist.broadcast(t, dist.get_global_rank(group, 0), group=group)  # type: ignore[arg-type]
