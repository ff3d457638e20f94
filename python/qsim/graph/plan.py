"""Plan: from the recorded calls to what is quantized at which site, and why the rest is not.

Pure: no module runs, no tensor is read. A tensor is quantized once, where it is made; where no function mode can do that (a function
that Dynamo hides from modes, a tensor changed in place and read under its old name) it is quantized where it is read.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from qsim.config import Config
from qsim.graph.actions import Actions, LeftFloat, Plan, PlannedBias, PlannedQuantizer, Use
from qsim.graph.notes import objections, unused_overrides
from qsim.graph.regions import find_regions
from qsim.graph.routes import Site
from qsim.graph.rules import is_bias, stays_float, weight_axes
from qsim.graph.sharing import Made, made
from qsim.graph.specs import Specs
from qsim.graph.stand_ins import stand_ins
from qsim.graph.tape import InputSlot, Origin, Slot, Tape
from qsim.spec import TensorSpec

_BY_CONFIG = "left in float by the config"
_READ_IN_FLOAT = "read by what the config leaves in float: rounded where others read it"
_UNSEEN = "Dynamo does not hand {} to function modes"
_TRAINING = "runs in training only"
_MASK = "a mask: holds -Inf or the lowest finite number"
_DIVISOR = "a divisor, or under a root or logarithm: a grid would round small values to zero"


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
        What the target's profile asks for. Where it quantizes results: one quantizer per tensor, at the end of a chain (convolution,
        BatchNorm, activation; addition, rectifier), named by the chain's first operation; inputs of the model where it begins. One per
        parameter, with `axis` 0 and 1 of the config's spec meaning output and input channels.
    """
    return _Planner(tape, config).plan()


class _Planner:
    def __init__(self, tape: Tape, config: Config) -> None:
        self.tape, self.config = tape, config
        self.specs = Specs(tape, config)
        self.flow, self.placement = self.specs.flow, self.specs.placement
        self.chains = self.flow.chains
        self.actions: dict[Site, Actions] = defaultdict(Actions)
        self.quantizers: dict[str, PlannedQuantizer] = {}
        self.inputs: dict[InputSlot, str] = {}
        self.grids: dict[Made, str] = {}  # quantizers on whose grids results lie
        self.read: dict[object, str] = {}  # keys of tensors that are quantized where they are read
        self.observed: set[object] = set()
        self.members: dict[str, dict[str, None]] = defaultdict(dict)  # what shares a quantizer, by its key
        self.left: dict[LeftFloat, None] = {}
        self.notes: dict[str, None] = {}

    def plan(self) -> Plan:
        for site in self.flow.sites:
            if self.flow.is_constant(site):
                self._leave(site.name, site.op, "computed from constants alone: quantized where it is read")
            elif site.training_only:
                self._leave(site.name, site.op, _TRAINING)
            else:
                for slot, origins in site.operands().items():
                    self._operand(site, slot, origins)
                self._bias(site)
                self._joined(site)
                if site in self.chains:
                    self._output(site)
        for slot in self.specs.uncast:
            self._leave(self.specs.input_key(slot), "input", _READ_IN_FLOAT)
        for site, key in stand_ins(self.flow, self.grids).items():
            self.actions[site].outputs[0] = key
            self.left.pop(LeftFloat(site.name, site.op, _TRAINING))
        self._name_members()
        infos = [*self.flow.infos.values(), *(self.specs.input_info(slot) for slot in self.tape.inputs)]
        notes = [*self.notes, *unused_overrides(self.config, infos), *objections(self.config, self.quantizers)]
        notes = list(dict.fromkeys(notes))
        regions = find_regions(self.flow, self.placement, self.actions, self.quantizers, self.grids, self.inputs)
        return Plan(self.flow.routes, dict(self.actions), self.quantizers, self.inputs, list(self.left), notes, regions)

    def _name_members(self) -> None:
        for key, names in self.members.items():
            self.quantizers[key] = replace(self.quantizers[key], op=f"{self.quantizers[key].op}, one scale for {', '.join(names)}")

    def _leave(self, name: str, op: str, reason: str) -> None:
        self.left[LeftFloat(name, op, reason)] = None

    def _add(
        self,
        key: str,
        role: str,
        spec: TensorSpec,
        op: str,
        parameter: str | None = None,
        known: tuple[float, float] | None = None,
        reader: str | None = None,
    ) -> None:
        if known is not None and not spec.has_scale:
            known = None
        if known is not None and spec.is_running:
            spec = replace(spec, method="minmax")  # nothing runs
        self.quantizers.setdefault(key, PlannedQuantizer(key, role, spec, op, parameter, known, reader))

    # Operands.

    def _operand(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        name = f"{site.name}.input[{slot}]"
        kinds = {"stale" if self._is_made_elsewhere(origin) else self.flow.kind(origin) for origin in origins}
        if any(slot in step.masks for step in site.steps):
            if kinds <= {"const", "input"} or all(map(self._is_unreplaced, origins)):
                self._leave(name, site.op, _MASK)
            return
        if self.config.profile.model_input:
            for origin in origins:
                if origin.kind == "input" and origin.source not in self.specs.uncast and not self._is_unreplaced(origin):
                    self._input(origin.source)
        asked = self.placement.reads(site, slot) and not any(map(self._is_quantized, origins))
        asked = (asked or self.specs.is_cast(site, origins)) and "random" not in kinds
        if kinds & {"step", "input", "random"} and not asked:
            if any(origin.kind == "stale" and self._is_made(origin) for origin in origins):
                self._leave(name, site.op, "changed in place in some of its calls")
            return  # quantized where it was made; random draws (dropout, stochastic depth) are no data of the target
        if not asked and kinds != {"const"} and not any(self._is_made(origin) for origin in origins):
            return
        if self.flow.divides(site, slot):
            self._leave(name, site.op, _DIVISOR)
            return
        if any(slot in step.changed for step in site.steps):  # a quantized copy would be changed in its place
            if site not in self.flow.absorbed.values():
                self._leave(name, site.op, "changed in place")
        elif not site.visible:
            self._leave(name, site.op, _UNSEEN.format(site.op))
        elif kinds == {"const"}:
            self._constant(site, slot, origins)
        elif asked:
            self._read(site, slot, origins)
        else:
            self._where_read(site, slot, origins)

    def _is_quantized(self, origin: Origin) -> bool:
        return self.placement.is_quantized(origin) or (origin.kind == "step" and made(self.flow, origin) in self.grids)

    def _is_made(self, origin: Origin) -> bool:
        """Whether a tensor that no mode can change where it is made would be quantized there."""
        if self._is_unreplaced(origin):
            return self.config.profile.model_input
        stale = origin.kind == "stale" or self._is_made_elsewhere(origin)
        return stale and self.placement.makes(self.flow.site_of[origin.source])

    def _is_unreplaced(self, origin: Origin) -> bool:
        return origin.kind == "input" and origin.source in self.tape.unreplaced

    def _is_made_elsewhere(self, origin: Origin) -> bool:
        """Whether a tensor is quantized where it is read though a mode could do so where it is made."""
        return self._is_unreplaced(origin) or (origin.kind == "step" and self.flow.site_of[origin.source] in self.flow.divisors)

    def _input(self, slot: InputSlot) -> None:
        key = self.specs.input_key(slot)
        shared = self._shared(("input", slot))
        spec = self.specs.of_input(slot)
        if spec is None:
            self._leave(key, "input", _BY_CONFIG)
        elif shared is not None:
            self.inputs[slot] = self._join(shared, key, spec)
        else:
            self.inputs[slot] = self._add_input(slot, spec)

    def _add_input(self, slot: InputSlot, spec: TensorSpec) -> str:
        key = self.specs.input_key(slot)
        if key in self.quantizers and self.quantizers[key].role != "input":  # a parameter of that name
            key = f"input[{slot}]"
        self._add(key, "input", spec, "input")
        return key

    def _constant(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        parameter = origins[0].source if len(origins) == 1 and origins[0].direct and isinstance(origins[0].source, str) else None
        dims, axes = site.dims(slot), weight_axes(site.op, slot)
        role = "constant" if axes is None else "weight"
        name = parameter or (f"{site.name}.weight" if axes else f"{site.name}.input[{slot}]")
        if is_bias(site.op, slot, dims):
            return
        spec = self.specs.of(site, "weight" if axes else "activation")
        if reason := stays_float(site.kind, dims) or self.placement.constant_reason(site, role) or (_BY_CONFIG if spec is None else None):
            self._leave(name, site.op, reason)
            return
        assert spec is not None
        if axes is None and self.placement.joins(site) and (shared := self._shared((site, 0))) is not None:
            self.actions[site].operands[slot] = Use(self._join(shared, name, spec))
            return
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
        self._add(name, role, spec, site.op, parameter, reader=site.name)

    def _read(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        """Quantize an operand because the target asks its reader to."""
        tensor = site.tensors(slot)
        source = origins[0] if len(origins) == 1 and origins[0].direct else None
        key = f"{site.name}.input[{slot}]"
        spec = self.specs.of(site, "activation")
        if spec is not None and source is not None and source.kind == "input":
            spec = self.specs.of_input(source.source)
        if spec is None:
            self._leave(key, site.op, _BY_CONFIG)
            return
        sources = {found for origin in origins if (found := made(self.flow, origin)) is not None}
        sharing = {self._shared(found) for found in sources}
        shared = sharing.pop() if len(sharing) == 1 else None
        if shared is not None:
            key = self._join(shared, self._name_of(sources, key), spec)
        elif source is not None and source.kind == "input":
            key = self._add_input(source.source, spec)
        else:
            key = self.read.setdefault((tensor, spec), key) if tensor else key  # readers that agree on how share a quantizer
            (end, *others) = sources
            span = None if others or not isinstance(end[0], Site) else self.placement.known_range(end[0])
            self._add(key, "activation", spec, site.op, known=span)
        self.actions[site].operands[slot] = self._use(key, site, slot)

    def _use(self, key: str, site: Site, slot: Slot) -> Use:
        """A quantizer at an operand: it observes each tensor where it is read first, and again once it was written to."""
        tensor = site.tensors(slot)
        observes = tensor is None or (key, tensor) not in self.observed
        self.observed.add((key, tensor))
        return Use(key, observes)

    def _where_read(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        """Quantize what could not be quantized where it was made, by its producer's name if it has a single one."""
        producers = {self.flow.site_of[origin.source] for origin in origins if origin.kind in ("step", "stale") and self._is_made(origin)}
        producer = producers.pop() if len(producers) == 1 else None
        chain = [site] if producer is None else self.chains.get(producer, [site])
        key = f"{chain[0].name}.output" if chain != [site] else f"{site.name}.input[{slot}]"
        spec = self.specs.of_chain(chain)
        if spec is None:
            self._leave(key, chain[0].op, _BY_CONFIG)
            return
        shared = None if producer is None else self._shared((producer, 0))
        changed_by_it = producer is not None and self.flow.works_in_place(producer)  # otherwise by what came after it
        if shared is not None:
            key = self._join(shared, chain[0].name, spec)
        elif (producer, 0) in self.grids and not changed_by_it:
            key = f"{site.name}.input[{slot}]"  # where it was made it had other values
        settled = producer is None or not self.flow.is_rewritten(producer)
        observed = shared is None and key in self.quantizers and settled and all(origin.direct for origin in origins)
        known = self.placement.known_range(producer) if producer is not None and changed_by_it else None
        self.actions[site].operands[slot] = Use(key, observes=False) if observed else self._use(key, site, slot)
        self._add(key, "activation", spec, " + ".join(member.op for member in chain), known=known)

    def _name_of(self, sources: set[Made], otherwise: str) -> str:
        """Whose result a tensor is."""
        names = {self.chains.get(at, [at])[0].name if isinstance(at, Site) else self.specs.input_key(i) for at, i in sources}
        return names.pop() if len(names) == 1 else otherwise

    # Biases.

    def _bias(self, site: Site) -> None:
        operands = site.operands()
        biases = [slot for slot in operands if is_bias(site.op, slot, site.dims(slot))]
        for slot in biases:
            origin = operands[slot][0]
            name = origin.source if isinstance(origin.source, str) else f"{site.name}.input[{slot}]"
            if {self.flow.kind(found) for found in operands[slot]} != {"const"}:
                continue
            if reason := self.placement.bias_reason(site, self.config.bias):
                self._leave(name, site.op, reason)
                continue
            uses = self.actions[site].operands
            weights = [found for found in uses if self.quantizers[uses[found].key].role == "weight"]
            others = [found for found in operands if found not in (*weights, *biases)]
            scales = [uses[weights[0]].key, self._key_of(site, others[0])] if len(weights) == len(others) == 1 else [None]
            if not isinstance(origin.source, str):
                self._leave(name, site.op, "bias in float: computed anew in each call")
                continue
            if len(biases) > 1 or not origin.direct or not all(key and self._has_one_scale(key) for key in scales):
                self._leave(name, site.op, "bias in float: input and weight have no grids to multiply")
                continue
            self.actions[site].bias = PlannedBias(slot, name, site.op, input=str(scales[1]), weight=str(scales[0]))

    def _key_of(self, site: Site, slot: Slot) -> str | None:
        """The quantizer on whose grid an operand lies; None if there is no single one."""
        if slot in self.actions[site].operands:
            return self.actions[site].operands[slot].key
        keys: set[str | None] = set()
        for origin in site.operands()[slot]:
            found = made(self.flow, origin) if origin.kind == "step" else None
            keys.add(self.grids.get(found) if found else self.inputs.get(origin.source) if origin.kind == "input" else None)
        return keys.pop() if len(keys) == 1 else None

    def _has_one_scale(self, key: str) -> bool:
        """Per tensor, or per channel of a weight: a scale for each product."""
        planned = self.quantizers[key]
        return not planned.spec.is_float and planned.spec.block_size is None and (planned.spec.axis is None or planned.role == "weight")

    # Results.

    def _output(self, site: Site) -> None:
        chain = self.chains[site]
        if not self.placement.makes(site):
            if (site, 0) not in self.grids and not any(map(self._quantizes, chain)):
                self._leave(site.name, site.op, self.placement.reason(site))
            return
        if not site.visible:
            if any(reader.step is None for reader in self.flow.readers(site)):
                self._leave(site.name, site.op, _UNSEEN.format(site.op))
            return
        if site in self.flow.divisors:
            if site in self.flow.returned:
                self._leave(site.name, site.op, _DIVISOR)
            return
        spec = self.specs.of_chain(chain)
        if spec is None:
            self._leave(chain[0].name, chain[0].op, _BY_CONFIG)
            return
        op = " + ".join(member.op for member in chain)
        if self.flow.is_changed_through(site):
            self._leave(chain[0].name, op, "changed in place again: quantized where it is read")
            return
        for i in range(site.outputs):
            readers = [reader for step in site.steps for reader in self.tape.readers(step, i)]
            if any(i in step.masked_outputs for step in site.steps):
                self._leave(chain[0].name, op, _MASK)
            elif (site, i) not in self.grids and (not readers or any(reader.origin.kind == "step" for reader in readers)):
                shared = self._shared((site, i))
                key = f"{chain[0].name}.output" + (f"[{i}]" if i else "")
                if shared is not None:
                    key = self._join(shared, chain[0].name, spec)
                else:
                    self._add(key, "activation", spec, op, known=self.placement.known_range(site))
                self.grids[site, i] = self.actions[site].outputs[i] = key

    def _quantizes(self, site: Site) -> bool:
        """Whether an operation takes quantized operands because the target asks it to."""
        roles = {self.quantizers[use.key].role for use in self.actions[site].operands.values()}
        return self.placement.is_reader(site) or not roles <= {"weight"}

    # Shared scales.

    def _shared(self, tensor: Made) -> Site | None:
        """The operation through which a tensor shares its scale, unless the config leaves that operation in float."""
        shared = self.placement.shared.get(tensor)
        return None if shared is None or self._shared_spec(shared) is None else shared

    def _shared_spec(self, shared: Site) -> TensorSpec | None:
        return self.specs.of_chain(self.chains.get(shared, [shared]))

    def _join(self, shared: Site, name: str, own: TensorSpec) -> str:
        """The key of the quantizer that several tensors share, `name` among them, by the operation that takes them together."""
        key = f"{shared.name}.input"
        spec = self._shared_spec(shared) or own
        if spec != own:
            self.notes[f"{name!r} shares the scale of {key!r}: what the config says of {name!r} alone is not used"] = None
        if spec.is_running:  # it would follow the average of several tensors, and clip the widest
            self.notes[f"{key!r} spans several tensors: its range is calibrated ('minmax') and does not run"] = None
            spec = replace(spec, method="minmax")
        if key not in self.quantizers:
            self._add(key, "activation", spec, shared.op)
        if name != shared.name:
            self.members[key][name] = None
        return key

    def _joined(self, site: Site) -> None:
        """Where all that an operation takes lies on one shared grid, its result does."""
        key = f"{self.placement.shared[site, 0].name}.input" if self.placement.joins(site) else None
        if key is not None and all(self._key_of(site, slot) == key for slot in site.operands()):
            self.grids[site, 0] = key
