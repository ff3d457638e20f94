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
import torch.utils.checkpoint
from torch import Tensor
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


def checkpoint_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """What sees the tensors that autograd saves now, if that is a checkpoint that is not reentrant, in its first run or another."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None and getattr(hooks[0], "__module__", "") in _HOOKED_BY else None


_HOOKED_BY = (torch.utils.checkpoint.__name__, __name__)  # modules of such hooks: torch's, and `_KeptUnchanged` around them


class _KeptUnchanged(torch.autograd.graph.saved_tensors_hooks):
    """See `keep_unchanged`."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self.kept: list[tuple[Tensor, int]] = []
        self.pack = pack
        super().__init__(self.note, unpack)

    def note(self, t: Tensor) -> Any:
        self.kept.append((t, t._version))
        return self.pack(t)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        kept, self.kept = self.kept, []
        if any(t._version != version for t, version in kept):
            raise RuntimeError(
                "QuantSim: what runs under a checkpoint changes a tensor in place that an operation before needs for its gradient. The "
                "backward pass computes that tensor again, with the change, and torch does not notice: gradients would be wrong. Write "
                "y = y + 1 there instead of y += 1, or do it outside the checkpoint."
            )


def keep_unchanged() -> _KeptUnchanged | None:
    """Enters what raises at its exit if anything that autograd saved within was written to since. None where that need not be asked: it is
    while a checkpoint computes again what it did not keep.

    A float model gets away with that where nothing behind the change is kept, as torch stops before it. Quantizers keep something.
    """
    hooks = checkpoint_hooks() if torch.is_grad_enabled() else None
    if hooks is None or not hooks[0].__qualname__.startswith("_recomputation_hook."):
        return None
    kept = _KeptUnchanged(*hooks)
    kept.__enter__()
    return kept


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
    if (held := _held_function(checkpoint)) is None:
        return
    holder, name = held
    function = getattr(holder, name)
    if not isinstance(function, Recomputed):
        setattr(holder, name, Recomputed(function, again()))


def _held_function(checkpoint: FrameType) -> tuple[Any, str] | None:
    """Where torch keeps the function that it computes again: an object that belongs to this call of the checkpoint, and the attribute.

    None while the function does not run yet: torch asks its arguments before, which function modes see (`requires_grad`, `device`).
    """
    known = checkpoint.f_locals
    if "ctx" in known:  # reentrant: CheckpointFunction.forward
        if hasattr(known["ctx"], "run_function"):
            return known["ctx"], "run_function"
        if not vars(known["ctx"]):
            return None
    generator = known.get("gen")
    inner = inspect.getgeneratorlocals(generator).get("new_frame") if inspect.isgenerator(generator) else None
    if hasattr(inner, "recompute_fn"):
        return inner, "recompute_fn"
    if inspect.isgenerator(generator) and generator.gi_running:
        return None
    raise RuntimeError(
        f"qsim: torch {torch.__version__} keeps elsewhere what torch.utils.checkpoint computes again ({checkpoint.f_code.co_name}): leaves "
        "and methods under a checkpoint cannot be simulated. Checkpoint modules with a forward of their own instead."
    )
