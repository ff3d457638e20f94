"""Plan: from the recorded calls to what is quantized at which site, and why the rest is not.

Pure: no module runs, no tensor is read. A tensor is quantized once, where it is made; where no function mode can do that (a function
that Dynamo hides from modes, a tensor changed in place and read under its old name) it is quantized where it is read.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from qsim.config import Config
from qsim.graph.routes import Route, Site, build_routes
from qsim.graph.rules import fuses, is_bias, stays_float, weight_axes
from qsim.graph.tape import InputSlot, Origin, Reader, Slot, Step, Tape
from qsim.spec import TensorSpec

_BY_CONFIG = "left in float by the config"
_UNSEEN = "Dynamo does not hand {} to function modes"
_MASK = "a mask: holds -Inf or the lowest finite number"


@dataclass(frozen=True)
class PlannedQuantizer:
    """One quantizer of the plan.

    Attributes
    ----------
    key : str
        Its name in `QuantSim.quantizers`.
    role : str
        "weight" (a constant operand of a multiply-accumulate), "constant" (of anything else), "activation" or "input".
    spec : TensorSpec
        With the axis that this tensor has.
    op : str
        The operation whose result or operand is quantized, with what is fused to it: "conv2d + relu".
    parameter : str, optional
        The parameter or buffer that is quantized: its data decide the range. None: the range is observed while the model runs.
    """

    key: str
    role: str
    spec: TensorSpec
    op: str
    parameter: str | None = None


class Use(NamedTuple):
    """A quantizer at an operand. `observes` is False where another reader of the same tensor observes it already."""

    key: str
    observes: bool = True


class LeftFloat(NamedTuple):
    """Something that stays in float: an operation or operand, and why."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True)
class PlannedBias:
    """A bias that is held as int32: its operand's slot, its parameter, and the quantizers whose scales make its scale."""

    slot: Slot
    parameter: str
    op: str
    input: str
    weight: str


@dataclass
class Actions:
    """What happens at one site: quantizers of operands by slot, and of outputs by index; the bias."""

    operands: dict[Slot, Use] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    bias: PlannedBias | None = None


@dataclass
class Plan:
    """Routes of all containers by path, what happens at each site, quantizers by key, keys of quantized inputs, what stays in float,
    and what is odd about the config."""

    routes: dict[str, Route]
    actions: dict[Site, Actions]
    quantizers: dict[str, PlannedQuantizer]
    inputs: dict[InputSlot, str]
    left: list[LeftFloat]
    notes: list[str]

    @property
    def biases(self) -> list[PlannedBias]:
        return [actions.bias for actions in self.actions.values() if actions.bias is not None]


def plan(tape: Tape, config: Config) -> Plan:
    """Decide what is quantized.

    Parameters
    ----------
    tape : Tape
        What `qsim.graph.record.record` saw.
    config : Config

    Returns
    -------
    Plan
        One quantizer per tensor: at the end of a fused chain (convolution, BatchNorm, activation; addition, rectifier), named by the
        chain's first operation; one per parameter, with `axis` 0 and 1 of the config's spec meaning output and input channels;
        inputs of the model where it begins.
    """
    return _Planner(tape, config).plan()


class _Planner:
    def __init__(self, tape: Tape, config: Config) -> None:
        self.tape, self.config = tape, config
        self.routes, self.site_of = build_routes(tape)
        self.sites = list(dict.fromkeys(self.site_of.values()))
        self.constant = self._constant_steps()
        self.absorbed = {site: reader for site in self.sites if (reader := self._absorber(site)) is not None}
        self.chains = self._chains()
        self.actions: dict[Site, Actions] = defaultdict(Actions)
        self.quantizers: dict[str, PlannedQuantizer] = {}
        self.inputs: dict[InputSlot, str] = {}
        self.left: dict[LeftFloat, None] = {}

    def plan(self) -> Plan:
        for site in self.sites:
            if all(step in self.constant for step in site.steps):
                self._leave(site.name, site.op, "computed from constants alone: quantized where it is read")
            elif site.training_only:
                self._leave(site.name, site.op, "runs in training only")
            else:
                for slot, origins in site.operands().items():
                    self._operand(site, slot, origins)
                self._bias(site)
                if site in self.chains:
                    self._output(site)
        return Plan(self.routes, dict(self.actions), self.quantizers, self.inputs, list(self.left), self._unused_overrides())

    def _unused_overrides(self) -> list[str]:
        names = [(site.name, site.op) for site in self.sites] + [(self._input_key(slot), "input") for slot in self.tape.inputs]
        unused = [o for o in self.config.overrides if not any(o.matches(name, op) for name, op in names)]
        return [f"the config's override {o.pattern!r} (op_type={o.op_type!r}) matches no operation" for o in unused]

    def _leave(self, name: str, op: str, reason: str) -> None:
        self.left[LeftFloat(name, op, reason)] = None

    # What the dataflow says.

    def _constant_steps(self) -> dict[Step, str]:
        """Steps that compute on constants alone: "const", or "random" if random numbers are among them.

        Multiply-accumulates are never counted: a product of two weights is arithmetic of the target.
        """
        found: dict[Step, str] = {}
        for step in self.tape.steps:
            kinds = {found.get(o.source, o.kind) for origins in step.operands.values() for o in origins}
            if kinds <= {"const", "random"} and step.kind != "mac":
                found[step] = "random" if "random" in kinds else "const"
        return found

    def _kind(self, origin: Origin) -> str:
        return self.constant.get(origin.source, origin.kind)

    def _readers(self, site: Site) -> list[Reader]:
        return [reader for step in site.steps for i in range(step.outputs) for reader in self.tape.readers(step, i)]

    def _absorber(self, site: Site) -> Site | None:
        """The sole reader of `site`, if it takes its output quantizer over."""
        readers = self._readers(site)
        sites = {None if reader.step is None else self.site_of[reader.step] for reader in readers}
        if len(sites) != 1 or not all(self._is_handed_on(reader) for reader in readers):
            return None
        (reader,) = sites
        return reader if reader is not None and fuses(site.kind, reader.kind, reader.op) else None

    def _is_handed_on(self, reader: Reader) -> bool:
        """Whether a result reaches the reader's main operand as it was returned, or is changed there in place for all who know it."""
        in_place = reader.step is not None and reader.slot in reader.step.changed
        return reader.slot in (0, "input") and reader.origin.direct and (reader.origin.kind == "step" or in_place)

    def _chains(self) -> dict[Site, list[Site]]:
        """Last operation of each fused chain: all of the chain, first operation first."""
        producers: dict[Site, list[Site]] = defaultdict(list)
        for site, reader in self.absorbed.items():
            producers[reader].append(site)
        chains = {}
        for site in self.sites:
            if site not in self.absorbed:
                chain = [site]
                while len(producers[chain[0]]) == 1:  # several: one activation at the end of several layers goes by its own name
                    chain.insert(0, producers[chain[0]][0])
                chains[site] = chain
        return chains

    # What is decided.

    def _chain_spec(self, chain: list[Site]) -> TensorSpec | None:
        """An override that names any operation of the chain applies to the chain's result, the last operation's first."""
        specs = [self.config.spec_for(site.name, site.op, "activation") for site in reversed(chain)]
        return next((spec for spec in specs if spec != self.config.activation), self.config.activation)

    def _add(self, key: str, role: str, spec: TensorSpec, op: str, parameter: str | None = None) -> None:
        self.quantizers.setdefault(key, PlannedQuantizer(key, role, spec, op, parameter))

    def _operand(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        name = f"{site.name}.input[{slot}]"
        kinds = {self._kind(origin) for origin in origins}
        if any(slot in step.masks for step in site.steps):
            if kinds <= {"const", "input"}:
                self._leave(name, site.op, _MASK)
            return
        for origin in origins:
            if origin.kind == "input":
                self._input(origin.source)
        if kinds & {"step", "input", "random"}:
            if "stale" in kinds:
                self._leave(name, site.op, "changed in place in some of its calls")
            return  # quantized where it was made; random draws (dropout, stochastic depth) are no data of the target
        if any(slot in step.changed for step in site.steps):  # a quantized copy would be changed in its place
            if site not in self.absorbed.values():
                self._leave(name, site.op, "changed in place")
        elif not site.visible:
            self._leave(name, site.op, _UNSEEN.format(site.op))
        elif kinds == {"const"}:
            self._constant(site, slot, origins)
        else:
            self._where_read(site, slot, origins)

    def _input(self, slot: InputSlot) -> None:
        key = self._input_key(slot)
        spec = self.config.spec_for(key, "input", "activation")
        if spec is None:
            self._leave(key, "input", _BY_CONFIG)
        else:
            if key in self.quantizers and self.quantizers[key].role != "input":  # a parameter of that name
                key = f"input[{slot}]"
            self._add(key, "input", spec, "input")
            self.inputs[slot] = key

    def _input_key(self, slot: InputSlot) -> str:
        if len(self.tape.inputs) == 1:
            return "input"
        return slot if isinstance(slot, str) else f"input[{slot}]" if isinstance(slot, int) else f"input{list(slot)}"

    def _constant(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        parameter = origins[0].source if len(origins) == 1 and origins[0].direct and isinstance(origins[0].source, str) else None
        dims, axes = site.dims(slot), weight_axes(site.op, slot)
        role = "constant" if axes is None else "weight"
        name = parameter or (f"{site.name}.weight" if axes else f"{site.name}.input[{slot}]")
        spec = self.config.spec_for(site.name, site.op, "weight" if axes else "activation")
        if is_bias(site.op, slot, dims):
            return
        if reason := stays_float(site.kind, dims) or (_BY_CONFIG if spec is None else None):
            self._leave(name, site.op, reason)
            return
        assert spec is not None
        if axes is not None and dims < 2:
            spec = replace(spec, axis=None, block_size=None)  # a vector is summed over: it has no output channels
        elif axes is not None and isinstance(spec.axis, tuple):
            spec = replace(spec, axis=tuple(axes[a] % dims if a in (0, 1) else a for a in spec.axis))
        elif axes is not None and spec.axis in (0, 1):
            spec = replace(spec, axis=axes[spec.axis] % dims)
        if parameter is None and spec.axis is not None and not spec.is_running:
            spec = replace(spec, method="minmax")  # computed from parameters: observed, and per channel that gives minimum and maximum
        known = self.quantizers.get(name)
        if known is not None and (known.spec, known.parameter) != (spec, parameter):  # one parameter read in two ways
            name = f"{site.name}.input[{slot}]"
        self.actions[site].operands[slot] = Use(name, observes=name not in self.quantizers)
        self._add(name, role, spec, site.op, parameter)

    def _bias(self, site: Site) -> None:
        operands = site.operands()
        biases = [slot for slot in operands if is_bias(site.op, slot, site.dims(slot))]
        for slot in biases:
            origin = operands[slot][0]
            name = origin.source if isinstance(origin.source, str) else f"{site.name}.input[{slot}]"
            if {self._kind(found) for found in operands[slot]} != {"const"}:
                continue
            if not self.config.bias:
                self._leave(name, site.op, "bias in float: Config.bias is off")
                continue
            uses = self.actions[site].operands
            weights = [found for found in uses if self.quantizers[uses[found].key].role == "weight"]
            others = [found for found in operands if found not in (*weights, *biases)]
            scales = [uses[weights[0]].key, self._key_of(site, others[0])] if len(weights) == len(others) == 1 else [None]
            if len(biases) > 1 or not origin.direct or not all(key and self._has_one_scale(key) for key in scales):
                self._leave(name, site.op, "bias in float: input and weight have no grids to multiply")
                continue
            self.actions[site].bias = PlannedBias(slot, name, site.op, input=str(scales[1]), weight=str(scales[0]))

    def _key_of(self, site: Site, slot: Slot) -> str | None:
        """The quantizer whose result stands at an operand; None if there is no single one."""
        if slot in self.actions[site].operands:
            return self.actions[site].operands[slot].key
        keys: set[str | None] = set()
        for origin in site.operands()[slot]:
            made = self.actions.get(self.site_of[origin.source]) if origin.kind == "step" else None
            keys.add(made.outputs.get(origin.output) if made else self.inputs.get(origin.source) if origin.kind == "input" else None)
        return keys.pop() if len(keys) == 1 else None

    def _has_one_scale(self, key: str) -> bool:
        """Per tensor, or per channel of a weight: a scale for each product."""
        planned = self.quantizers[key]
        return not planned.spec.is_float and planned.spec.block_size is None and (planned.spec.axis is None or planned.role == "weight")

    def _where_read(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        """Quantize what could not be quantized where it was made, by its producer's name if it has a single one."""
        producers = {self.site_of[origin.source] for origin in origins if origin.kind == "stale"}
        chain = self.chains.get(next(iter(producers)), [site]) if len(producers) == 1 else [site]
        key = f"{chain[0].name}.output" if chain != [site] else f"{site.name}.input[{slot}]"
        spec = self._chain_spec(chain)
        if spec is None:
            self._leave(key, chain[0].op, _BY_CONFIG)
            return
        self.actions[site].operands[slot] = Use(key, observes=key not in self.quantizers)
        self._add(key, "activation", spec, " + ".join(member.op for member in chain))

    def _output(self, site: Site) -> None:
        chain = self.chains[site]
        if not self._readers(site):
            self._leave(site.name, site.op, "nothing that was seen reads it")
            return
        if not site.visible:
            if any(reader.step is None for reader in self._readers(site)):
                self._leave(site.name, site.op, _UNSEEN.format(site.op))
            return
        spec = self._chain_spec(chain)
        if spec is None:
            self._leave(chain[0].name, chain[0].op, _BY_CONFIG)
            return
        op = " + ".join(member.op for member in chain)
        for i in range(site.outputs):
            readers = [reader for step in site.steps for reader in self.tape.readers(step, i)]
            if any(i in step.masked_outputs for step in site.steps):
                self._leave(chain[0].name, op, _MASK)
            elif any(reader.origin.kind == "step" for reader in readers):
                key = f"{chain[0].name}.output" + (f"[{i}]" if i else "")
                self._add(key, "activation", spec, op)
                self.actions[site].outputs[i] = key
