"""Notes that are more than notes, and those on what of a model cannot be seen."""

from __future__ import annotations

import torch
from torch import nn


class Telling(str):
    """A sentence on what changes a number and was not asked for: a report lists it like any other, and it is warned of once.

    Examples
    --------
    >>> [note for note in ("a", Telling("b")) if isinstance(note, Telling)]
    ['b']
    """


def blind_spots(model: nn.Module) -> list[str]:
    """A sentence for each module whose operations cannot be seen, or not as its own."""
    scripted = [path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    replaced = [path for path, m in model.named_modules() if "forward" in vars(m) and path not in scripted]
    tops = [p for p in scripted if not any(p.startswith(f"{other}.") or other == "" for other in scripted if other != p)]
    seen: list[str] = [Telling(f"'{path}' is a scripted module: its operations are not seen") for path in tops]
    return seen + [f"'{path}' has a forward set on the instance: its operations are counted as its caller's" for path in replaced]
