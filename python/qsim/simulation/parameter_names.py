"""What models say of their parameters by name: a simulation has these parameters one name deeper, as its ``named_parameters`` lists them.

Optimizers ask for it: ``no_weight_decay`` of timm's, Swin's, MAE's and BEiT's models, and ``group_matcher`` of timm's, for a learning rate
by layer. Names that nothing matches are no error there: all parameters would decay, and learn at one rate.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

_CHILD = "model."


def named_deeper(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the model called `name`, which answers with names of parameters: as the simulation has them, too. Any other as it is.

    >>> sorted(named_deeper("no_weight_decay", lambda: {"pos_embed"})())
    ['model.pos_embed', 'pos_embed']
    """
    deeper = _DEEPER.get(name)
    if deeper is None:
        return method
    return functools.wraps(method)(lambda *args, **kwargs: deeper(method(*args, **kwargs)))


def _listed(names: Any) -> Any:
    return {*names, *(f"{_CHILD}{name}" for name in names)}


def _matched(matcher: Any) -> Any:
    """timm's ``group_matcher``: a function of a name, or patterns that names begin with, by group; some are pairs with a position."""
    if callable(matcher):
        return lambda name: matcher(name.removeprefix(_CHILD))
    return {group: _patterns(found) for group, found in matcher.items()}


def _patterns(found: Any) -> Any:
    if found is None:
        return None
    return [(_deeper_pattern(pattern), *rest) for pattern, *rest in found] if isinstance(found, (list, tuple)) else _deeper_pattern(found)


def _deeper_pattern(pattern: str) -> str:
    anchored = re.sub(r"(?<![\[\\])\^", "", pattern)  # what is matched from its beginning begins with the child's name
    return f"^(?:{re.escape(_CHILD)})?(?:{anchored})"


_DEEPER = {"no_weight_decay": _listed, "group_matcher": _matched}
