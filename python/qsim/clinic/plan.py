"""A plan: which operations to keep in float32, for configs and for the tools that build engines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qsim.graph.onnx_types import onnx_type

if TYPE_CHECKING:
    from qsim.clinic.search import Found
    from qsim.clinic.subject import Subject

_VERSION = "qsim-plan-1"
HALF = ("float16", "bfloat16")
FORMATS = ("float32", *HALF, "int16", "int8", "int4", "float8_e4m3fn", "float8_e5m2")


class Ordinal(NamedTuple):
    """Which one an operation is among those of its ONNX type that its module calls, in the order in which they run: from 0."""

    nth: int
    among: int


@dataclass(frozen=True)
class Plan:
    """The operations to keep in float32 so that a model is right in a narrower format.

    Attributes
    ----------
    keep : tuple of str
        Names as overrides of `qsim.Config` match them: ``layer1.0.conv1`` for a module, ``layer1.0.add`` for an operation inside one.
    format : str
        What the rest runs in: "float16", "bfloat16", "int8" ...
    target : str
        What the plan was made for: "tensorrt-fp16".
    irreducible : bool
        The model was seen to be right with these kept, and wrong with any single one of them left out.
    probes : int
        How many sets were tried to find it.
    sqnr : float or None
        Of the model's results with these kept, in dB, or the metric that was asked for; None if it was not measured.
    note : str
        Why the search fell short; "" where it did not.
    ordinals : mapping of str to Ordinal
        Of operations that are no modules: how to tell them apart in an exported model.
    folded : mapping of str to str
        BatchNorms that are part of a kept layer here, and operations of their own in an exported model: their names, and the layer's.

    Examples
    --------
    >>> plan = Plan(("norm.pow", "norm.mean"), "float16", "tensorrt-fp16")
    >>> Plan.from_json(plan.to_json()) == plan
    True
    >>> import qsim
    >>> qsim.fp16().with_plan(plan).spec_for("norm.mean", "mean", "activation") is None
    True
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

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):
            raise TypeError(f"Plan: got keep={self.keep!r}; expected a tuple of names: ({self.keep!r},)")
        if self.format not in FORMATS:
            raise ValueError(f"Plan: got format={self.format!r}; expected one of {', '.join(map(repr, FORMATS))}")
        object.__setattr__(self, "keep", tuple(self.keep))

    @classmethod
    def of(cls, found: Found[Any], subject: Subject, *, format: str, target: str) -> Plan:
        """What a search found, with what deployment files need to know of the model."""
        return cls(
            found.keep,
            format,
            target,
            found.irreducible,
            found.probes,
            found.outcome.sqnr,
            found.note,
            {name: ordinal for name, ordinal in _ordinals(subject).items() if name in found.keep},
            {norm: layer for norm, layer in subject.folding.folded.items() if layer in found.keep},
        )

    def __str__(self) -> str:
        if not self.keep:
            return f"none: {self.note}" if self.note else f"all of it can run in {self.format}"
        proved = "irreducible: wrong with any one of them left out" if self.irreducible else f"not shown to be irreducible ({self.note})"
        many = f"{len(self.keep)} operation{'s' if len(self.keep) > 1 else ''}"
        reached = "" if self.sqnr is None or math.isinf(self.sqnr) else f", reaching {self.sqnr:.4g}"
        head = f"keep {many} in float32, the rest in {self.format}{reached}; {proved}; {self.probes} probes"
        return "\n".join([head, *(f"  {name}" for name in self.keep)])

    def to_json(self) -> str:
        """The plan as JSON text; lossless."""
        fields = {"version": _VERSION, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}}
        sqnr = repr(self.sqnr) if self.sqnr is not None and not math.isfinite(self.sqnr) else self.sqnr  # JSON has neither NaN nor Inf
        return json.dumps({**fields, "sqnr": sqnr, "ordinals": dict(self.ordinals), "folded": dict(self.folded)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
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

    # Deployment files.

    def nodes(self, model: str | PathLike[str]) -> dict[str, list[str]]:
        """The nodes of an exported ONNX model that each kept operation became: see `qsim.clinic.nodes.find`."""
        from qsim.clinic.nodes import find

        return find(model, self)

    def op_selector(self) -> Callable[[Any], bool]:
        """For Core ML: see `qsim.clinic.coreml.selector_source`.

        Examples
        --------
        ``ct.convert(traced, compute_precision=ct.transform.FP16ComputePrecision(op_selector=plan.op_selector()))``
        """
        from qsim.clinic.coreml import selector

        return selector(self)

    def write(self, folder: str | PathLike[str], model: str | PathLike[str] | None = None) -> list[Path]:
        """Write the plan, and what tools that build engines take: see `qsim.clinic.plan_files.write`."""
        from qsim.clinic.plan_files import write

        return write(self, folder, model)


def operation_of(name: str) -> tuple[str, str]:
    """Path of the module that calls an operation, and its function: ("layer1.0", "add") for "layer1.0.add_2"."""
    path, _, function = name.rpartition(".")
    stem, _, number = function.rpartition("_")
    return path, stem if stem and number.isdigit() else function


def _ordinals(subject: Subject) -> dict[str, Ordinal]:
    alike: dict[tuple[str, str], list[str]] = {}
    for name, site in subject.sites.items():
        if not site.steps[0].leaf:
            alike.setdefault((site.steps[0].path, onnx_type(site.op)), []).append(name)
    return {name: Ordinal(index, len(names)) for names in alike.values() for index, name in enumerate(names)}
