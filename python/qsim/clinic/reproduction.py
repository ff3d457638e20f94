"""The smallest input that shows a failure: one sample of a batch, with what is not needed made zero."""

from __future__ import annotations

import io
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from qsim.atomic import write_atomically

Fails = Callable[[Any], bool]
_RUNS = 64  # executions spent on zeros


def smallest(batch: Any, fails: Fails) -> Any:
    """A batch of one sample that still fails, if one does, with as much of it zero as a few dozen executions find.

    Parameters
    ----------
    batch : Any
        Fails. Samples lie along the first axis, where all tensors agree on its length.
    fails : callable
        Tells whether a batch shows the failure.
    """
    alone = _one_sample(batch, fails)
    return _zeroed(batch if alone is None else alone, fails)


def _one_sample(batch: Any, fails: Fails) -> Any:
    lengths = {t.shape[0] if t.dim() else 0 for t in tree_leaves(batch) if isinstance(t, Tensor)}
    if len(lengths) != 1:
        return None
    for i in range(*lengths) if 1 not in lengths else ():
        sample = _sample(batch, i)
        if _tried(sample, fails):
            return sample
    return None


def _sample(batch: Any, i: int) -> Any:
    return tree_map_only(Tensor, lambda t: t[i : i + 1].clone(), batch)


def _zeroed(batch: Any, fails: Fails) -> Any:
    """Make blocks of the floating-point tensors zero, large blocks first, as long as the failure stays."""
    batch = tree_map_only(Tensor, torch.clone, batch)
    runs = 0
    for t in tree_leaves(batch):
        if not isinstance(t, Tensor) or not t.is_floating_point():
            continue
        flat = t.view(-1) if t.is_contiguous() else None
        size = t.numel()
        while flat is not None and size > 1 and runs < _RUNS:
            size = (size + 1) // 2
            for start in range(0, t.numel(), size):
                block = flat[start : start + size]
                if runs >= _RUNS or not block.any():
                    continue
                before = block.clone()
                block.zero_()
                runs += 1
                if not _tried(batch, fails):
                    block.copy_(before)
    return batch


def _tried(batch: Any, fails: Fails) -> bool:
    try:
        return fails(batch)
    except Exception:  # a model that takes no single sample, say
        return False


def save(batch: Any, path: str | PathLike[str]) -> None:
    """Write tensors so that ``torch.load(path, weights_only=True)`` reads them."""
    held = io.BytesIO()
    torch.save(tree_map_only(Tensor, lambda t: t.detach().cpu(), batch), held)
    write_atomically(Path(path), held.getvalue())
