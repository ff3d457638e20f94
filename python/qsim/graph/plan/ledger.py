"""What a plan has decided so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from qsim.graph.plan import reasons
from qsim.graph.plan.actions import Actions, LeftFloat, PlannedQuantizer
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.sharing import Made, made
from qsim.graph.record.handing_on import Flags
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import InputSlot, Origin, Slot
from qsim.numbers.spec import TensorSpec


class Ledger:
    """Quantizers, where they stand, and what stays in float.

    Attributes
    ----------
    actions : dict of Site to Actions
    quantizers : dict of str to PlannedQuantizer
    inputs : dict of InputSlot to str
        Keys of the quantizers of the model's inputs.
    grids : dict of Made to str
        Quantizers on whose grids results lie.
    members : dict of str to dict
        What shares a quantizer, by its key.
    left, notes : dict
        What stays in float and why, and what is odd about the config; in order.
    unseen : dict
        The weights that stay in float because no mode meets what reads them.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.actions: dict[Site, Actions] = defaultdict(Actions)
        self.quantizers: dict[str, PlannedQuantizer] = {}
        self.inputs: dict[InputSlot, str] = {}
        self.grids: dict[Made, str] = {}
        self.members: dict[str, dict[str, None]] = defaultdict(dict)
        self.left = {LeftFloat(name, op, reasons.COMPLEX): None for name, op in flow.tape.complex.items()}
        self.notes: dict[str, None] = {}
        self.unseen: dict[str, None] = {}

    def leave(self, name: str, op: str, reason: str) -> None:
        self.left[LeftFloat(name, op, reason)] = None

    def note_unseen(self, name: str, origins: Iterable[Origin]) -> None:
        """Of an operand whose origins nobody saw; what was made of flags or positions is data for certain."""
        if any(origin.source is not Flags for origin in origins):
            self.notes[f"the recording does not see where {name!r} comes from: it is taken for data, not for a constant"] = None

    def add(
        self,
        key: str,
        role: str,
        spec: TensorSpec,
        op: str,
        parameter: str | None = None,
        known: tuple[float, float] | None = None,
        reader: str | None = None,
        attribute: str | None = None,
    ) -> None:
        if known is not None and (not spec.has_scale or spec.is_dynamic):
            known = None
        if known is not None and spec.is_running:
            spec = replace(spec, method="minmax")  # nothing runs
        self.quantizers.setdefault(key, PlannedQuantizer(key, role, spec, op, parameter, known, reader, attribute))

    def add_before(self, following: str, key: str, role: str, spec: TensorSpec, op: str, known: tuple[float, float]) -> None:
        """Add one that the model meets before another one."""
        later = list(self.quantizers)[list(self.quantizers).index(following) :]
        behind = {name: self.quantizers.pop(name) for name in later}
        self.add(key, role, spec, op, known=known)
        self.quantizers.update(behind)

    def name_members(self) -> None:
        """Have quantizers that several tensors share say so."""
        for key, names in self.members.items():
            self.quantizers[key] = replace(self.quantizers[key], op=f"{self.quantizers[key].op}, one scale for {', '.join(names)}")

    def add_activation(self, key: str, spec: TensorSpec, name: str, site: Site, op: str, known: tuple[float, float] | None = None) -> None:
        """For what a site makes or reads; `name` is what a note calls it."""
        self.add(key, "activation", self._once(spec, name, site), op, known=known)

    def _once(self, spec: TensorSpec, name: str, site: Site) -> TensorSpec:
        """The spec, with a range that does not run where one call of the model runs a site several times: it would follow the average of
        several tensors, and clip the widest."""
        calls = Counter((step.run, step.example) for step in site.steps)
        if not spec.is_running or max(calls.values()) == 1:
            return spec
        self.notes[f"{name!r} runs {max(calls.values())} times in a call: its range is calibrated ('minmax') and does not run"] = None
        return replace(spec, method="minmax")

    def key_of(self, site: Site, slot: Slot) -> str | None:
        """The quantizer on whose grid an operand lies in evaluation; None if there is no single one."""
        if slot in self.actions[site].operands:
            return self.actions[site].operands[slot].key
        origins = [origin for step in site.evaluated for origin in step.operands.get(slot, ())]
        keys = set(map(self.grid_of, origins))
        return keys.pop() if len(keys) == 1 and not any(origin.mixed for origin in origins) else None

    def grid_of(self, origin: Origin) -> str | None:
        """The quantizer that a tensor went through where it was made."""
        found = made(self.flow, origin) if origin.kind == "step" else None
        return self.grids.get(found) if found else self.inputs.get(origin.source) if origin.kind == "input" else None

    def is_on_grid(self, site: Site, slot: Slot) -> bool:
        """Whether any of what an operand may be is quantized where it is made."""
        return any(made(self.flow, o) in self.grids or o.source in self.inputs for o in site.operands()[slot])

    def holds(self, tensor: Made | None) -> bool:
        """Whether a tensor lies on a grid with a scale. One that is rounded to half precision does not: who reads it may ask for one."""
        return tensor in self.grids and self.quantizers[self.grids[tensor]].spec.has_scale

    def has_one_scale(self, key: str) -> bool:
        """Per tensor, or per channel of a weight: a scale for each product."""
        planned = self.quantizers[key]
        if planned.spec.is_dynamic:
            return False
        return not planned.spec.is_float and planned.spec.block_size is None and (planned.spec.axis is None or planned.role == "weight")
