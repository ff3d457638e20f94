"""What runs of a forward after it has returned, under the mode that it ran under: the body of a generator, and what
`torch.utils.checkpoint` computes again for the backward pass.

Modules compute again as they did, each under a mode of its own; a leaf, a method or a lambda would compute in float.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def driven(generator: Generator[Any, Any, Any], mode: TorchFunctionMode) -> Generator[Any, Any, Any]:
    """The generator, with its body under `mode`."""
    given: Any = None
    while True:
        with mode:
            try:
                made = generator.send(given)
            except StopIteration as end:
                return end.value
        try:
            given = yield made
        except GeneratorExit:
            generator.close()
            raise
        except BaseException as error:
            with mode:
                made = generator.throw(error)
            given = yield made


class Recomputed:
    """In the place of a function under a checkpoint: runs it as the checkpoint does, under a mode.

    Parameters
    ----------
    function : callable
    mode : TorchFunctionMode
    """

    def __init__(self, function: Callable[..., Any], mode: TorchFunctionMode) -> None:
        self.function, self.mode = function, mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return self.function(*args, **kwargs)


def recompute_under(checkpoint: FrameType, again: Callable[[], TorchFunctionMode]) -> None:
    """Have what runs under a checkpoint run under a mode when the backward pass computes it again.

    Parameters
    ----------
    checkpoint : frame
        Of torch's function that runs what is under the checkpoint, as `CallSite.checkpoint`.
    again : callable
        Makes the mode; called once for each call of the checkpoint.

    Raises
    ------
    RuntimeError
        torch keeps elsewhere what it computes again.
    """
    if checkpoint.f_locals.get("use_reentrant"):  # the function is held by what this calls, `CheckpointFunction.forward`
        return
    holder, name = _held_function(checkpoint)
    function = getattr(holder, name)
    if not isinstance(function, Recomputed):
        setattr(holder, name, Recomputed(function, again()))


def _held_function(checkpoint: FrameType) -> tuple[Any, str]:
    """Where torch keeps the function that it computes again: an object that belongs to this call of the checkpoint, and the attribute."""
    known = checkpoint.f_locals
    if "ctx" in known and hasattr(known["ctx"], "run_function"):  # reentrant: CheckpointFunction.forward
        return known["ctx"], "run_function"
    generator = known.get("gen")
    inner = inspect.getgeneratorlocals(generator).get("new_frame") if inspect.isgenerator(generator) else None
    if hasattr(inner, "recompute_fn"):
        return inner, "recompute_fn"
    raise RuntimeError(
        f"qsim: torch {torch.__version__} keeps elsewhere what torch.utils.checkpoint computes again ({checkpoint.f_code.co_name}): leaves "
        "and methods under a checkpoint cannot be simulated. Checkpoint modules with a forward of their own instead."
    )
