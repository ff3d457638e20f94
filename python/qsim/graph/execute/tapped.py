"""Looking at operations that read weights while a simulation runs, and giving them other weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from qsim.graph.execute.lowered import Quantize
from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.nodes import Node
from qsim.graph.record.tape import Slot
from qsim.operations.functions import Function, route_name
from qsim.runs.arguments import Arguments


class WeightedCall(NamedTuple):
    """A call of a function that reads a weight which has a quantizer, about to run.

    Attributes
    ----------
    key : str
        Of the weight's quantizer.
    name : str
        Of the function: "conv2d".
    slot : int or str
        Where the weight is among the arguments.
    args, kwargs
        Of the function, as the operation reads them.
    """

    key: str
    name: str
    slot: Slot
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SharedWeights:
    """What runs that go on side by side read of the same weights: each is quantized once, and kept for as long as any of them holds it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Tensor, int, weakref.ref[Tensor]]] = {}

    def quantized(self, key: str, quantize: Quantize, weight: Tensor) -> Tensor:
        """`quantize(weight)`, by the weight's quantizer of this key."""
        if (known := self._known.get(key)) is not None and known[0] is weight and known[1] == weight._version:
            found = known[2]()
            if found is not None:
                return found
        found = quantize(weight)
        self._known[key] = weight, weight._version, weakref.ref(found)
        return found


class Tap(Protocol):
    """What looks at a run of a model."""

    simulates: bool  # False: the run is in float, and no quantizer does anything
    weights: SharedWeights

    def reach(self, call: WeightedCall) -> Arguments:
        """Called before each call that reads a weight; returns the arguments that it runs with."""
        ...


def tapped_mode(current: Callable[[], Tap]) -> type[LocalMode]:
    """A mode for `Switch.mode` which follows the plan as ever and shows `current()` each call that reads a weight.

    The tap is that of the thread: `current` is asked once for each call of a container.
    """

    class TappedMode(LocalMode):
        skips = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tap = current()
            self.simulates = self.tap.simulates
            self.nodes = cast("list[Node]", _Sharing(self.nodes, self.place.weights_read, self.tap.weights))

        def met(self, node: int, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            weights = self.place.weights_read[node]
            if weights:
                func = self.shown(func, weights)
            if not self.tap.simulates:
                return func(*args, **kwargs)
            return super().met(node, func, args, kwargs)

        def with_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            return super().with_weights(args, kwargs) if self.tap.simulates else None

        def shown(self, func: Function, weights: tuple[tuple[Slot, str], ...]) -> Function:
            tap, name = self.tap, route_name(func).strip("_")

            def run(*args: Any, **kwargs: Any) -> Any:
                for slot, key in weights:
                    args, kwargs = tap.reach(WeightedCall(key, name, slot, args, kwargs))
                return func(*args, **kwargs)

            return run

    return TappedMode


class _Sharing:
    """The nodes of a container, with weights as all runs share them."""

    def __init__(self, nodes: Sequence[Node], read: Sequence[tuple[tuple[Slot, str], ...]], weights: SharedWeights) -> None:
        self._nodes, self._read, self._weights = nodes, read, weights

    def __getitem__(self, number: int) -> Node:
        node, keys = self._nodes[number], dict(self._read[number])
        if not keys:
            return node
        shared = {slot: partial(self._weights.quantized, keys[slot], quantize) for slot, quantize in node.operands if slot in keys}
        return node._replace(operands=tuple((slot, shared.get(slot, quantize)) for slot, quantize in node.operands))
