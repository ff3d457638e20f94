"""What the hand-written simulation knows of tensors while it runs: where each came from, who reads it, which names share memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

ASKED = -2  # in place of an operand's slot: Python reads a number out of the tensor
REMEMBERED = -3  # the tensor goes into a buffer


class NotUnderstood(Exception):
    """The hand-written simulation has no rule for this: the documents leave it open, or it is outside what the oracle covers."""


@dataclass(frozen=True)
class Origin:
    """Where a tensor came from.

    ========= ================= ==================================================================
    kind      source            the tensor is
    ========= ================= ==================================================================
    site      the Site          its result
    input     its name          an argument of the model
    unknown   a name            something that came into the model past its arguments
    const     None              a parameter, a buffer, or computed from them
    weight    None              the weight of a layer that multiplies
    random    None              drawn anew in every call
    ========= ================= ==================================================================
    """

    kind: str
    source: Any = None
    direct: bool = True  # False behind views, slices and the like
    stale: bool = False  # changed in place, and read by its older name
    mixed: bool = False  # numbers that lie on no grid were put in beside
    call: object = field(default=None, compare=False)  # of a site that no function mode meets: which of its calls


@dataclass(frozen=True)
class Value:
    """A tensor, and where it came from: several origins where a function that only moves values brought them together.

    `made_of`: the one whose numbers Python made it of.
    """

    tensor: Tensor
    origins: frozenset[Origin]
    made_of: Value | None = None

    @property
    def kinds(self) -> set[str]:
        return {o.kind for o in self.origins}

    def moved(self) -> frozenset[Origin]:
        return frozenset(replace(o, direct=False) for o in self.origins)


@dataclass(eq=False)
class Memory:
    """What several names share. `latest`: its contents, as the older name of a tensor that was changed in place reads them."""

    version: int = 0
    latest: Value | None = None


@dataclass(eq=False)
class Name:
    """A tensor object of the program."""

    value: Value
    memory: Memory = field(default_factory=Memory)
    version: int = 0
    is_view: bool = False
    returned: bool = False  # by an operation that works in place

    def read(self) -> Value:
        """What the program sees in this tensor now."""
        if self.memory.version == self.version:
            return self.value
        if self.is_view or self.returned or self.memory.version > self.version + 1 or self.memory.latest is None:
            raise NotUnderstood("a view, or an older result, that is read after its memory was written to again")
        latest = self.memory.latest
        return Value(latest.tensor, frozenset(replace(o, stale=True) for o in latest.origins))


@dataclass(frozen=True)
class Kind:
    """What an operation is. `type`: its ONNX type. `weights`: operands that are weights if they are constant, with the axis of their
    channels. `bias`: the operand that is one. `hidden`: no function mode meets it under `torch.compile`."""

    type: str
    family: str = "op"  # product, norm, loss, op
    weights: tuple[tuple[int, int], ...] = ()
    bias: int | None = None
    hidden: bool = False

    def weight_axis(self, slot: int) -> int | None:
        return dict(self.weights).get(slot)


@dataclass(eq=False)
class Site:
    """A place in the program where an operation runs: a statement of one module's forward, by the calls that lead to it."""

    key: tuple[Any, ...]
    kind: Kind
    operands: dict[int, set[Origin]] = field(default_factory=dict)
    pieced: dict[int, list[frozenset[Origin]]] = field(default_factory=dict)  # of products: where calls read what was put together
    readers: set[tuple[Site | None, int, Origin]] = field(default_factory=set)
    changes: bool = False  # works in place
    changed_again: bool = False  # and something else then does on its result
    is_constant: bool | None = None
    leaf: int | None = None  # the layer that it belongs to, by id

    def __repr__(self) -> str:
        return f"<{self.kind.type} at {self.key[1:]}>"


def part_of(tensor: Tensor) -> tuple[int, bool]:
    """The memory that a tensor lies in, and whether it is a view of part of that."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), tensor.nbytes < storage.nbytes()
