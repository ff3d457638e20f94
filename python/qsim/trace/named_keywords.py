"""Keywords of a call as `torch.export` takes sizes for them: by the names in the signature of forward."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterator
from inspect import Parameter
from typing import Any

from torch import nn


@contextlib.contextmanager
def named_keywords(model: nn.Module, given: Collection[str]) -> Iterator[None]:
    """Within the context the signature of forward names the keywords of a call that go into its ``**kwargs``: `torch.export` leaves nothing
    open of those that it does not name.

    Examples
    --------
    >>> class Scaled(nn.Module):
    ...     def forward(self, x, **options):
    ...         return x * options["by"]
    >>> model = Scaled()
    >>> with named_keywords(model, ["x", "by"]):
    ...     print(*inspect.signature(model.forward).parameters)
    x by options
    """
    own, signature = model.forward, inspect.signature(model.forward)
    parameters = list(signature.parameters.values())
    others = [name for name in given if name not in signature.parameters or signature.parameters[name].kind is Parameter.VAR_KEYWORD]
    if not others or parameters[-1].kind is not Parameter.VAR_KEYWORD or parameters[-1].name in others:
        yield
        return

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    named = [Parameter(name, Parameter.KEYWORD_ONLY) for name in others]
    forward.__signature__ = signature.replace(parameters=[*parameters[:-1], *named, parameters[-1]])  # type: ignore[attr-defined]
    before = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before
