"""What all containers of one simulation share: whether they simulate, and what they noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from qsim.graph.execute.standing import Standing
from qsim.graph.record.containers import ParameterOf
from qsim.graph.record.own_arguments import Given, own_arguments
from qsim.graph.record.tape import InputSlot, Tape
from qsim.runs.arguments import Arguments
from qsim.runs.batches import arguments_of, left_out, to_device
from qsim.warning import warn

_EXAMPLE = "Give the call as an example too: QuantSim(model, [example, other], ...)."
_SHOWN = 5  # so many sentences are in one warning; all of them are in the summary


class Switch:
    """Shared by all containers of one simulation. Off: they run as they were written, without any function mode.

    Attributes
    ----------
    on, saves, marks, falls_back : bool
        See `turned`; `saves`: whether work is saved that changes no bit of a result.
    mode, traced_mode : callable
        What containers run under, eager and while Dynamo traces.
    standing : Standing
        What Dynamo reaches quantizers by.
    calls_alone : bool
        Whether layers were called by themselves.
    calls_compiled : bool
        Whether the model calls functions that it has compiled itself.
    needs_gradients : bool
        Whether the model asks for gradients in its forward.
    written : frozenset of InputSlot
        What the model writes into, of what its caller passes.
    refills : bool
        Whether it puts something else into a list, dict or object of its caller's.
    model : nn.Module or None
    noticed : dict of str to (str, str)
        What ran otherwise than the example inputs showed: sentences, with the path of the container and the function whose result is
        in float for that ("": none is).
    released : mapping of str to str
        Keys of quantizers in whose place all that use them compute in a float format, with that format.
    refused : set of str
        Keys of quantizers that did not quantize what they stand at, because that was not what the example inputs showed there.
    """

    def __init__(self, mode: Callable[..., TorchFunctionMode], traced_mode: Callable[..., TorchFunctionMode]) -> None:
        self.on = True
        self.saves = True
        self.marks = False
        self.falls_back = True
        self.calls_alone = self.calls_compiled = self.needs_gradients = self.refills = False
        self.written: frozenset[InputSlot] = frozenset()
        self.mode, self.traced_mode = mode, traced_mode
        self.standing = Standing()
        self.model: nn.Module | None = None
        self._parameters: dict[int, str] = {}
        self.noticed: dict[str, tuple[str, str]] = {}
        self.released: Mapping[str, str] = {}
        self.refused: set[str] = set()
        self.unsaid: dict[str, str] = {}  # sentences, with what to do
        self._told_of_break = False

    @contextlib.contextmanager
    def turned(self, on: bool, *, marks: bool = False, falls_back: bool = True) -> Iterator[None]:
        """Within the context the switch is `on`, with marks (`qsim.graph.execute.marks`) in the places of all quantizers if `marks`;
        operations fall back if `falls_back`."""
        was = self.on, self.marks, self.falls_back
        self.on, self.marks, self.falls_back = on, marks, falls_back
        try:
            yield
        finally:
            self.on, self.marks, self.falls_back = was

    def format_of(self, key: str) -> str | None:
        """The format in place of a quantizer's grid; None where it quantizes."""
        return self.released.get(key) if self.falls_back else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_parameters": {}}  # by ids, which are not those of copies

    def parameter_name(self, parameter: nn.Parameter) -> str:
        """The name of a parameter, "" if the model has no such parameter."""
        named = dict(self.model.named_parameters()) if self.model is not None and id(parameter) not in self._parameters else {}
        self._parameters.update((id(p), name) for name, p in named.items())
        name = self._parameters.setdefault(id(parameter), "")
        if name and self.model is not None and ParameterOf(name)(self.model) is not parameter:
            self._parameters.clear()  # some were replaced
            return self.parameter_name(parameter)
        return name

    def notice(self, sentence: str, path: str, function: str, advice: str = _EXAMPLE, *, first: bool = False) -> None:
        """Note what a person should know, once, and may do about it; `first` of what was noticed in a call."""
        if sentence not in self.noticed:
            self.noticed[sentence] = path, function
            if not self.marks:
                self.unsaid = {sentence: advice, **self.unsaid} if first else {**self.unsaid, sentence: advice}

    def note(self, tape: Tape) -> None:
        """Note what is asked of the recording in each call."""
        self.calls_compiled, self.needs_gradients = tape.calls_compiled, tape.needs_gradients
        self.written, self.refills = frozenset(tape.written_into), tape.refills

    def arguments(self, model: nn.Module, batch: Any, examples: Sequence[Arguments]) -> Arguments:
        """What a model gets of a batch: copies where it writes into them, so that another run gets the same."""
        given = to_device(arguments_of(batch, examples), model)
        if self.model is not None and (names := left_out(batch, given[1], self.model)):
            what = f"batches hold {', '.join(map(repr, names))}, which forward takes and no example with the rest of them had: left out"
            self.notice(what, "", "", "Give example inputs that have them, or pass forward=lambda model, batch: model(**batch).")
        return self.own(model, given)

    def own(self, model: nn.Module, given: Given) -> Given:
        """Arguments or a batch for one run alone: copies if the model writes into what it is given."""
        return own_arguments(model, given)[0] if self.written or self.refills else given

    def tell_of_break(self, path: str) -> None:
        """Warn, once, that a container was to be compiled and is not."""
        if not self._told_of_break:
            self._told_of_break = True
            what = f"'{path}'" if path else "the model"
            warn(
                f"QuantSim: {what} runs in Python with every quantizer, not compiled: torch.compile would break its graph, and compiles a "
                "simulated module whole or not at all. torch.compile(..., fullgraph=True) says where it breaks"
            )

    def say(self) -> None:
        """Warn of what was noticed since the last time."""
        unsaid, self.unsaid = self.unsaid, {}
        if unsaid:
            more = f" (and {len(unsaid) - _SHOWN} more: see sim.summary().notes)" if len(unsaid) > _SHOWN else ""
            advice = " ".join(dict.fromkeys(unsaid.values()))
            warn(f"QuantSim: {'; '.join([*unsaid][:_SHOWN])}{more}. {advice}")
