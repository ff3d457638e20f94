"""What can be run: a module, on arguments that it takes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qsim.runs.arguments import Arguments, is_dense, refuse_numbers

_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "bitsandbytes.nn")
_LONGEST = 600  # characters of another's error message


def check_module(model: Any, caller: str) -> None:
    """Raise a TypeError unless `model` is a module: the message says what it is, and how to get the module.

    Examples
    --------
    >>> check_module(nn.ReLU, "QuantSim")
    Traceback (most recent call last):
    ...
    TypeError: QuantSim: got the class ReLU as model; expected a module: an instance of it, ReLU(...)
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{caller}: got a scripted model, whose operations cannot be seen; expected the Python module that it was made of")
    if isinstance(model, nn.Module):
        _refuse_lowered(model, caller)
        return
    if isinstance(model, type) and issubclass(model, nn.Module):
        got, cure = f"the class {model.__name__}", f"an instance of it, {model.__name__}(...)"
    elif isinstance(model, Mapping):
        state = any(isinstance(value, Tensor) for value in model.values())
        got, cure = ("a state dict" if state else f"a {type(model).__name__}"), "build the model, then model.load_state_dict(it)"
    elif isinstance(model, torch.export.ExportedProgram):
        got, cure = "an ExportedProgram", "the Python module that was exported"
    elif isinstance(model, (str, os.PathLike)):
        got, cure = f"the path {os.fspath(model)!r}", "load the model first; of an .onnx file, `qsim quantize` makes an integer one"
    elif isinstance(model, Tensor):
        got, cure = "a tensor", "it comes first, then its inputs"
    elif callable(model):
        got, cure = f"a {type(model).__name__}", "a function can be called in the forward of one"
    else:
        got, cure = "None" if model is None else f"a {type(model).__name__}", "an instance of torch.nn.Module"
    raise TypeError(f"{caller}: got {got} as model; expected a module: {cure}")


def _refuse_lowered(model: nn.Module, caller: str) -> None:
    """Raise a TypeError where layers are quantized already, or operations are those below torch's functions: nothing could stand there."""
    for path, module in model.named_modules():
        where = f"'{path}'" if path else "the model itself"
        if type(module).__module__.startswith(_QUANTIZED):
            kind = f"{type(module).__module__.split('.nn.')[0]}'s {type(module).__name__}"
            raise TypeError(f"{caller}: {where} is quantized already, {kind}, whose weights are no floats; expected the float model")
        if isinstance(module, torch.fx.GraphModule) and any(_is_lowered(node.target) for node in module.graph.nodes):
            raise TypeError(
                f"{caller}: {where} is a graph of torch.export or another compiler, whose operations lie below those that a simulation "
                "replaces; expected the Python module that it was made of"
            )


def _is_lowered(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def refuse_packed(calls: Sequence[Arguments], caller: str) -> None:
    """Raise a TypeError where an argument is a packed sequence, whose rows are of different times: no quantizer could stand there."""
    for args, kwargs in calls:
        for value in (*args, *kwargs.values()):
            if isinstance(value, PackedSequence):
                raise TypeError(
                    f"{caller}: got a PackedSequence among the example inputs; expected tensors: let forward take the padded batch and the "
                    "lengths, and call pack_padded_sequence itself"
                )


def cannot_run(model: nn.Module, calls: Sequence[Arguments], number: int, error: Exception, caller: str) -> ValueError:
    """The error for a model that does not run on an example call: what was given, what forward takes, what it said, and what to change."""
    args, kwargs = calls[number]
    for value in (*args, *kwargs.values()):
        refuse_numbers(value, caller, "an example input")
    advice = list(dict.fromkeys(hint for value in (*args, *kwargs.values()) for hint in hints(value, model)))
    if len(calls) > 1:
        advice.append("A list holds calls; of one call with several arguments make a tuple")
    if not advice and isinstance(error, TypeError) and len(args) > 1:
        advice.append("A tuple holds positional arguments: give those that forward takes, without targets")
    told = (
        f"the model does not run on {_which(calls, number)}: {call_text(calls[number])}",
        f"forward takes {_signature(model)}",
        *advice,  # before what torch says, which may be long
        f"It raised {type(error).__name__}: {shortened(error)}",
    )
    return ValueError(f"{caller}: {'. '.join(told)}")


def shortened(error: Exception) -> str:
    """What another's error says, on one line."""
    message = " ".join(str(error).split())
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."


def _which(calls: Sequence[Arguments], number: int) -> str:
    return "example_inputs" if len(calls) == 1 else f"call {number} of the {len(calls)} in example_inputs"


def call_text(call: Arguments) -> str:
    """The arguments of a call: shapes and dtypes of tensors, types of the rest.

    Examples
    --------
    >>> call_text(((torch.zeros(2, 3),), {"scale": 0.5}))
    'a float32 tensor of the shape (2, 3), scale=0.5'
    """
    args, kwargs = call
    return ", ".join([*map(_value_text, args), *(f"{name}={_value_text(value)}" for name, value in kwargs.items())]) or "no arguments"


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor) and not is_dense(value):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of the layout {value.layout}"
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{'an' if kind.startswith('int') else 'a'} {kind} tensor of the shape {tuple(value.shape)}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def _signature(model: nn.Module) -> str:
    try:
        return f"({', '.join(map(str, inspect.signature(model.forward).parameters.values()))})"
    except (TypeError, ValueError):
        return "what only it knows"


def first_float(model: nn.Module) -> Tensor | None:
    """The first parameter or buffer of a float type: where the model lies, and what it computes in."""
    return next((t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point()), None)


def hints(value: Any, model: nn.Module) -> Iterator[str]:
    """What to change about an argument that the model does not take."""
    if isinstance(value, torch.utils.data.DataLoader):
        yield "Give the inputs of one batch, such as next(iter(loader))[0]"
    elif value is None:
        yield "Give an input, such as torch.randn(1, 3, 224, 224)"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield "A tuple holds positional arguments, one each: of a shape make a tensor, torch.randn(shape)"
    elif isinstance(value, torch.utils.data.Dataset):
        yield "A data set is no batch: give one, such as next(iter(torch.utils.data.DataLoader(it, 8)))"
    elif isinstance(value, Iterator):
        yield f"A {type(value).__name__} is no batch: give one, such as next(it)"
    elif isinstance(value, (str, os.PathLike, set)) or callable(value):
        yield f"A {type(value).__name__} is no tensor: give what forward takes"
    first = first_float(model)
    if isinstance(value, Tensor) and first is not None:
        if value.device != first.device:
            yield f"The model lies on {first.device}, an input on {value.device}"
        if value.dtype != first.dtype and (value.is_floating_point() or value.dtype is torch.uint8):
            yield f"The model computes in {first.dtype}, an input is {value.dtype}: convert it, x.to({first.dtype})"
