"""What a recording holds: every operation that ran, and where each of its operands came from."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qsim.graph.functions import Function, kind_of, name_of

# An operand's place in a call: position, keyword, or (position or keyword, index) inside a list.
Slot = int | str | tuple[int | str, int]
# An input's place in the call of the model: position or keyword, or the path to it: (0, 2) is the third entry of the first argument.
InputSlot = int | str | tuple[Any, ...]


@dataclass(frozen=True)
class Origin:
    """Where a tensor came from.

    ======== ===================================== =======================================================================
    kind     source                                 the tensor is
    ======== ===================================== =======================================================================
    `step`   the Step                               its result number `output`
    `stale`  the Step                               the same values, but under a name the step did not return: it was changed
                                                    in place, or no mode can see the step. Quantize where it is read
    `input`  the InputSlot                          an argument of the model
    `const`  name of the parameter or buffer,       the same in every call
             None if it has none
    `random` None                                   drawn anew in every call
    ======== ===================================== =======================================================================
    """

    kind: Literal["step", "stale", "input", "const", "random"]
    source: Any = None
    output: int = 0
    direct: bool = True  # False when a transparent function lies between, or something wrote into the tensor since


@dataclass(eq=False, repr=False)
class Step:
    """One operation: a function called inside one call of a container that returned a floating-point tensor."""

    path: str  # of the container
    leaf: str  # path of the torch.nn leaf that made the call, or ""
    func: Function
    training: bool = False  # the container's own flag: part of a model may stay in eval while it is trained
    run: int = 0  # 0: recorded while the model ran in eval mode, 1: in training mode
    operands: dict[Slot, frozenset[Origin]] = field(default_factory=dict)  # of the floating-point tensors
    side: frozenset[Origin] = frozenset()  # of the other tensors: indices, masks, complex numbers
    dims: dict[Slot, int] = field(default_factory=dict)  # number of dimensions of each operand
    same: dict[Slot, tuple[int, int] | None] = field(default_factory=dict)  # equal where two operands are one tensor, unchanged between
    options: dict[int | str, Any] = field(default_factory=dict)  # numbers, strings and None among the arguments, alone or as a tuple
    changed: frozenset[Slot] = frozenset()  # operands that the step wrote into
    transformed: bool = False  # runs inside `torch.vmap`, `torch.func.grad` or the like: its tensors are wrappers
    masks: frozenset[Slot] = frozenset()  # operands that hold -Inf or the lowest finite number: no grid holds that beside other values
    masked_outputs: frozenset[int] = frozenset()  # results that do
    outputs: int = 0

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
    frames: list[tuple[int, str]] = field(default_factory=list)  # what ran as a call of its own: before which step, and its path


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
    return frozenset(replace(o, direct=False) for o in origins)


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
        they are converted, and attributes of objects.
    results : set of Origin
        What the model returned.
    reads : set of Origin
        What was read out as a Python number, a mask or indices, or kept in a module's attribute: no operand shows who uses it.
    rewritten : set of (Step, int)
        Results that were written to afterwards, by any name or view of theirs.
    unusual : dict of str to None
        Names of the steps with a result that is not dense, in order.
    shapes : dict of str to tuple of int
        Of the model's parameters and buffers.
    modules : dict of str to str
        Names of the classes of its modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.steps: list[Step] = []
        self.inputs: dict[InputSlot, torch.dtype] = {}
        self.unreplaced: set[InputSlot] = set()
        self.results: set[Origin] = set()
        self.reads: set[Origin] = set()
        self.rewritten: set[tuple[Step, int]] = set()
        self.returned: dict[int | None, set[tuple[Step, int]]] = defaultdict(set)  # by steps that work in place, by memory
        self.unusual: dict[str, None] = {}
        self.shapes = {name: tuple(t.shape) for name, t in (*model.named_buffers(), *model.named_parameters())}
        self.modules = {name: type(module).__name__ for name, module in model.named_modules()}
        self._names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        self._origins: dict[int, tuple[weakref.ref[Tensor], frozenset[Origin], int, int]] = {}
        self._serial = count()

    def origins(self, t: Tensor) -> frozenset[Origin]:
        """Where `t` came from: several origins if a transparent function brought them together, a nameless constant if nothing is known."""
        ref, found, version, _ = self._origins.get(id(t), (None, frozenset(), 0, 0))
        if ref is None or ref() is not t:  # an id is used again once its tensor is gone
            return frozenset([Origin("const", self._names.get(id(t)))])
        if version_of(t) == version:
            return found
        # Something wrote into it through a view: its values are no longer those that were returned.
        return frozenset(replace(o, kind="stale" if o.kind == "step" else o.kind, direct=False) for o in found)

    def rewrite(self, t: Tensor, origins: Iterable[Origin]) -> None:
        """Something writes into `t`, which came from there."""
        self.rewritten |= {(o.source, o.output) for o in origins if isinstance(o.source, Step)} | self.returned[memory_of(t)]

    def mark(self, t: Tensor, *origins: Origin) -> None:
        self._origins[id(t)] = (weakref.ref(t), frozenset(origins), version_of(t), next(self._serial))

    def identity(self, t: Tensor) -> tuple[int, int] | None:
        """The same for `t` until something writes into it, and for no other tensor; None for a constant."""
        ref, _, _, serial = self._origins.get(id(t), (None, frozenset(), 0, 0))
        return None if ref is None or ref() is not t else (serial, version_of(t))

    def forget_tensors(self) -> None:
        """Between two passes: parameters and buffers are constants again."""
        self._origins.clear()
        self.returned.clear()

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
            for slot, origins in step.operands.items():
                note(step, slot, origins)
            note(step, None, step.side)
        note(None, None, self.results | self.reads)
        return found


def version_of(t: Tensor) -> int:
    """Grows with every in-place change of `t` or of a tensor that shares its memory. Inference tensors count none."""
    return 0 if t.is_inference() else t._version


def memory_of(t: Tensor) -> int | None:
    """Tells memory apart that tensors share or not; None where none can be named (sparse tensors, those inside a transform)."""
    try:
        found: int = t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return found
