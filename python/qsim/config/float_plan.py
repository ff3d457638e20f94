"""Which operations to keep in float32, as a value that configs take."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from qsim.numbers.float_format import HALF_FORMATS

if TYPE_CHECKING:
    from typing_extensions import Self

_VERSION = "qsim-plan-1"
PLAN_FORMATS = ("float32", *HALF_FORMATS, "float8_e4m3fn", "float8_e5m2", *(f"int{bits}" for bits in range(16, 1, -1)))


class Ordinal(NamedTuple):
    """Which one an operation is among those of its ONNX type that its module calls, in the order in which they run: from 0."""

    nth: int
    among: int


@dataclass(frozen=True)
class FloatPlan:
    """The operations to keep in float32 so that a model is right in a narrower format: what a `Config` knows of a plan.

    `qsim.Plan`, which is one that can also be written for other tools, documents the fields.
    """

    keep: tuple[str, ...]
    format: str
    target: str = ""
    irreducible: bool = False
    probes: int = 0
    sqnr: float | None = None
    note: str = ""
    ordinals: Mapping[str, Ordinal] = field(default_factory=dict)
    folded: Mapping[str, str] = field(default_factory=dict)
    ranges: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):
            raise TypeError(f"Plan: got keep={self.keep!r}; expected a tuple of names: ({self.keep!r},)")
        if self.format not in PLAN_FORMATS:
            raise ValueError(f"Plan: got format={self.format!r}; expected one of {', '.join(map(repr, PLAN_FORMATS))}")
        object.__setattr__(self, "keep", tuple(self.keep))

    def __str__(self) -> str:
        told = [self.ranges] if self.ranges else []
        if not self.keep:
            return "\n".join([f"none: {self.note}" if self.note else f"all of it can run in {self.format}", *told])
        proved = "irreducible: wrong with any one of them left out" if self.irreducible else f"not shown to be irreducible ({self.note})"
        many = f"{len(self.keep)} operation{'s' if len(self.keep) > 1 else ''}"
        reached = "" if self.sqnr in (None, math.inf) else f", reaching {self.sqnr:.4g}"
        head = f"keep {many} in float32, the rest in {self.format}{reached}; {proved}; {self.probes} probes"
        return "\n".join([head, *(f"  {name}" for name in self.keep), *told])

    def to_json(self) -> str:
        """The plan as JSON text; lossless."""
        fields = {"version": _VERSION, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}}
        sqnr = repr(self.sqnr) if self.sqnr is not None and not math.isfinite(self.sqnr) else self.sqnr  # JSON has neither NaN nor Inf
        return json.dumps({**fields, "sqnr": sqnr, "ordinals": dict(self.ordinals), "folded": dict(self.folded)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`. ValueError for anything else."""
        try:
            found = json.loads(text)
            version = found.pop("version", None)
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"Plan: no JSON object ({error}); expected what Plan.to_json writes") from None
        known = {field.name for field in dataclasses.fields(cls)}
        if version != _VERSION or not {"keep", "format"} <= found.keys() <= known:
            raise ValueError(f"Plan: got version {version!r} with {', '.join(found) or 'nothing'}; expected {_VERSION!r}, keep, format ...")
        sqnr = found.get("sqnr")
        ordinals = {name: Ordinal(*ordinal) for name, ordinal in found.get("ordinals", {}).items()}
        return cls(**{**found, "sqnr": None if sqnr is None else float(sqnr), "ordinals": ordinals})


def operation_of(name: str) -> tuple[str, str]:
    """Path of the module that calls an operation, and its function: ("layer1.0", "add") for "layer1.0.add_2"."""
    path, _, function = name.rpartition(".")
    stem, _, number = function.rpartition("_")
    return path, stem if stem and number.isdigit() else function
