"""Batches of data: how they are iterated over, and which arguments of a model they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from qsim.options import check_function, check_whole
from qsim.progress import progress
from qsim.runs.arguments import Arguments, are_numbers, is_array, refuse_numbers

Forward = Callable[[nn.Module, Any], Any]

_NESTS = (tuple, list, Mapping)
_TARGETS = "label", "target", "start_positions", "end_positions"  # in the names of what Hugging Face's models compute losses with


def iterate(data: Iterable[Any], max_batches: int | None, show: bool, caller: str) -> Iterator[Any]:
    """The batches of `data`, with a progress bar where tqdm is installed. `caller`: who wants them, for errors: "QuantSim.calibrate"."""
    if isinstance(data, (Tensor, Mapping, str)) or is_array(data) or not isinstance(data, Iterable):
        raise TypeError(
            f"{caller}: got data of type {type(data).__name__}; expected an iterable of batches, such as a DataLoader or a list: [batch]"
        )
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data) and len({part.ndim for part in data}) > 1:
        shapes = " and ".join(str(tuple(part.shape)) for part in data[:2])
        raise TypeError(
            f"{caller}: got a tuple of tensors of the shapes {shapes} as data, which looks like a batch; expected an iterable of batches: "
            "[batch]"
        )
    if max_batches is not None:
        check_whole(caller, "max_batches", max_batches, least=1, otherwise="None for all")
    return _batches(data, max_batches, show, caller)


def _batches(data: Iterable[Any], max_batches: int | None, show: bool, title: str) -> Iterator[Any]:
    length = len(data) if isinstance(data, Sized) else None
    total = max_batches if length is None else min(length, max_batches or length)
    # islice only now: a DataLoader draws random numbers when its iteration begins
    yield from progress(islice(data, max_batches), total=total, title=title.rpartition(".")[2], unit="batch", show=show)


def arguments_of(batch: Any, examples: Sequence[Arguments]) -> Arguments:
    """The model's arguments out of a batch as a DataLoader gives it: those of the example that takes most of it.

    Parameters
    ----------
    batch : Tensor, tuple, list or dict
        A dict gives the keyword arguments that the example has. A sequence fills as many arguments as the example has, and what is
        left (targets) is ignored; when its first entry is a sequence or dict where the example has a tensor, that entry holds the
        inputs: ``((image, depth), target)``.
    examples : sequence of (tuple, dict)
        Arguments of the example calls; what the tensors are does not matter.
    """
    found, refused = [], []
    for example in examples:
        try:
            found.append((_arguments_as(batch, example), example))
        except ValueError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    (args, kwargs), (args_then, kwargs_then) = max(found, key=lambda pair: len(pair[0][0]) + len(pair[0][1]))
    for given, then in (*zip(args, args_then, strict=False), *((kwargs[name], kwargs_then[name]) for name in kwargs)):
        if not any(map(_is_number, tree_leaves(then))):
            refuse_numbers(batch if _is_number(given) and are_numbers(batch) else given, "QuantSim", "a batch")
    return args, kwargs


def _is_number(entry: Any) -> bool:
    return is_array(entry) or (isinstance(entry, (int, float)) and not isinstance(entry, bool))


def _arguments_as(batch: Any, example: Arguments) -> Arguments:
    args, kwargs = example
    if isinstance(batch, Mapping):
        if args:
            raise _unfit(f"a dict with {', '.join(map(repr, batch))}", f"{len(args)} positional")
        if missing := [name for name in kwargs if name not in batch]:
            raise _unfit(f"a dict without {', '.join(map(repr, missing))}", "keyword")
        return (), {name: batch[name] for name in kwargs}
    values = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    wanted = list(args) or list(kwargs.values())
    if values and wanted and isinstance(values[0], _NESTS) and not isinstance(wanted[0], _NESTS):
        return _arguments_as(values[0], example)
    if len(values) < len(wanted):
        raise _unfit(f"{len(values)} values", f"{len(wanted)}")
    return (values[: len(args)], {}) if args else ((), dict(zip(kwargs, values, strict=False)))


def left_out(batch: Any, kwargs: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Names in a batch that forward takes and no example gave, so that they are not among the arguments. Not what a loss alone reads."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(inputs, Mapping) or not kwargs or inputs.keys() <= kwargs.keys():
        return []
    taken = inspect.signature(model.forward).parameters
    given = [name for name, value in inputs.items() if value is not None and name in taken and name not in kwargs]
    return [name for name in given if not any(part in name for part in _TARGETS)]


def _unfit(got: str, wanted: str) -> ValueError:
    return ValueError(f"QuantSim: got a batch of {got}, and example_inputs had {wanted} arguments; pass forward=lambda model, batch: ...")


def calls_made(model: nn.Module, data: Iterable[Any], forward: Forward) -> Iterator[Arguments]:
    """The arguments of every call of `model` while ``forward(model, batch)`` runs, batch by batch, without gradients."""
    check_function("qsim", "forward", forward, "forward(model, batch)")
    made: list[Arguments] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made.append((args, kwargs))

    for batch in data:
        made.clear()
        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with torch.no_grad():
                forward(model, batch)
        finally:
            handle.remove()
        yield from tuple(made)


def to_device(arguments: Arguments, model: nn.Module) -> Arguments:
    """Arguments on the device of the model's first parameter or buffer, as DataLoaders leave them on the CPU.

    Where one of them lies there already somebody placed them: lengths of sequences, say, belong on the CPU.
    """
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is None:
        return arguments
    device = first.device
    if device.type == "meta":
        raise ValueError(
            "QuantSim: the model lies on the meta device and has no values to compute with; load it first: model.to_empty(device='cpu'), "
            "then its checkpoint"
        )
    if any(isinstance(value, Tensor) and value.device == device for value in tree_leaves(arguments)):
        return arguments
    moved: Arguments = tree_map_only(Tensor, lambda value: value.to(device), arguments)
    return moved


def as_batch(call: Arguments) -> Any:
    """A call as a batch that stands for it."""
    args, kwargs = call
    if args and kwargs:
        raise ValueError(
            "QuantSim.export: forward calls the model with positional and keyword arguments; expected one kind, as example_inputs"
        )
    return kwargs or args
