"""What layers read while the model runs on data: the size of each input channel, and some of the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qsim.equalization.channels import rows
from qsim.graph.record.own_arguments import own_arguments
from qsim.operations.layers import LAYERS, channel_axis
from qsim.runs.arguments import Arguments, tensors_in
from qsim.runs.random_numbers import seed_random_numbers
from qsim.runs.snapshot import unchanged
from qsim.runs.unfit import unfit_told

_ROWS = 512  # that a search compares outputs on


@dataclass
class InputStatistics:
    """Of each layer by path, for its input channels.

    Attributes
    ----------
    largest, mean : dict of str to Tensor, float64 [input channels]
        Of the magnitudes.
    rows : dict of str to Tensor, [at most 512, input channels]
        Some of the inputs, evenly taken.
    """

    largest: dict[str, Tensor] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


def observe(model: nn.Module, readers: Iterable[str], calls: Sequence[Arguments]) -> InputStatistics:
    """Run the model in eval mode on calls and look at what the readers get."""
    inputs, counts = InputStatistics(), dict[str, int]()
    share = max(1, _ROWS // len(calls))

    def watch(path: str, module: nn.Module) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            assert isinstance(module, LAYERS)
            values = rows(x, channel_axis(module))
            size, count = values.abs().cpu().double(), counts.get(path, 0)
            before = inputs.largest.get(path, torch.zeros(len(size), dtype=torch.float64))
            mean = inputs.mean.get(path, torch.zeros(len(size), dtype=torch.float64))
            counts[path] = count + size.shape[1]
            inputs.largest[path] = torch.maximum(before, size.amax(1))
            inputs.mean[path] = mean + (size.mean(1) - mean) * (size.shape[1] / counts[path])
            some = values[:, :: max(1, values.shape[1] // share)][:, :share].T
            inputs.rows[path] = torch.cat([inputs.rows[path], some]) if path in inputs.rows else some.clone()

        undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    with ExitStack() as undo:
        for path in readers:
            watch(path, model.get_submodule(path))
        results(model, calls)
    return inputs


def results(model: nn.Module, calls: Sequence[Arguments], examples: Sequence[Arguments] = ()) -> list[Tensor]:
    """The tensors that the model returns in eval mode, with the same random numbers in every run; the model stays as it is. A call that
    is not as `examples`, and that the model does not take, is told of."""
    found = []
    with unchanged(model), torch.no_grad():
        model.eval()
        seed_random_numbers(0)
        for args, kwargs in calls:
            args, kwargs = own_arguments(model, (args, kwargs))[0]
            with unfit_told((args, kwargs), lambda: examples, model) if examples else nullcontext():
                returned = model(*args, **kwargs)
            found += [t.clone().cpu() for t in tensors_in(returned)]  # a model may return its own
    return found
