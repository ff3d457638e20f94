"""Notes that are more than notes, and those on what of a model cannot be seen."""

from __future__ import annotations

import torch
from torch import nn

from qsim.folders import TORCH


class Telling(str):
    """A sentence on what changes a number and was not asked for: a report lists it like any other, and it is warned of once.

    Examples
    --------
    >>> [note for note in ("a", Telling("b")) if isinstance(note, Telling)]
    ['b']
    """


_OWN_CALL = Telling(
    "the model's class has a __call__ of its own: what that computes around forward is in float, and its weights are. Do it in forward, or "
    "in a module that has this model as a part"
)


def _has_own_call(cls: type[nn.Module]) -> bool:
    """Whether a class, not one of torch's, does something else than `nn.Module` when it is called."""
    codes = (getattr(getattr(cls, name), "__code__", None) for name in ("__call__", "_call_impl", "_wrapped_call_impl"))
    return any(code is not None and not code.co_filename.startswith(TORCH) for code in codes)


def blind_spots(model: nn.Module) -> list[str]:
    """A sentence for each module whose operations cannot be seen, or not as its own."""
    scripted = [path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    replaced = [path for path, m in model.named_modules() if "forward" in vars(m) and path not in scripted]
    tops = [p for p in scripted if not any(p.startswith(f"{other}.") or other == "" for other in scripted if other != p)]
    seen: list[str] = [_OWN_CALL] if _has_own_call(type(model)) else []
    seen += [Telling(f"'{path}' is a scripted module: its operations are not seen") for path in tops]
    return seen + [f"'{path}' has a forward set on the instance: its operations are counted as its caller's" for path in replaced]
