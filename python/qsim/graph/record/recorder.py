"""The mode under which containers are recorded: every function that they call goes on the tape, with where its operands came from."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsim.graph.record.applied import called_by_apply
from qsim.graph.record.call_sites import LEAF, CallSite, call_site
from qsim.graph.record.containers import Swapped, containers, full_name, leaf_paths, subclass
from qsim.graph.record.handing_on import Given, handed_on, is_constant, is_mask, numbers_among, reads_constants
from qsim.graph.record.own_arguments import Entered
from qsim.graph.record.resume import driven
from qsim.graph.record.routes import call_key
from qsim.graph.record.stacked_weights import stacks_read
from qsim.graph.record.subclasses import as_dispatched, own_functions
from qsim.graph.record.tape import (
    Call,
    CallKey,
    Origin,
    Slot,
    Step,
    Tape,
    memory_of,
    options,
    tensors,
    version_of,
)
from qsim.operations.control_flow import CONTROL_FLOW, follows_values
from qsim.operations.functions import (
    COMPOSITE,
    CONSTRUCTORS,
    CONVERSIONS,
    LENDS,
    RANDOM,
    READS,
    SUMS_OF_RANKS,
    TRANSPARENT,
    Function,
    adds_nothing,
    adds_up,
    kind_of,
    name_of,
    route_name,
    visible,
)
from qsim.operations.half import has_inexact_numbers
from qsim.runs.arguments import is_dense, is_replaceable, paths_in


@dataclass
class RecordedRun:
    """One run of the model: 0 in eval mode, 1 in training mode."""

    tape: Tape
    run: int
    example: int
    parameters: dict[str, nn.Parameter]
    began: bool = False  # the root has been called
    handed_out: set[Origin] = field(default_factory=set)  # what other code was given as a whole
    entered: list[Entered] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedRun:
        """What a forward makes a copy of records here too: a copy of a tape's references to storages would free them twice."""
        return self


class _Made(NamedTuple):
    """A call of a function, and where it was made."""

    func: Function
    key: CallKey
    ordinal: int
    site: CallSite
    visible: bool


class Recorder(TorchFunctionMode):
    """Notes on the tape what one call of one container does."""

    def __init__(self, current: RecordedRun, path: str, training: bool, *, framed: bool = False) -> None:
        super().__init__()
        self.current, self.tape, self.call, self.framed = current, current.tape, Call(path, training, current.run), framed
        self.leaf = ""  # of the composite function that runs
        self.tape.calls.append(self.call)

    def frame(self, name: str) -> Recorder:
        """Records part of a composite function as a call of its own."""
        return Recorder(self.current, full_name(self.leaf or self.call.path, name), self.call.training, framed=True)

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if name in COMPOSITE and (name not in CONTROL_FLOW or follows_values()):
            self.leaf = self._key(call_site(sys._getframe(1)), func)[1]
            with self:
                return COMPOSITE[name](*args, **kwargs)
        if name in CONSTRUCTORS:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and name not in CONVERSIONS:
                self.tape.mark(_settled(out, name), Origin("random") if name in RANDOM else Origin("const"))
            return out
        with torch._C.DisableTorchFunction():
            if func is Tensor.view_as and called_by_apply(sys._getframe(1), "view_as"):  # an input that it returns, without gradients
                out = func(*args, **kwargs)
                self.tape.mark(out, *(o if o.is_unreplaced else replace(o, direct=False) for o in self.tape.origins(args[0])))
                return out
            made = self._made(func, call_site(sys._getframe(1)))
            given = dict(tensors(args, kwargs))
            if func is torch.autograd.grad:
                self.tape.differentiates = True
                given = {slot: t for slot, t in given.items() if not _is_differentiated(slot)}
            origins = {slot: self.tape.origins(t) for slot, t in given.items()}
            numbers = numbers_among(name, given, origins, self.tape.parameters)
            versions = {slot: version_of(t) for slot, t in given.items()}
            self.tape.subclasses.update(dict.fromkeys(own_functions(types)))
            out = as_dispatched(func, types)(*args, **kwargs)
            sums = name in SUMS_OF_RANKS
            changed = frozenset(slot for slot, t in given.items() if version_of(t) != versions[slot] or (sums and _is_first(slot)))
            for slot in changed:
                self.tape.rewrite(given[slot], origins[slot])
            call = Given(given, origins, changed, numbers)
            if sums:
                self._sum_of_ranks(made, call)
                return out
            if name in RANDOM:
                for t in _results(out):
                    self.tape.mark(t, Origin("random"))
                return out
            chosen = dict(options(args, kwargs))
            moves = (name in TRANSPARENT and not adds_up(name, chosen)) or (adds_nothing(name, chosen) and not changed)
            if moves or not any(t.is_floating_point() for t in _results(out)):
                is_data = any(o.kind not in ("const", "random") for found in origins.values() for o in found)
                if is_data and not moves and name not in ("complex", "polar") and any(t.is_complex() for t in _results(out)):
                    self.tape.complex[made.site.leaf_path or full_name(self.call.path, name)] = name
                out = self._flow(made, call, chosen, out)
            else:
                step = self._step(made, call, out)
                step.options = chosen
                step.scalar = all(t.dim() == 0 for t in _results(out))
                out = self._mark_results(step, given, out)
            return out

    def _made(self, func: Function, site: CallSite) -> _Made:
        """Count a call, whatever it computes: where one that does not matter is followed by one that does, as in a loop, order tells."""
        key = self._key(site, func)
        self.tape.calls_compiled = self.tape.calls_compiled or site.compiled
        self.tape.asking |= site.asking
        self.call.called[key] += 1
        hidden = site.hidden or (func is Tensor.abs and not site.is_method_abs)
        return _Made(func, key, self.call.called[key] - 1, site, visible(func) and not hidden and not site.hook)

    def _key(self, site: CallSite, func: Function) -> CallKey:
        return call_key(site, route_name(func).strip("_"), framed=self.framed)

    def _flow(self, made: _Made, call: Given, chosen: dict[int | str, Any], out: Any) -> Any:
        """A transparent function hands on where its operands came from; constants, indices and masks only if there is nothing else.

        It is the first reader, as a rule, of what no mode can quantize where it is made: that is quantized here, while it is whole. And in
        half precision the constants that it reads are rounded.
        """
        func, name, results, (given, origins, changed, _) = made.func, name_of(made.func), _results(out), call
        for t in results:
            _settled(t, name)
        unmet = {
            slot for slot, found in origins.items() if results and slot not in changed and any(origin.is_unreplaced for origin in found)
        }
        step = None
        rounds = has_inexact_numbers(func, {**given, **chosen}) or reads_constants(name, call)
        if (unmet and name not in READS) or rounds or adds_nothing(name, chosen):
            step = self._step(made, call, results, moves=True)
            origins = {slot: frozenset(map(_read_here, found)) if slot in unmet else found for slot, found in origins.items()}
            if any(out is given[slot] for slot in unmet):  # `dropout` in evaluation: what it returns is quantized, what it was given is not
                out = out.view_as(out)
                results = [out]
        handed = handed_on(self.tape, name, call._replace(origins=origins), chosen, results)
        for slot, found in handed.changed.items():  # x[...] = y: x now comes from both
            self.tape.mark(given[slot], *found)
        for t, found in zip(results, handed.results, strict=True):
            if found and not any(t is g for g in given.values()):
                self.tape.mark(t, *found)
        if step is not None:
            step.made = frozenset(filter(None, map(self.tape.identity, results)))
            memories = set(map(memory_of, given.values()))
            for t in results:
                if memory_of(t) in memories:  # a view
                    self.tape.note_returned(t, step)
        masks = any(not (t.is_floating_point() or t.is_complex()) for t in results)
        if name in READS or (masks and any(t.is_floating_point() for t in given.values())):
            self.tape.reads |= (taken := {o for o in handed.taken if isinstance(o.source, Step)})
            self.current.handed_out |= taken if name in LENDS else set()
        return out

    def _step(self, made: _Made, call: Given, out: Any, *, moves: bool = False) -> Step:
        given, origins, changed, _ = call
        nothing, added = not any(t.numel() for t in _results(out)), kind_of(made.func) == "add"
        spectral = any(t.is_complex() for t in given.values())  # beside complex numbers nothing is quantized where it is read: a window
        floats = {slot: t for slot, t in given.items() if _is_data(t, nothing) and not spectral}
        step = Step(
            self.call.path,
            made.key[1],
            made.func,
            made.key,
            made.ordinal,
            made.site.line,
            made.visible,
            made.site.hook,
            moves,
            self.call.training,
            self.call.run,
            self.current.example,
            operands={slot: origins[slot] for slot in floats},
            side=(side := frozenset(o for slot, found in origins.items() if slot not in floats for o in found if o.kind != "const")),
            spectra=side if spectral else frozenset(),
            shapes={slot: t.shape for slot, t in floats.items()},
            devices={slot: t.device for slot, t in floats.items()},
            repeated={slot: axes for slot, t in floats.items() if (axes := frozenset(i for i, n in enumerate(t.stride()) if not n))},
            same={slot: self.tape.identity(t) for slot, t in floats.items()},
            changed=changed,
            stacks=dict(stacks_read(name_of(made.func), self.current.parameters, floats, origins)),
            on_constants=all(is_constant(o) for found in origins.values() for o in found),
            transformed=torch._C._functorch.maybe_current_level() is not None,
            masks=frozenset(slot for slot, t in floats.items() if is_mask(t, added=added)),
            replaceable=made.visible and not made.site.applied,  # an `autograd.Function` has a backward of its own: no quantizer's
        )
        self.call.steps.append(step)
        self.tape.steps.append(step)
        for slot in changed:
            self.tape.mark(given[slot], Origin("stale", step))
        return step

    def _sum_of_ranks(self, made: _Made, call: Given) -> None:
        """A collective that sums up: what it wrote is returned to nobody, and quantized where it is read."""
        step = self._step(made._replace(visible=False), call, None)
        for slot in call.changed:
            step.results[0] = call.tensors[slot].shape
            self.tape.mark_memory(call.tensors[slot], Origin("stale", step))

    def _mark_results(self, step: Step, given: dict[Slot, Tensor], out: Any) -> Any:
        if type(out) in (tuple, list):
            return type(out)(self._result(step, t, i, given) for i, t in enumerate(out))
        if isinstance(out, tuple):  # a torch.return_types
            for i, t in enumerate(out):
                self._result(step, t, i, given)
            return out
        return self._result(step, out, 0, given)

    def _result(self, step: Step, t: Any, output: int, given: dict[Slot, Tensor]) -> Any:
        """Marks a result. One that is an operand too (`x.add_(1)`) is returned under an alias, to tell the returned from the changed."""
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        if not is_dense(t):
            self.tape.unusual[step.name] = None
            return t
        step.results[output], step.devices[None] = t.shape, t.device
        if is_mask(t):
            step.masked_outputs |= {output}
        if not step.replaceable:
            self.tape.mark(t, Origin("stale", step, output))
            return t
        if any(t is g for g in given.values()):
            t = t.view_as(t)
        self.tape.mark(t, Origin("step", step, output))
        if step.changed:
            self.tape.note_returned(t, step, output)
        return t


def _is_first(slot: Slot) -> bool:
    """Whether an operand is what a collective writes into: its first, whatever it is called, or one of a list that is."""
    return (slot[0] if isinstance(slot, tuple) else slot) in (0, "tensor", "tensors", "output", "output_list")


def _is_differentiated(slot: Slot) -> bool:
    """Whether `torch.autograd.grad` goes back from what it has there, and does not read the numbers."""
    return (slot[0] if isinstance(slot, tuple) else slot) in (0, "outputs")


def _read_here(origin: Origin) -> Origin:
    """The origin of a tensor that is quantized where it is read."""
    return replace(origin, kind="step") if origin.is_unreplaced else origin


def _is_data(t: Tensor, nothing: bool) -> bool:
    """Whether an operand is what a quantizer takes. An empty one (a cache that is not filled yet) is no data, but where `nothing` comes
    out either: an expert that no token came to computes what the others do."""
    return t.is_floating_point() and is_dense(t) and (nothing or t.numel() > 0)


def _settled(t: Tensor, name: str) -> Tensor:
    """A tensor that was made. Memory that holds what was there before is set to zero: a plan depends on no chance."""
    if name.startswith(("empty", "new_empty")) and is_dense(t):
        with torch._C.DisableTorchFunction():
            t.detach().zero_()  # one that needs gradients lets nobody write to it
    return t


def _results(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, Tensor)]


class Recorded(Swapped):
    """Mixin of a container while it is recorded."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        current, path = vars(self)["_qsim_recording"]
        if path == "" and not current.began:
            current.began = True
            _mark_inputs(current, args, kwargs)
        recorder = Recorder(current, path, self.training)
        with recorder:
            out = super().forward(*args, **kwargs)
        return driven(out, recorder) if type(out) is types.GeneratorType else out


def _mark_inputs(current: RecordedRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As the root's forward gets them: after its pre-hooks, where the simulation quantizes them."""
    tape = current.tape
    for path, t in paths_in((args, kwargs)):
        slot = path[1] if len(path) == 2 else path[1:]
        tape.inputs.setdefault(slot, t.dtype)
        if not (t.is_floating_point() and is_replaceable((args, kwargs), path)):
            tape.unreplaced.add(slot)
        tape.mark(t, Origin("input", slot))
        current.entered.append(Entered(slot, t))


@contextmanager
def recording(model: nn.Module, current: RecordedRun, report: list[str]) -> Iterator[None]:
    """Containers record, leaves tell their name, until the body ends."""
    with ExitStack() as undo:
        for path, m in list(containers(model)):
            original = type(m)
            try:
                m.__class__ = subclass(Recorded, original)  # type: ignore[arg-type]  # Module's __hash__ is annotated out of line
            except TypeError as e:
                report.append(f"'{path}' is counted as part of its caller: its class {original.__name__} takes no subclass here ({e})")
                continue
            undo.callback(setattr, m, "__class__", original)
            vars(m)["_qsim_recording"] = (current, path)
            undo.callback(vars(m).pop, "_qsim_recording")
        for leaf, path in leaf_paths(model).items():
            vars(leaf)[LEAF] = path
            undo.callback(vars(leaf).pop, LEAF, None)
        yield
