"""What stands at nodes, as Dynamo reaches it: by names, which are constants, out of one object that all containers share."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from qsim.graph.execute.lowered import Quantize
from qsim.quantizers.bias import BiasQuantizer, of_products

Told = tuple[str, str, str]


class Standing:
    """Names what stands at nodes, and finds it again.

    Dynamo guards each thing that it reads on the way to a quantizer, when it traces and again in every call, and compares all ways that
    lead to one. So there is one short way: an attribute of this. Attributes are added while Dynamo traces, which a list would not stand.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by id

    def __getstate__(self) -> dict[str, Any]:
        return {"_names": {}}  # copies name what stands in them

    def tell(self, quantize: Quantize) -> Told:
        """What stands for it among the constants of a graph."""
        if isinstance(quantize, BiasQuantizer):
            return "bias", self._name_of(quantize.input), self._name_of(quantize.weight)
        if isinstance(quantize, MethodType):
            return "method", self._name_of(quantize.__self__), quantize.__name__
        return "itself", self._name_of(quantize), ""

    def find(self, there: tuple[tuple[Any, Told], ...]) -> tuple[tuple[Any, Quantize], ...]:
        """What was told, with where each stands, while Dynamo traces: in a plain loop, since a comprehension is a function to it."""
        found: tuple[tuple[Any, Quantize], ...] = ()
        for at, (kind, name, other) in there:
            quantize = getattr(self, name)
            if kind == "bias":
                quantize = functools.partial(of_products, quantize, getattr(self, other))
            elif kind == "method":
                quantize = getattr(quantize, other)
            found = (*found, (at, quantize))
        return found

    def _name_of(self, what: Any) -> str:
        name = self._names.setdefault(id(what), f"n{len(self._names)}")
        setattr(self, name, what)  # and is kept: no other gets its id
        return name
