"""Batches that a model does not run on: what was got, what was expected, and which layer refused it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qsim.runs.arguments import Arguments, is_dense
from qsim.runs.runnable import call_text, hints, shortened

_OF_DATA = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError)  # these themselves: others mean more


class UnfitBatchError(ValueError, RuntimeError):
    """The model does not run on a batch that is not as the example inputs were. Its cause is what the model raised, mostly a RuntimeError,
    which whoever caught it goes on catching."""

    def numbered(self, caller: str, number: int) -> UnfitBatchError:
        """The same of one batch among others: which one, and what became of what those before it showed."""
        before = f"What the {number} before it showed is kept, and nothing of this one" if number else "Nothing was noted of it"
        kept = f"{before}: calibrate with batches that the model takes"
        text = str(self).replace("QuantSim: the model does not run on the batch", f"{caller}: the model does not run on batch {number}", 1)
        return UnfitBatchError(f"{text}. {kept}")


@contextlib.contextmanager
def unfit_told(call: Arguments, examples: Callable[[], Sequence[Arguments]], model: nn.Module) -> Iterator[None]:
    """Within the context the model runs on `call`; an error of a call that is not as the examples is told in our words. They are asked for
    only where there is one."""
    try:
        yield
    except Exception as error:
        found = unfit(error, call, examples(), model)
        if found is None:
            raise
        raise found from error


def unfit(error: Exception, call: Arguments, examples: Sequence[Arguments], model: nn.Module) -> UnfitBatchError | None:
    """The error in place of what `model` raised on `call`; None where the call is as an example was: the model has its own reasons.

    Parameters
    ----------
    error : Exception
    call : (tuple, dict)
    examples : sequence of (tuple, dict)
        With their tensors.
    model : nn.Module
    """
    kind = signature(call)
    if type(error) not in _OF_DATA or any(kind == signature(example) for example in examples):
        return None
    expected = " or ".join(dict.fromkeys(call_text(example) for example in examples))
    layer = _layer(error.__traceback__, model)
    where = f"in '{layer}' ({type(model.get_submodule(layer)).__name__}) " if layer else ""
    advice = list(dict.fromkeys(hint for value in (*call[0], *call[1].values()) for hint in hints(value, model)))
    if _ranks(call) and any(_ranks(call) == [rank - 1 for rank in _ranks(example)] for example in examples):
        advice.append("It lacks the dimension of the batch: give a DataLoader's batches, or x[None]")
    text = f"QuantSim: the model does not run on the batch: {call_text(call)}; the example inputs had {expected}"
    raised = f"What it raised {where}is {type(error).__name__}: {shortened(error)}"
    return UnfitBatchError(". ".join([text, *advice, raised]))  # advice before what torch says, which may be long


def _ranks(call: Arguments) -> list[int]:
    return [leaf.ndim for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]


def signature(values: Any) -> tuple[Any, ...]:
    """What tells batches apart that a model may take differently: shapes and dtypes of tensors, types of the rest."""
    return tuple(_kind(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(values))


def _kind(t: Tensor) -> tuple[Any, ...]:
    return (t.shape if is_dense(t) else t.layout, t.dtype)  # a nested tensor may have no shape


def _layer(trace: TracebackType | None, model: nn.Module) -> str:
    """The innermost module of `model` that was running."""
    paths = {module: path for path, module in model.named_modules()}
    found = ""
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            found = paths.get(module, found)
        trace = trace.tb_next
    return found
