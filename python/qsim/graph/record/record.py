"""Record: run the model once in eval and once in training and note every operation with where its operands came from."""

from __future__ import annotations

import types
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from qsim.graph.record.asked_classes import lost_classes
from qsim.graph.record.handing_on import lost_sight
from qsim.graph.record.own_arguments import own_arguments
from qsim.graph.record.recorder import RecordedRun, recording
from qsim.graph.record.subclasses import lost_functions
from qsim.graph.record.tape import Step, Tape
from qsim.graph.record.telling import Telling, blind_spots
from qsim.graph.record.written_state import Held
from qsim.runs.arguments import Arguments, tensors_in
from qsim.runs.held import HeldValues
from qsim.runs.snapshot import ContentsLostError, plain_eager, unchanged


def record(model: nn.Module, examples: Sequence[Arguments]) -> tuple[Tape, list[str]]:
    """Run `model` on copies of example calls, each in eval and in training mode, without gradients, and leave it as it was.

    Returns
    -------
    tape : Tape
        All passes. A pass that raised is not in it.
    report : list of str
        One sentence for each thing that could not be seen.

    Raises
    ------
    ValueError
        If a lazy module has not got its parameters yet.
    ContentsLostError
        If the model writes to its parameters, and they are too many to be copied.
    """
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(t):
            raise ValueError(f"'{name}' has no shape yet: run the model once on the example inputs; lazy modules get their parameters so")
    tape, report, parameters = Tape(model), blind_spots(model), dict(model.named_parameters())
    for number, given in enumerate(examples):
        for run, mode in enumerate(("eval", "training")):
            current = RecordedRun(tape, run, number, parameters)
            error = _tried(model, current, given, report)
            if error is not None and not tape.needs_gradients and _NO_GRADIENT in str(error):  # forces are gradients of an energy
                tape.needs_gradients = True
                error = _tried(model, current, given, report)
            if error is not None:
                if mode == "eval":
                    tape.raised[number] = error
                which = f" with example call {number}" if len(examples) > 1 else ""
                report.append(f"the model could not be recorded in {mode} mode{which}: {type(error).__name__}: {error}")
            tape.forget_tensors()
    _forget_onlookers(tape)
    if not tape.raised:
        report += [*lost_functions(model, examples, tape), *lost_classes(model, examples, tape)]
    report += [Telling(f"the result of '{name}' is not dense (sparse, or of another layout): it stays in float") for name in tape.unusual]
    report += [_ESTIMATED] if tape.differentiates else []
    return tape, list(dict.fromkeys(report))


_ESTIMATED = Telling(
    "the model computes gradients in its forward (torch.autograd.grad): they go straight through quantizers, and are zero where these "
    "clip, so that what is made of them is an estimate"
)


_NO_GRADIENT = "does not require grad"  # what torch says where somebody asks for gradients, and none are recorded


def _tried(model: nn.Module, current: RecordedRun, given: Arguments, report: list[str]) -> Exception | None:
    """What a pass raised, which is not on the tape then."""
    tape = current.tape
    before = len(tape.calls), len(tape.steps), set(tape.results), set(tape.reads)
    try:
        _run(model, current, given, report)
    except ContentsLostError:
        raise
    except Exception as error:
        del tape.calls[before[0] :], tape.steps[before[1] :]
        tape.results, tape.reads = before[2:]
        current.began, current.entered = False, []
        return error
    return None


def _run(model: nn.Module, current: RecordedRun, given: Arguments, report: list[str]) -> None:
    tape = current.tape
    with plain_eager(), unchanged(model, whole=False), recording(model, current, report), torch.set_grad_enabled(tape.needs_gradients):
        held = Held(model)
        (args, kwargs), shared = own_arguments(model, given)
        report += [f"an argument of type {name} cannot be copied: what the model writes into it stays there" for name in shared]
        around = HeldValues((args, kwargs), {id(m) for m in model.modules()})
        out = model.train(current.run == 1)(*args, **kwargs)
        tape.answers |= {type(out)} if current.run == 0 else set()
        returned = {o for t in tensors_in(list(out) if isinstance(out, types.GeneratorType) else out) for o in tape.origins(t)}
        tape.results |= returned | (current.handed_out if lost_sight(tape, returned) else set())
        tape.handed_back |= {o for t in tensors_in((args, kwargs)) for o in tape.origins(t) if isinstance(o.source, Step)}
        tape.refills |= around.is_changed()
        tape.written_into |= {entered.slot for entered in current.entered if entered.is_written()}
        kept = [value for m in model.modules() for name, value in vars(m).items() if not name.startswith("_")]
        tape.reads |= {o for t in tensors_in(kept) for o in tape.origins(t) if isinstance(o.source, Step)}
        for name, origins in held.written(model, tape).items():
            tape.written[name] = tape.written.get(name, frozenset()) | origins
            if current.run != 1:  # statistics of training are no state that the network reads
                tape.reads |= {o for o in origins if isinstance(o.source, Step)}


def _forget_onlookers(tape: Tape) -> None:
    """Take off the tape what hooks compute for themselves: a log of means is not of the model, nor does it read its tensors."""
    wanted: set[Step] = set()
    left = [step for step in tape.steps if not step.hook] + [o.source for o in tape.results if isinstance(o.source, Step)]
    while left:
        step = left.pop()
        if step not in wanted:
            wanted.add(step)
            left += [o.source for o in {*step.side, *(o for found in step.operands.values() for o in found)} if isinstance(o.source, Step)]
    tape.keep(wanted)
