"""Looking at the calls of quantizers while a model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Before = Callable[[Any, tuple[Any, ...]], Any]
After = Callable[[Any, tuple[Any, ...], Any], None]


@contextlib.contextmanager
def hooked(quantizers: Iterable[nn.Module], before: Before | None = None, after: After | None = None) -> Iterator[None]:
    """Within the context each call of the quantizers is shown: its arguments before, and its arguments and result after it.

    What `before` returns takes the place of the arguments, unless that is None.
    """
    handles: list[RemovableHandle] = []
    for quantizer in quantizers:
        if before is not None:
            handles.append(quantizer.register_forward_pre_hook(before))
        if after is not None:
            handles.append(quantizer.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
