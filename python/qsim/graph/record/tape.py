"""What a recording holds: every operation that ran, and where each of its operands came from."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from qsim.graph.record.call_sites import Spot
from qsim.graph.record.containers import layer_kind, parametrizing
from qsim.operations.functions import Function, kind_of, name_of
from qsim.runs.arguments import tensors_in

# An operand's place in a call: position, keyword, or (position or keyword, index) inside a list.
Slot = int | str | tuple[int | str, int]
# An input's place in the call of the model: position or keyword, or the path to it: (0, 2) is the third entry of the first argument.
InputSlot = int | str | tuple[Any, ...]

CallKey = tuple[tuple[Spot, ...], str, str]  # expressions under way, innermost first; path of the leaf or ""; name of the function


@dataclass(frozen=True)
class Origin:
    """Where a tensor came from.

    ======== ===================================== =======================================================================
    kind     source                                 the tensor is
    ======== ===================================== =======================================================================
    `step`   the Step                               its result number `output`
    `stale`  the Step                               the same values, but under a name the step did not return (it was changed in
                                                    place), or what it returned is not to be replaced there. Quantize where it is read
    `input`  the InputSlot                          an argument of the model
    `const`  name of the parameter or buffer,       the same in every call, unless it is in `Tape.written`
             None if it has none
    `random` None                                   drawn anew in every call
    `other`  None; `Flags` if made of these         made where the recording cannot see it: out of a list or an array, by an extension,
                                                    in an argument of an unknown kind. Data, for all that is known
    ======== ===================================== =======================================================================
    """

    kind: Literal["step", "stale", "input", "const", "random", "other"]
    source: Any = None
    output: int = 0
    direct: bool = True  # False when a transparent function lies between, or something wrote into the tensor since
    mixed: bool = False  # numbers that are on no grid were put in beside

    @property
    def is_unreplaced(self) -> bool:
        """Whether it is a result, as it was returned, that cannot be replaced where it is made."""
        return self.kind == "stale" and self.direct and not self.source.replaceable


@dataclass(eq=False, repr=False)
class Step:
    """One operation: a function called inside one call of a container that returned a floating-point tensor."""

    path: str  # of the container
    leaf: str  # path of the torch.nn leaf that made the call, or ""
    func: Function
    key: CallKey  # where it was called; a second call there, in a loop say, has the `ordinal` 1
    ordinal: int = 0
    line: str = ""  # that a person knows the place by: "model.py:12"
    visible: bool = True  # whether a mode meets the call when the model runs, eager or compiled
    hook: bool = False  # runs in a hook of a module
    moves: bool = False  # computes nothing: reads what no mode can quantize where it is made, or puts in numbers that may be rounded
    training: bool = False  # the container's own flag: part of a model may stay in eval while it is trained
    run: int = 0  # 0: recorded while the model ran in eval mode, 1: in training mode
    example: int = 0  # which of the example calls it was
    operands: dict[Slot, frozenset[Origin]] = field(default_factory=dict)  # of the floating-point tensors
    side: frozenset[Origin] = frozenset()  # of the other tensors: indices, masks, complex numbers
    spectra: frozenset[Origin] = frozenset()  # the same where complex numbers are among them: data that no grid holds
    shapes: dict[Slot, torch.Size] = field(default_factory=dict)  # of each operand
    repeated: dict[Slot, frozenset[int]] = field(default_factory=dict)  # axes along which an operand was expanded
    same: dict[Slot, tuple[int, int] | None] = field(default_factory=dict)  # equal where two operands are one tensor, unchanged between
    made: frozenset[tuple[int, int]] = frozenset()  # what `same` says of the results, where the step moves values alone
    options: dict[int | str, Any] = field(default_factory=dict)  # numbers, strings and None among the arguments, alone or as a tuple
    changed: frozenset[Slot] = frozenset()  # operands that the step wrote into
    transformed: bool = False  # runs inside `torch.vmap`, `torch.func.grad` or the like: its tensors are wrappers
    on_constants: bool = False  # reads nothing but constants, and what was computed on these
    stacks: dict[Slot, bool] = field(default_factory=dict)  # members of a stack of weights, and whether they are turned
    masks: frozenset[Slot] = frozenset()  # operands that hold -Inf or the lowest finite number, or hide scores: no grid is for both
    masked_outputs: frozenset[int] = frozenset()  # results that do
    results: dict[int, torch.Size] = field(default_factory=dict)  # shapes of what it returns in floating point
    devices: dict[Slot | None, torch.device] = field(default_factory=dict)  # of each operand; None: of what it returns
    scalar: bool = False  # whether all it returns is single numbers
    replaceable: bool = True  # whether a quantizer can stand where it returns: a mode meets it, not inside of an `autograd.Function`

    def __repr__(self) -> str:
        return f"<Step {self.name} of the {'training' if self.run else 'eval'} run>"

    @property
    def name(self) -> str:
        """The leaf's path, or the container's with the function's name: `layer1.conv`, `layer1.add`."""
        return self.leaf or ".".join(filter(None, (self.path, name_of(self.func))))

    @property
    def kind(self) -> str:
        return kind_of(self.func)

    @property
    def constants(self) -> dict[Slot, str]:
        """Parameters and buffers that the step reads as they are, by slot."""
        single = {slot: next(iter(found)) for slot, found in self.operands.items() if len(found) == 1}
        return {slot: o.source for slot, o in single.items() if o.kind == "const" and o.direct and o.source is not None}


@dataclass
class Call:
    """One call of one container, with its steps in order."""

    path: str
    training: bool  # as in Step
    run: int = 0
    steps: list[Step] = field(default_factory=list)
    called: Counter[CallKey] = field(default_factory=Counter)  # how often a function was called where


@dataclass(frozen=True)
class Reader:
    """Who reads a result. No `step`: it leaves the model, or is read out as numbers, mask or indices. No `slot`: it is in `Step.side`."""

    step: Step | None
    slot: Slot | None
    origin: Origin


def tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Slot, Tensor]]:
    """The tensors of a call, by slot."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for slot, value in places:
        if isinstance(value, Tensor):
            yield slot, value
        elif isinstance(value, (list, tuple)):
            yield from (((slot, i), v) for i, v in enumerate(value) if isinstance(v, Tensor))


def options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    """The arguments of a call that are numbers, strings or None, or lists of these."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for slot, value in places:
        items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if all(v is None or isinstance(v, (bool, int, float, str, torch.dtype)) for v in items):
            yield slot, items if isinstance(value, (list, tuple)) else value


def indirect(origins: Iterable[Origin]) -> frozenset[Origin]:
    return frozenset(replace(o, direct=False) if o.direct else o for o in origins)


class _Mark(NamedTuple):
    """What is known of a tensor, as it was then."""

    tensor: weakref.ref[Tensor]
    origins: frozenset[Origin]
    version: int
    memory: int | None
    serial: int


class Tape:
    """The dataflow graph of a recorded model, in eval and in training.

    Attributes
    ----------
    calls : list of Call
        One per container call, in the order in which they began.
    steps : list of Step
        All steps in the order in which they ran. `Step.operands` tells the producer of each operand, `Step.constants` its parameters.
    inputs : dict of InputSlot to torch.dtype
        The tensors given to the model.
    unreplaced : set of InputSlot
        Those of them that the simulation leaves alone and quantizes where they are read: integers, which become quantities only where
        they are converted, and what objects hold.
    written_into : set of InputSlot
        Those of them that the model writes into.
    refills : bool
        Whether the model puts something else into a list, dict or object that it is given.
    results : set of Origin
        What the model returned.
    reads : set of Origin
        What was read out as a Python number, a mask or indices, or kept in a module's attribute: no operand shows who uses it.
    handed_back : set of Origin
        What was in the model's arguments afterwards: a cache that it filled.
    rewritten : set of (Step or InputSlot, int)
        Results and arguments of the model that were written to afterwards, by any name or view of theirs.
    written : dict of str to frozenset of Origin
        Parameters and buffers that the model's forward writes, other than the statistics of a normalization, and what ends up in them.
    unusual : dict of str to None
        Names of the steps with a result that is not dense, in order.
    complex : dict of str to str
        Names and functions of the operations whose result is complex, in order.
    asking : set of str
        Functions of the model that ask for the class of something.
    subclasses : dict of type to None
        Classes with a `__torch_function__` of their own of which tensors were met.
    calls_compiled : bool
        Whether a forward calls functions that `torch.compile` made.
    differentiates, needs_gradients : bool
        Whether a forward computes gradients itself; and raises where none are recorded.
    shapes, parameters : dict of str to tuple of int, set of str
        Of the model's parameters and buffers, and the names of the former.
    modules : dict of str to str
        Names of the classes of its modules.
    layers : dict of str to LayerKind
        Which layers of torch.nn these are.
    raised : dict of int to Exception
        What passes in eval mode raised, which are not on the tape, by the example call.
    answers : set of type
        Types of what the model returned in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.raised: dict[int, Exception] = {}
        self.answers: set[type] = set()
        self.steps: list[Step] = []
        self.inputs: dict[InputSlot, torch.dtype] = {}
        self.unreplaced: set[InputSlot] = set()
        self.written_into: set[InputSlot] = set()
        self.results: set[Origin] = set()
        self.reads: set[Origin] = set()
        self.handed_back: set[Origin] = set()
        self.rewritten: set[tuple[Step | InputSlot, int]] = set()
        self._returned: dict[int, set[tuple[Step, int]]] = defaultdict(set)  # by steps in place and views, by memory
        self.written: dict[str, frozenset[Origin]] = {}
        self.unusual: dict[str, None] = {}
        self.complex: dict[str, str] = {}
        self.asking: set[str] = set()
        self.subclasses: dict[type, None] = {}
        self.calls_compiled = self.differentiates = self.needs_gradients = self.refills = False
        self.shapes = {name: tuple(t.shape) for name, t in (*model.named_buffers(), *model.named_parameters())}
        self.parameters = {name for name, _ in model.named_parameters()}
        self.modules = {name: type(module).__name__ for name, module in model.named_modules()}
        self.layers = {name: layer_kind(module) for name, module in model.named_modules()}
        self._parametrizing = parametrizing(model)
        self._constants = _constants(model)
        self._by_memory: dict[int | None, tuple[StorageWeakRef | None, frozenset[Origin]]] = {}
        for constant, name in self._constants.values():
            if (memory := memory_of(constant)) is not None:
                self._by_memory[memory] = StorageWeakRef(constant.untyped_storage()), frozenset([Origin("const", name)])  # type: ignore[no-untyped-call]
        self._constant_memory = dict(self._by_memory)
        self._origins: dict[int, _Mark] = {}
        self._serial = count()

    def is_parametrization(self, path: str) -> bool:
        """Whether a container is part of what `torch.nn.utils.parametrize` has compute a parameter."""
        return f"{path}.".startswith(self._parametrizing)

    def origins(self, t: Tensor) -> frozenset[Origin]:
        """Where `t` came from: several origins if a transparent function brought them together, "other" if nothing is known."""
        mark = self._origins.get(id(t))
        if mark is None or mark.tensor() is not t:  # an id is used again once its tensor is gone
            constant, name = self._constants.get(id(t), (None, None))
            return frozenset([Origin("const", name)]) if constant is t else self.origins_by_memory(t)
        if mark.memory != memory_of(t):  # `Tensor.set_`, which no mode sees
            return self.origins_by_memory(t)
        if version_of(t) == mark.version:
            return mark.origins
        # Something wrote into it through a view: its values are no longer those that were returned, but what wrote returned some of them.
        known = mark.origins | self._known_of(mark.memory)
        return frozenset(replace(o, kind="stale" if o.kind == "step" else o.kind, direct=False) for o in known)

    def origins_by_memory(self, t: Tensor) -> frozenset[Origin]:
        """Of a tensor that no function returned: a sample inside vmap, or other names of known memory: through NumPy, DLPack ..."""
        return indirect(self._known_of(memory_of(t))) or frozenset([Origin("other")])

    def _known_of(self, memory: int | None) -> frozenset[Origin]:
        """Where what is in memory came from; nothing if that was freed, and its address is used again."""
        storage, found = self._by_memory.get(memory, (None, frozenset()))
        return found if storage is not None and not storage.expired() else frozenset()  # type: ignore[no-untyped-call]

    def rewrite(self, t: Tensor, origins: Iterable[Origin]) -> None:
        """Something writes into `t`, which came from there: copies of what a step returned are nothing of its own."""
        memory = memory_of(t)
        made = {o.source for o in self._known_of(memory) if o.direct} if memory is not None else {o.source for o in origins}
        self.rewritten |= {(o.source, o.output) for o in origins if o.source in made and o.kind in ("step", "stale", "input")}
        self.rewritten |= set() if memory is None else self._returned[memory]

    def note_returned(self, t: Tensor, step: Step, output: int = 0) -> None:
        """Note that a step which works in place, or makes a view, returned `t`, which is marked: a write into its memory is one into it."""
        if (memory := memory_of(t)) is not None:
            self._returned[memory].add((step, output))

    def mark(self, t: Tensor, *origins: Origin) -> None:
        self._origins[id(t)] = _Mark(weakref.ref(t), frozenset(origins), version_of(t), memory_of(t), next(self._serial))
        if (memory := memory_of(t)) is not None:
            # The reference names its storage until the pass is over, freed or not: until then no other storage gets this address.
            known = self._known_of(memory) | frozenset(origins)
            self._by_memory[memory] = StorageWeakRef(unwrapped(t).untyped_storage()), known  # type: ignore[no-untyped-call]

    def mark_memory(self, t: Tensor, *origins: Origin) -> None:
        """Mark all that lies in the memory of `t`."""
        found = [mark.tensor() for mark in [*self._origins.values()] if mark.memory == memory_of(t)]
        for each in (t, *(other for other in found if other is not None and other is not t)):
            self.mark(each, *origins)

    def identity(self, t: Tensor) -> tuple[int, int] | None:
        """The same for `t` until something writes into it, and for no other tensor; None for a constant."""
        mark = self._origins.get(id(t))
        return None if mark is None or mark.tensor() is not t else (mark.serial, version_of(t))

    def keep(self, wanted: Container[Step]) -> None:
        """Take all other steps off the tape."""

        def known(origins: Iterable[Origin]) -> Iterator[Origin]:
            return (o for o in origins if not isinstance(o.source, Step) or o.source in wanted)

        self.steps = [step for step in self.steps if step in wanted]
        for call in self.calls:
            call.steps = [step for step in call.steps if step in wanted]
        self.results, self.reads, self.handed_back = (set(known(found)) for found in (self.results, self.reads, self.handed_back))
        self.written = {name: frozenset(known(origins)) for name, origins in self.written.items()}
        self.rewritten = {(step, output) for step, output in self.rewritten if not isinstance(step, Step) or step in wanted}

    def forget_tensors(self) -> None:
        """Between two passes: parameters and buffers are constants again."""
        self._origins.clear()
        self._returned.clear()
        self._by_memory = dict(self._constant_memory)

    def readers(self, step: Step, output: int = 0) -> tuple[Reader, ...]:
        """Everything that reads a result of `step`, under its returned or its stale name."""
        return tuple(self._readers.get((step, output), ()))

    @cached_property
    def _readers(self) -> dict[tuple[Step, int], list[Reader]]:
        found: dict[tuple[Step, int], list[Reader]] = defaultdict(list)

        def note(reader: Step | None, slot: Slot | None, origins: Iterable[Origin]) -> None:
            for o in origins:
                if o.kind in ("step", "stale"):
                    found[o.source, o.output].append(Reader(reader, slot, o))

        for step in self.steps:
            if not step.moves:  # what reads its result reads on through it
                for slot, origins in step.operands.items():
                    note(step, slot, origins)
                note(step, None, step.side)
        note(None, None, self.results | self.reads)
        return found


def _constants(model: nn.Module) -> dict[int, tuple[Tensor, str | None]]:
    """Parameters and buffers, with their names, and the other tensors that modules hold, by id."""
    held = [value for m in model.modules() if not isinstance(m, torch.jit.ScriptModule) for value in vars(m).values()]
    found: dict[int, tuple[Tensor, str | None]] = {id(t): (t, None) for t in tensors_in(held)}
    found.update({id(t): (t, name) for name, t in (*model.named_buffers(), *model.named_parameters())})
    return found


def unwrapped(t: Tensor) -> Tensor:
    """The tensor that one inside `torch.vmap` and the like stands for."""
    while is_wrapper(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def is_wrapper(t: Tensor) -> bool:
    """Whether a tensor is one inside `torch.vmap`, `torch.func.grad` or the like."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(t))


def version_of(t: Tensor) -> int:
    """Grows with every in-place change of `t` or of a tensor that shares its memory. Inference tensors count none."""
    return 0 if t.is_inference() else t._version


def memory_of(t: Tensor) -> int | None:
    """Tells memory apart that tensors share or not; None where none can be named (sparse tensors, those inside a transform)."""
    try:
        found: int = unwrapped(t).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return found
