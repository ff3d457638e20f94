"""Looking at operations that read weights while a simulation runs, and giving them other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from qsim.graph.execute.mode import LocalMode
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


class Tap(Protocol):
    """What looks at a run of a model."""

    simulates: bool  # False: the run is in float, and no quantizer does anything

    def reach(self, call: WeightedCall) -> Arguments:
        """Called before each call that reads a weight; returns the arguments that it runs with."""
        ...


def tapped_mode(current: Callable[[], Tap]) -> type[LocalMode]:
    """A mode for `Switch.mode` which follows the plan as ever and shows `current()` each call that reads a weight.

    The tap is that of the thread: `current` is asked once for each call of a container.
    """

    class TappedMode(LocalMode):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tap = current()

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
