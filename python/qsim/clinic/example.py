"""The example inputs that a model is recorded with, out of a batch of its data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from qsim.batch_norm.recorded import returned_none
from qsim.graph.record.own_arguments import own_arguments
from qsim.runs.arguments import Arguments, refuse_numbers
from qsim.runs.batches import Forward, to_device
from qsim.runs.runnable import refuse_packed
from qsim.runs.snapshot import unchanged

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def example_of(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """What the model is called with for a batch: a tuple of arguments or a dict of keyword arguments.

    With `forward`, what that calls the model with first. Otherwise the batch fills as many arguments as the model's forward takes; if the
    model does not run on these, fewer, so that targets are left out; if the first entry is a tuple, list or dict, that may hold them all.

    Raises
    ------
    ValueError
        If the model runs on none of these.
    """
    if forward is not None:
        return _called_with(model, batch, forward)
    errors = []
    values = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, list) else [batch]
    refuse_packed([((value,), {}) for value in values], "qsim.doctor")
    for args, kwargs in _candidates(model, batch):
        given = to_device((args, kwargs), model)
        try:
            with unchanged(model), torch.no_grad():
                copies, _ = own_arguments(model, given)  # it may write into them
                found = model.eval()(*copies[0], **copies[1])
        except Exception as e:
            errors.append(f"with {len(args)} arguments{' and ' + ', '.join(kwargs) if kwargs else ''}: {type(e).__name__}: {e}")
        else:
            if found is None:
                raise returned_none("qsim.doctor")
            return given[1] if given[1] else given[0]
    refuse_numbers(batch, "qsim.doctor", "the first batch")
    tried = "\n  ".join(errors)
    raise ValueError(f"qsim.doctor: the model does not run on the first batch; pass forward=lambda model, batch: ...\n  {tried}")


def _candidates(model: nn.Module, batch: Any) -> Iterator[Arguments]:
    parameters = list(inspect.signature(model.forward).parameters.values())
    if isinstance(batch, Mapping):
        taken = {p.name for p in parameters}
        everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        yield (), {name: value for name, value in batch.items() if everything or name in taken}
        return
    values = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = sum(p.default is inspect.Parameter.empty for p in positional)
    most = len(values) if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters) else min(len(values), len(positional))
    for count in range(most, min(required, most) - 1, -1):
        yield values[:count], {}
    if values and isinstance(values[0], (tuple, list, Mapping)):
        yield from _candidates(model, values[0])


def _called_with(model: nn.Module, batch: Any, forward: Forward) -> Any:
    found: list[Arguments] = []
    with unchanged(model), torch.no_grad():
        hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: found.append(own_arguments(model, (args, kwargs))[0]), with_kwargs=True
        )
        try:
            forward(model.eval(), own_arguments(model, batch)[0])
        finally:
            hook.remove()
    if not found:
        raise ValueError("qsim.doctor: forward(model, batch) did not call the model")
    args, kwargs = found[0]
    if args and kwargs:
        names = list(inspect.signature(model.forward).parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}
    return kwargs or args
