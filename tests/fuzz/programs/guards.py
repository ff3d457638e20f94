"""What a simulation asks for where it assumes something, each as the change that takes the question out.

The rows of the table of assumptions in docs/architecture.md, and the decisions of recording and planning that keep a simulation truthful.
`without.py` has the fuzzer look for programs that need them.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from qsim.graph.execute import answers, attach, mode, ownership, place, shortcuts, simulated
from qsim.graph.execute.chain_ends import ChainEnds
from qsim.graph.execute.inputs import Inputs
from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.place import QUIET, Place
from qsim.graph.execute.traced import TracedMode
from qsim.graph.plan import halves, plan, regions
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.record import call_sites, record, recorder, tape
from qsim.graph.record.tape import Origin, Tape, indirect
from qsim.graph.record.written_state import Held
from qsim.simulation import simulation

from .guard import Answer, Change, Guard


def _put(*changes: Change) -> tuple[Change, ...]:
    return changes


def _always(value: Any) -> Answer:
    return Answer(lambda: value)


def _nothing() -> Answer:
    return Answer(lambda: None, acts=True)


def _empty(kind: type[Any]) -> Answer:
    return Answer(kind)


class _All:
    def __contains__(self, item: object) -> bool:
        return True


class _KeptParameter:
    """As `qsim._C.KeptParameter`, with less that it looks at."""

    looks_at: tuple[str, ...] = ()

    def __init__(self, quantizers: list[dict[str, Any]]) -> None:
        self.quantizers, self.kept = quantizers, None

    def __call__(self, parameter: Tensor) -> Tensor | None:
        if self.kept is None or self.kept[0] != self._seen(parameter, self.kept[1]):
            return None
        tensors = [parameter, *(t for q in self.quantizers for t in self._grid(q))]
        return None if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) else self.kept[1]

    def keep(self, parameter: Tensor, quantized: Tensor) -> None:
        self.kept = self._seen(parameter, quantized), quantized

    def forget(self) -> None:
        self.kept = None

    def is_empty(self) -> bool:
        return self.kept is None

    def _grid(self, quantizer: dict[str, Any]) -> list[Tensor]:
        held = quantizer["_buffers"] | quantizer["_parameters"]
        return [held[name] for name in ("scale", "zero_point")]

    def _seen(self, *tensors: Tensor) -> list[Any]:
        found: list[Any] = [q.get(name) for q in self.quantizers for name in ("_spec", "_enabled", "_observing", "training", "_turns")]
        for t in [*tensors, *(t for q in self.quantizers for t in self._grid(q))]:
            flat = t.detach().reshape(-1)
            seen = {"version": t._version, "memory": t.data_ptr(), "values": flat[:: max(1, flat.numel() // 64)].tolist()}
            found += [id(t), *(seen[name] for name in self.looks_at)]
        return found


def _kept(*looks_at: str) -> tuple[Change, ...]:
    return _put((shortcuts, "KeptParameter", type("KeptParameter", (_KeptParameter,), {"looks_at": looks_at})))


def _by_name(site: Any, name: str, *, framed: bool = False) -> Any:
    return (), "" if framed else site.leaf_path, name


def _beyond(self: LocalMode, key: int) -> int:
    nodes = self.place.nodes_of[key]
    return QUIET if nodes[-1] is None else nodes[-1]


def _constants(self: Tape, t: Tensor) -> frozenset[Origin]:
    return indirect(self._known_of(tape.memory_of(t))) or frozenset([Origin("const")])


class _SharedMode(LocalMode):
    """One for all calls of a container."""

    def __new__(cls, place: Place, *args: Any, **kwargs: Any) -> LocalMode:
        made: LocalMode = vars(place).setdefault("mode", super().__new__(cls))
        return made


class _Compiled:
    """In place of `Uncompiled`: Dynamo may compile what a simulation runs in Python."""

    is_behind_a_break = False

    def __init__(self, *, functions_too: bool) -> None:
        pass

    def __enter__(self) -> _Compiled:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _Deaf(dict[int, str]):
    def __setitem__(self, key: int, value: str) -> None:
        pass


_make_inputs, _make_dataflow = Inputs.__init__, Dataflow.__init__


def _positions(self: Inputs, cls: type[nn.Module], *args: Any) -> None:
    _make_inputs(self, cls, *args)
    self.positional = list(inspect.signature(cls.forward).parameters)[1:]


def _integer_chains(self: Dataflow, recorded: Any, chains: Any, half_chains: Any, *args: Any) -> None:
    _make_dataflow(self, recorded, chains, chains, *args)


_SHOWN = _put(  # what Dynamo hides is taken for shown
    (call_sites, "_HIDING", set()),
    (call_sites, "_HIDING_FILES", ()),
    (call_sites, "_known", {}),
    (call_sites.CallSite, "is_method_abs", True),
    (recorder, "visible", lambda function: True),
)


def _is_counted(t: Tensor) -> bool:
    """As `ownership.is_alone`, blind for storages."""
    return type(t) is Tensor and t.numel() >= ownership.SMALLEST and not t._is_view() and t._use_count() == 1  # type: ignore[attr-defined]


def _dies(args: tuple[Any, ...], kwargs: dict[str, Any], func: Any, frame: Any) -> bool:
    """As `ownership.dies`, without counting what the caller holds."""
    if not args or not ownership.is_alone(args[0]):
        return False
    while frame.f_back is not None and ownership._leads(frame):
        frame = frame.f_back
    return ownership.is_given_away(frame.f_code, frame.f_lasti, None) is not None


# What the text of programs has: ways that flags and data decide, functions that Dynamo hides, and what else guards are for.
_WAYS = "kind='(flag|data)'"
_HIDDEN = r"F\.sigmoid|F\.tanh|(?i:hardswish|hardsigmoid)|builtin abs|torch\.relu_"
_IN_PLACE = "_'|_ another|increment|in place"
_MADE_OF_NUMBERS = "plus literal|times numpy|through a list|through numpy"

GUARDS: dict[str, Guard] = {
    # Which call it is.
    "call sites": Guard(
        "a call is recognized by where it is written, not by its name",
        _put((recorder, "call_key", _by_name), (place, "call_key", _by_name)),
        ("hand-written", "off"),
    ),
    "weights anywhere": Guard(
        "weights are quantized on any path",
        _put((Place, "with_weights", _always(None)), (TracedMode, "with_weights", _always(None))),
        ("hand-written",),
        _WAYS,
    ),
    "layers elsewhere": Guard(
        "results of layers have the layers' own quantizers where no example called them",
        _put((plan, "elsewhere_of", _empty(dict))),
        ("hand-written",),
        _WAYS,
    ),
    "layers never called": Guard(
        "weights of layers that no example called are planned", _put((plan, "plan_unreached", _empty(dict))), ("hand-written",)
    ),
    "the recorded weight": Guard(
        "the weight at this place is the recorded one", _put((place, "own_weight", _always(None))), ("hand-written",), _WAYS
    ),
    "longer loops": Guard(
        "what a loop does beyond the recorded rounds is new", _put((LocalMode, "more", _beyond)), ("hand-written",), "name='steps'"
    ),
    "chains that began": Guard(
        "a chain whose end is quantized began with what was recorded",
        _put((ChainEnds, "is_handed_on", _always(True))),
        ("hand-written",),
        _WAYS,
    ),
    "makers that ran": Guard(
        "what is quantized where it is read was made by what makes it in the examples",
        _put((ChainEnds, "was_made", _always(True))),
        ("hand-written",),
        _WAYS,
    ),
    "ends that strayed": Guard(
        "what no mode meets, and ends a chain, took what that hands on",
        _put((ChainEnds, "strayed", _always(False)), (TracedMode, "strayed", _always(False))),
        ("hand-written", "compiled"),
        _WAYS,
    ),
    "that very memory": Guard(
        "what is read by an older name is that very memory",
        _put((ChainEnds, "is_of", _always(True)), (TracedMode, "is_of", _always(True))),
        ("hand-written", "16 bits"),
        _IN_PLACE,
    ),
    "hooks": Guard("what hooks compute is not the model's", _put((call_sites, "_forward_lines", _All)), ("hooks",), "kind='observe"),
    "a mode for each call": Guard(
        "each call has a mode of its own", _put((simulation, "LocalMode", _SharedMode)), ("threads", "hand-written")
    ),
    # What was recorded.
    "losses": Guard(
        "losses, and what only they read, stay in float", _put((Dataflow, "_metrics", _empty(set))), ("hand-written",), "with loss"
    ),
    "the whole tensor": Guard(
        "what modes do not see is quantized whole, where it is read first",
        _put((Origin, "is_unreplaced", property(lambda self: False))),
        ("hand-written", "16 bits"),
        _HIDDEN,
    ),
    "unknown origin": Guard(
        "a tensor of unknown origin is an activation",
        _put((Tape, "origins_by_memory", _constants)),
        ("hand-written", "16 bits", "off"),
        _MADE_OF_NUMBERS,
    ),
    "written buffers": Guard(
        "buffers that a forward writes are activations", _put((Held, "written", _empty(dict))), ("hand-written", "16 bits"), r"Remember\("
    ),
    "writes": Guard(
        "version counters tell what was written in place",
        _put((recorder, "version_of", _always(0)), (tape, "version_of", _always(0))),
        ("hand-written", "off", "savings"),
    ),
    "either name": Guard(
        "what is changed in place is read by the name that the examples read it by",
        _put((regions._Finder, "older_name", _nothing())),
        ("hand-written",),
    ),
    "folded pairs": Guard(
        "a layer and the BatchNorm that is folded into it run together", _put((attach, "pair", _nothing())), ("quantizers off",)
    ),
    "one memory": Guard(
        "names of one memory are told by their storage",
        _put((tape, "memory_of", _always(None)), (recorder, "memory_of", _always(None))),
        ("hand-written", "off"),
    ),
    "changed again": Guard(
        "what is changed in place again is quantized where it is read",
        _put((Dataflow, "is_changed_through", _always(False))),
        ("hand-written", "off"),
        _IN_PLACE,
    ),
    "divisors": Guard(
        "what must not be zero stays in float",
        _put((Dataflow, "divides", _always(False))),
        ("16 bits", "hand-written"),
        "'quotient'|'rms'",
    ),
    "own arguments": Guard(
        "recording writes into copies of the arguments",
        _put((record, "own_arguments", lambda model, given: (given, []))),
        ("left alone",),
        _IN_PLACE,
    ),
    "put back": Guard(
        "recording puts back buffers, flags and random numbers",
        _put((record, "unchanged", lambda model, *, whole: contextlib.nullcontext())),
        ("left alone", "off"),
    ),
    "arguments by name": Guard(
        "an argument is found by its name, whatever stands before it",
        _put((Inputs, "__init__", _positions)),
        ("hand-written",),
        "star between",
    ),
    # Half precision.
    "every operation rounds": Guard(
        "in half precision every operation rounds, in chains too", _put((Dataflow, "__init__", _integer_chains)), ("half",)
    ),
    "written out in half": Guard("operations run in half precision inside", _put((halves.Halves, "run_by", _empty(dict))), ("half",)),
    # What runs later, or elsewhere.
    "recomputation": Guard(
        "a part under a checkpoint runs again under the same mode",
        _put((mode, "recompute_under", _nothing())),
        ("checkpoints", "hand-written"),
        r"checkpoint='\w",
    ),
    "recomputation above": Guard(
        "a container under a checkpoint finds again how chains began",
        _put((LocalMode, "checkpointed_above", _nothing())),
        ("checkpoints",),
        r"checkpoint='\w",
    ),
    "recomputation, in place": Guard(
        "under a checkpoint nothing is written in place",
        _put((ownership, "checkpoint_hooks", _nothing())),
        ("savings", "checkpoints"),
        r"checkpoint='\w",
    ),
    "recomputation, kept": Guard(
        "what a checkpoint keeps when it runs again is not written to",
        _put((mode, "keep_unchanged", _nothing())),
        ("hand-written",),
        r"checkpoint='\w",
    ),
    "generators": Guard(
        "the body of a generator runs under its container's mode",
        _put((simulated, "driven", lambda generator, mode: generator), (recorder, "driven", lambda generator, mode: generator)),
        ("hand-written",),
        "returns='generator'",
    ),
    "padded rows": Guard(
        "padded rows are what torch's fast path returns there",
        _put((simulated, "_may_pack", _always(False))),
        ("16 bits",),
        "src_key_padding_mask",
    ),
    "methods": Guard(
        "a method called by itself is simulated, or said not to be",
        _put((simulated, "methods", _empty(dict))),
        ("methods",),
        "kind='method'",
    ),
    "paths": Guard("what ran and was not recorded is told", _put((Place, "note_strange", _nothing())), ("warned",)),
    "ends": Guard("what is planned and was not reached is told", _put((Place, "note_end", _empty(list))), ("warned",)),
    # Savings.
    "references": Guard(
        "nothing else refers to what is overwritten",
        _put((ownership, "is_alone", lambda t: type(t) is Tensor), (shortcuts, "is_alone", lambda t: type(t) is Tensor)),
        ("savings",),
        "big=True",
    ),
    "storages": Guard(
        "no other tensor shares its storage",
        _put((ownership, "is_alone", _is_counted), (shortcuts, "is_alone", _is_counted)),
        ("savings",),
        "big=True",
    ),
    "counted references": Guard("the caller has no other reference to it", _put((mode, "dies", _dies)), ("savings",), "big=True"),
    "liveness": Guard(
        "the caller does not read the variable again",
        _put((ownership, "is_given_away", lambda code, at, arguments: True)),
        ("savings",),
        "big=True",
    ),
    "plain eager": Guard(
        "savings are for plain eager execution",
        _put((mode, "is_plain_eager", _always(True))),
        ("savings", "hand-written", "compiled"),
        "big=True",
    ),
    "clamped": Guard(
        "a quantizer that stands for a rectifier ends no later", _put((shortcuts.Rectifier, "_is_clamped", _always(True))), ("savings",)
    ),
    "kept: versions": Guard("a kept weight has the version that it had", _kept("memory", "values"), ("savings",)),
    "kept: memory": Guard("a kept weight lies where it lay", _kept("version", "values"), ("savings",)),
    "kept: values": Guard("samples of a kept weight's values are what they were", _kept("version", "memory"), ("savings",)),
    "kept: eval": Guard("train() and eval() forget kept weights", _put((simulated.Simulated, "train", nn.Module.train)), ("savings",)),
    # Compiled.
    "hidden functions": Guard("what Dynamo hides is quantized where it is read", _SHOWN, ("compiled",), _HIDDEN),
    "the graph is the plan": Guard(
        "a graph with other quantizers than the plan is an error", _put((answers, "_asking", _Deaf())), ("compiled",), "kind='compiling'"
    ),
    "compiled parts": Guard(
        "calls of a part that was compiled are not its container's",
        _put((LocalMode, "is_foreign", _always(False))),
        ("compiled parts",),
        "container='Block",
    ),
    "layers alone": Guard(
        "a layer that is called by itself is simulated", _put((attach, "simulate_alone", _nothing())), ("layers alone",), "nn.Linear"
    ),
    "whole or not at all": Guard(
        "a container is compiled whole, or runs in Python",
        _put((mode, "Uncompiled", _Compiled)),
        ("compiled", "compiled parts"),
        "kind='data'",
    ),
}
