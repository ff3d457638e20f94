"""A model recorded on its example inputs, or a sentence that says why it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qsim.graph.record.record import record
from qsim.graph.record.tape import Tape
from qsim.runs.arguments import Arguments, example_calls, is_dense
from qsim.runs.runnable import call_text, cannot_run, check_module, refuse_packed

Recording = tuple[Tape, list[str]]  # and what could not be seen, as sentences


def recorded(model: nn.Module, example_inputs: Any, caller: str, *, empty: bool = False) -> Recording:
    """The recording of a model on its example inputs, and what could not be seen. `empty`: inputs without elements will do.

    Raises
    ------
    TypeError
        It is no module, returns None, or takes a packed sequence.
    ValueError
        It does not run in eval mode, or all that it is given is empty.
    """
    check_module(model, caller)
    calls = example_calls(example_inputs)
    refuse_packed(calls, caller)
    if not empty:
        _refuse_empty(calls, caller)
    tape, problems = record(model, calls)
    if tape.answers == {type(None)}:
        raise returned_none(caller)
    for number, error in tape.raised.items():
        raise cannot_run(model, calls, number, error, caller) from error
    if not any(call.run == 0 for call in tape.calls):
        raise ValueError(f"{caller}: {problems[0] if problems else 'the model has no forward in Python to look at'}")
    return tape, problems


def returned_none(caller: str) -> TypeError:
    """The error for a model without a result."""
    return TypeError(f"{caller}: the model returned None for the example inputs; expected tensors. Does its forward end without `return`?")


def _refuse_empty(calls: Sequence[Arguments], caller: str) -> None:
    """Raise a ValueError where no tensor of a call has elements: nothing would be seen to run."""
    for call in calls:
        given = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and is_dense(leaf)]
        if given and not any(t.numel() for t in given):
            raise ValueError(
                f"{caller}: example inputs without elements ({call_text(call)}) show nothing of the model; give at least one sample"
            )
