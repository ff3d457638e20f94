"""Plan: from the recorded calls to what is quantized at which site, and why the rest is not.

Pure: no module runs, no tensor is read. A tensor is quantized once, where it is made; where no function mode can do that (a function
that Dynamo hides from modes, a tensor changed in place and read under its old name) or a gradient would be lost (inside of an
`autograd.Function`) it is quantized where it is read.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from qsim.config.config import Config
from qsim.graph.plan import reasons
from qsim.graph.plan.actions import LeftFloat, QuantizationPlan, Use
from qsim.graph.plan.alike import find_alike
from qsim.graph.plan.biases import plan_bias
from qsim.graph.plan.caches import Caches
from qsim.graph.plan.computed_weights import for_any_size
from qsim.graph.plan.elsewhere import elsewhere_of, plan_unreached
from qsim.graph.plan.gate_quantizers import plan_gates
from qsim.graph.plan.halves import Halves
from qsim.graph.plan.ledger import Ledger
from qsim.graph.plan.notes import mistyped, notes_of
from qsim.graph.plan.pieces import Pieces
from qsim.graph.plan.regions import find_regions
from qsim.graph.plan.rules import computed_spec, is_bias, stays_float, weight_axes, weight_spec
from qsim.graph.plan.sharing import Made, made
from qsim.graph.plan.specs import Specs
from qsim.graph.plan.stand_ins import stand_ins
from qsim.graph.plan.tables import table_grid, table_spec
from qsim.graph.plan.weight_stacks import Stacks, operand_spec
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import InputSlot, Origin, Slot, Tape
from qsim.graph.record.telling import Telling
from qsim.numbers.spec import TensorSpec


def plan(tape: Tape, config: Config) -> QuantizationPlan:
    """Decide what is quantized.

    Parameters
    ----------
    tape : Tape
        What `qsim.graph.record.record.record` saw.
    config : Config

    Returns
    -------
    QuantizationPlan
        What the target's profile asks for. Where it quantizes results: one quantizer per tensor, at the end of a chain (convolution,
        BatchNorm, activation; addition, rectifier), named by the chain's first operation; inputs of the model where it begins. One per
        parameter, with `axis` 0 and 1 of the config's spec meaning output and input channels.
    """
    return _Planner(tape, config).plan()


class _Planner:
    def __init__(self, tape: Tape, config: Config) -> None:
        self.tape, self.config, self.specs = tape, config, Specs(tape, config)
        self.flow, self.placement = self.specs.flow, self.specs.placement
        self.ledger = Ledger(self.flow)
        self.actions, self.quantizers, self.grids = self.ledger.actions, self.ledger.quantizers, self.ledger.grids
        self.caches, self.stacks = Caches(self.specs, config.kv_cache, self.ledger), Stacks(self.specs, self.ledger)
        self.pieces, self.halves = Pieces(self.specs, self.ledger), Halves(self.specs)
        self.read: dict[object, str] = {}  # keys of tensors that are quantized where they are read
        self.observed: dict[object, tuple[Site, Slot]] = {}  # where tensors are read first
        self.whole: dict[str, set[object]] = defaultdict(set)  # tensors that quantizers observe where they are read, all of them
        self.after: dict[tuple[Site, Slot], frozenset[Site]] = {}  # which operations make what is quantized where it is read
        self.memory: dict[tuple[Site, Slot], frozenset[Site]] = {}  # those whose very memory is read
        self.through: dict[tuple[Site, Slot], frozenset[Site]] = {}  # those of them that Dynamo hides
        self.again: dict[tuple[Site, Slot], tuple[Site, Slot]] = {}

    def plan(self) -> QuantizationPlan:
        for site in self.flow.sites:
            if site.moves:
                for slot, origins in site.operands().items() if not site.training_only else ():
                    if any(origin.is_unreplaced for origin in origins) or self.halves.reads_constant(site, slot):
                        self._operand(site, slot, origins)
            elif self.flow.is_constant(site):
                self.ledger.leave(site.name, site.op, "computed from constants alone: quantized where it is read")
            elif site in self.flow.metrics:
                self.ledger.leave(site.name, site.op, reasons.METRIC)
            elif site in self.flow.counted:
                self.ledger.leave(site.name, site.op, reasons.COUNTED)
            elif site.training_only:
                self.ledger.leave(site.name, site.op, reasons.TRAINING)
            else:
                for slot, origins in site.operands().items():
                    if not (self.caches.plan(site, slot) or self.stacks.plan(site, slot)):
                        self._operand(site, slot, origins)
                plan_bias(site, self.ledger, self.config.bias, self.placement, is_half=self._is_half(site))
                self._joined(site)
                if site in self.flow.chains:
                    self._output(site)
        for origin in sorted((o for o in self.tape.results if o.kind == "stale"), key=lambda o: str(o.source.name)):
            if origin.source.replaceable and self._is_made(origin):
                chain = self.flow.chain_of(self.flow.site_of[origin.source])
                self.ledger.leave(f"{chain[0].name}.output", chain[-1].op, reasons.RETURNED)
                self.ledger.notes[Telling(f"what {chain[-1].name!r} computes leaves the model in float: it is {reasons.RETURNED}")] = None
        for slot in self.specs.uncast:
            self.ledger.leave(self.specs.input_key(slot), "input", reasons.READ_IN_FLOAT)
        for site, key in stand_ins(self.flow, self.grids).items():
            self.actions[site].outputs[0] = key
            self.ledger.left.pop(LeftFloat(site.name, site.op, reasons.TRAINING), None)
        plan_gates(self.ledger, self.config.profile)
        self.ledger.name_members()
        elsewhere = elsewhere_of(self.flow, self.actions, self.quantizers)
        elsewhere.update(plan_unreached(self.tape, self.ledger, self.config, self.placement))
        infos = [*self.flow.infos.values(), *(self.specs.input_info(slot) for slot in self.tape.inputs)]
        return QuantizationPlan(
            routes=self.flow.routes,
            actions=dict(self.actions),
            quantizers=self.quantizers,
            inputs=self.ledger.inputs,
            left=list(self.ledger.left),
            notes=list(dict.fromkeys([*self.ledger.notes, *notes_of(self.config, infos, self.quantizers, self.ledger.left)])),
            regions=find_regions(self.flow, self.placement, self.actions, self.quantizers, self.grids, self.ledger.inputs),
            elsewhere=elsewhere,
            fused=self.flow.fused,
            halves=self.halves.run_by(self.actions, self.config.profile.half_accumulator),
            after=self.after,
            memory=self.memory,
            through=self.through,
            again=self.again,
            unseen=list(self.ledger.unseen),
            mistyped=mistyped(self.config, infos, self.tape.modules),
            alike=find_alike(self.actions, self.quantizers, self.tape.modules),
        )

    # Operands.

    def _operand(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        name = f"{site.name}.input[{slot}]"
        kinds = {"stale" if self._is_made_elsewhere(origin) else self.flow.kind(origin) for origin in origins}
        if (mask := self.flow.mask_reason(site, slot)) and not self._is_half(site):
            if kinds <= {"const", "input"} or all(map(self._is_left_alone, origins)):
                self.ledger.leave(name, site.op, mask)
            return
        if all(self.flow.kind(origin) == "other" for origin in origins):
            if reason := self._reason_against(site, slot):
                self.ledger.leave(name, site.op, reason)
                return
            self.ledger.note_unseen(name, origins)
        for origin in origins if self.placement.on_integers(site) else ():
            taken = origin.kind == "input" and self.placement.takes(origin) and origin.source not in self.specs.uncast
            if taken and not self._is_left_alone(origin):
                self._input(origin.source)
        asked = self.placement.reads(site, slot) and not self.flow.adds_mask(site) and not all(map(self._is_quantized, origins))
        asked = (asked or self.specs.is_cast(site, origins)) and "random" not in kinds
        asked = asked or self.pieces.lie_on_no_grid(site, slot)
        if kinds & {"step", "input", "random"} and not asked:
            changed = [any(o.kind == "stale" and self._is_made(o) for o in step.operands.get(slot, ())) for step in site.steps]
            if (any(changed) and not all(changed)) or self.placement.takes_constant(site, slot, origins):
                self.ledger.leave(name, site.op, "quantized where it was made in some of its calls, not so in others")
            if not all(changed):
                return  # quantized where it was made; random draws (dropout, stochastic depth) are no data of the target
        idle = all(map(self._is_made_elsewhere, origins)) and not self.placement.on_integers(site)  # read by what computes in float
        if not asked and kinds != {"const"} and (idle or not any(map(self._is_made, origins))):
            return
        if self.flow.divides(site, slot) and not self._is_half(site):
            self.ledger.leave(name, site.op, reasons.DIVISOR)
            return
        if (writes := any(slot in step.changed for step in site.steps)) or (kinds != {"const"} and self.flow.is_changed_by_its_view(site)):
            if not (writes and (site in self.flow.absorbed.values() or (slot == 0 and self.specs.is_written_in_float(site, slot)))):
                self.ledger.leave(name, site.op, "changed in place")
        elif not site.visible:
            self.ledger.leave(name, site.op, reasons.unmet(site))
            if kinds == {"const"} and weight_axes(site.op, slot) is not None and self.specs.of(site, "weight") is not None:
                self.ledger.unseen.update(dict.fromkeys(origin.source or name for origin in origins))
        elif kinds == {"const"}:
            self._constant(site, slot, origins)
        elif site.takes_in_training_only(slot) and not self._is_half(site):
            self.ledger.leave(name, site.op, reasons.TRAINING)
        else:
            (self._read if asked else self._where_read)(site, slot, origins)

    def _is_quantized(self, origin: Origin) -> bool:
        return self.placement.is_quantized(origin) or (origin.kind == "step" and self.ledger.holds(made(self.flow, origin)))

    def _is_made(self, origin: Origin) -> bool:
        """Whether a tensor that no mode can change where it is made would be quantized there."""
        if self._is_left_alone(origin):
            return self.placement.takes(origin)
        if not (origin.kind == "stale" or self._is_made_elsewhere(origin)):
            return False
        site = self.flow.site_of[origin.source]
        settled = origin.is_unreplaced and site.visible and (site in self.flow.absorbed or origin.output in self.actions[site].outputs)
        return not settled and self.placement.makes(site)

    def _reason_against(self, site: Site, slot: Slot) -> str | None:
        """Why something that may be data stays in float where it stands; None if it need not."""
        dims = site.dims(slot)
        if self._is_half(site):
            return None
        if is_bias(site.op, slot, dims):
            return "bias in float: computed anew in each call"
        return None if dims and slot in (0, "input") else stays_float(site.kind, dims)

    def _is_half(self, site: Site) -> bool:
        """Whether all that a site takes and returns is rounded to half precision."""
        return self.specs.is_half(self.flow.infos[site])

    def _is_left_alone(self, origin: Origin) -> bool:
        """Whether a tensor that no operation of the model made is nothing that the simulation replaces before it is read."""
        return self.flow.kind(origin) == "other" or (origin.kind == "input" and origin.source in self.tape.unreplaced)

    def _is_made_elsewhere(self, origin: Origin) -> bool:
        """Whether a tensor is quantized where it is read though a mode could do so where it is made."""
        return self._is_left_alone(origin) or (origin.kind == "step" and self.flow.site_of[origin.source] in self.flow.loose)

    def _input(self, slot: InputSlot) -> None:
        key, spec, shared = self.specs.input_key(slot), self.specs.of_input(slot), self._shared(("input", slot))
        if spec is None:
            self.ledger.leave(key, "input", reasons.BY_CONFIG)
        else:
            self.ledger.inputs[slot] = self._add_input(slot, spec) if shared is None else self._join(shared, key, spec)

    def _add_input(self, slot: InputSlot, spec: TensorSpec) -> str:
        key = self.specs.input_key(slot)
        if key in self.quantizers and self.quantizers[key].role != "input":  # a parameter of that name
            key = f"input[{slot}]"
        self.ledger.add(key, "input", spec, "input")
        return key

    def _constant(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        parameter = origins[0].source if len(origins) == 1 and origins[0].direct and isinstance(origins[0].source, str) else None
        dims, axes = site.dims(slot), weight_axes(site.op, slot)
        role = "constant" if axes is None else "weight"
        name = parameter or (f"{site.name}.weight" if axes else f"{site.name}.input[{slot}]")
        half = self._is_half(site)
        if is_bias(site.op, slot, dims) and not half:
            return
        spec = self.specs.of(site, "weight" if axes else "activation")
        if (
            reason := (None if half else stays_float(site.kind, dims))
            or self.placement.constant_reason(site, role)
            or (self.specs.reason([site], "weight" if axes else "activation") if spec is None else None)
        ):
            self.ledger.leave(name, site.op, reason)
            return
        assert spec is not None
        if axes is None and self.placement.joins(site) and (shared := self._shared((site, 0))) is not None:
            self.actions[site].operands[slot] = Use(self._join(shared, name, spec))
            return
        if axes is not None:
            spec = table_spec(weight_spec(spec, axes, dims), site, self.specs.of_chain(self.flow.chain_of(site)))
        if parameter is None:
            spec = computed_spec(for_any_size(spec, self.tape, site, slot, origins))
        known = self.quantizers.get(name)
        if known is not None and (known.spec, known.parameter) != (spec, parameter):  # one parameter read in two ways
            name = f"{site.name}.input[{slot}]"
        self.actions[site].operands[slot] = Use(name, observes=name not in self.quantizers)
        self.ledger.add(name, role, spec, site.op, parameter, reader=site.name)

    def _read(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        """Quantize an operand because the target asks its reader to."""
        tensor = site.tensors(slot)
        source = origins[0] if len(origins) == 1 and origins[0].direct else None
        key = f"{site.name}.input[{slot}]"
        spec = operand_spec(self.specs.of(site, "activation"), site, slot)
        if spec is not None and source is not None and source.kind == "input":
            spec = self.specs.of_input(source.source)
        if spec is None:
            self.ledger.leave(key, site.op, self.specs.reason([site]))
            return
        sources = {found for origin in origins if (found := made(self.flow, origin)) is not None}
        sharing = {self._shared(found) for found in sources}
        shared = sharing.pop() if len(sharing) == 1 else None
        if shared is not None:
            names = {self.flow.chain_of(at)[0].name if isinstance(at, Site) else self.specs.input_key(i) for at, i in sources}
            key = self._join(shared, names.pop() if len(names) == 1 else key, spec)
        elif source is not None and source.kind == "input":
            key = self._add_input(source.source, spec)
        else:
            key = self.read.setdefault((tensor, spec), key) if tensor else key  # readers that agree on how share a quantizer
            maker = next(iter(sources))[0] if len(sources) == 1 else None  # none is known of a scripted module's results
            span = self.placement.known_range(maker) if isinstance(maker, Site) else None
            self.ledger.add_activation(key, spec, site.name, site, site.op, known=span)
        self.actions[site].operands[slot] = self._use(key, site, slot)
        if tensor and (first := self.observed[key, tensor]) != (site, slot):
            self.again[site, slot] = first

    def _use(self, key: str, site: Site, slot: Slot) -> Use:
        """A quantizer at an operand: it observes each tensor where it is read first, and again once it was written to."""
        first = self.observed.setdefault((key, tensor), (site, slot)) if (tensor := site.tensors(slot)) else (site, slot)
        return Use(key, observes=first == (site, slot))

    def _where_read(self, site: Site, slot: Slot, origins: list[Origin]) -> None:
        """Quantize what could not be quantized where it was made, by its producer's name if it has a single one."""
        produced = [origin for origin in origins if origin.kind in ("step", "stale") and self._is_made(origin)]
        producers = {self.flow.site_of[origin.source] for origin in produced}
        met = [[member for member in self.flow.chain_of(producer) if member.visible][-1:] for producer in producers]
        if len(produced) == len(origins) and all(met):
            self.after[site, slot] = frozenset(member for (member,) in met)
        if all(origin in produced and origin.direct and origin.source.visible for origin in origins):
            self.memory[site, slot] = frozenset(producers)
        self.through[site, slot] = frozenset(producer for producer in producers if not producer.visible)
        in_parts = any(origin.kind in ("step", "input") for origin in origins if origin not in produced)  # others are as they were
        moved_too = site.moves and self.flow.routes[site.steps[0].path].skips(site)  # values that are quantized already
        producer = producers.pop() if len(producers) == 1 and not (in_parts or moved_too) else None
        chain = [site] if producer is None else self.flow.chain_of(producer)
        key = f"{chain[0].name}.output" if chain != [site] else f"{site.name}.input[{slot}]"
        if (spec := self.specs.of_chain(chain)) is None:
            self.ledger.leave(key, chain[0].op, self.specs.reason(chain))
            return
        shared = None if producer is None else self._shared((producer, 0))
        changed_by_it = producer is not None and self.flow.works_in_place(producer)  # otherwise by what came after it
        if shared is not None:
            key = self._join(shared, chain[0].name, spec)
        elif (producer, 0) in self.grids and not changed_by_it and producer is not None and producer.replaceable:
            key = f"{site.name}.input[{slot}]"  # where it was made it had other values
        settled = producer is None or not self.flow.is_rewritten(producer)
        tensors = {step.same.get(slot) for step in site.steps} if all(origin.direct for origin in origins) else {None}
        at_its_making = producer is not None and key in self.actions[producer].outputs.values()
        observed = shared is None and settled and None not in tensors and (at_its_making or tensors <= self.whole[key])
        self.whole[key] |= tensors
        known = self.placement.known_range(producer) if producer is not None and changed_by_it else None
        self.actions[site].operands[slot] = Use(key, observes=False) if observed else self._use(key, site, slot)
        self.ledger.add_activation(key, spec, chain[0].name, site, " + ".join(member.op for member in chain), known=known)
        if producer is not None and not producer.replaceable:
            self.grids.update({(producer, origin.output): key for origin in origins if origin.direct})

    # Results.

    def _output(self, site: Site) -> None:
        chain, spec = self.flow.chains[site], self.specs.of_chain(self.flow.chains[site])
        if chain == [site] and (table := table_grid(site, self.actions[site], self.quantizers, spec)) is not None:
            self.grids[site, 0] = table
            return
        if not self.placement.makes(site):
            if (site, 0) not in self.grids and not any(map(self._quantizes, chain)):
                off = self.placement.needs_no_grid(site) and spec is None
                self.ledger.leave(site.name, site.op, self.specs.reason(chain) if off else self.placement.reason(site))
            return
        if not site.replaceable:
            if (leaves := self.flow.leaves(site)) and not site.visible:
                self.ledger.leave(site.name, site.op, reasons.unmet(site))
            if not site.visible or not (leaves or self.flow.is_written_to(site)):
                return
        if site in self.flow.loose:
            if site in self.flow.returned:
                self.ledger.leave(site.name, site.op, reasons.DIVISOR)
            return
        if spec is None:
            self.ledger.leave(chain[0].name, chain[0].op, self.specs.reason(chain))
            return
        op = " + ".join(member.op for member in chain)
        if self.flow.is_changed_through(site, self.specs.copied):
            self.ledger.leave(chain[0].name, op, "changed in place again: quantized where it is read")
            return
        for i in range(site.outputs):
            readers = [reader for step in site.steps for reader in self.tape.readers(step, i)]
            if any(i in step.masked_outputs for step in site.steps) and not self._is_half(site):
                self.ledger.leave(chain[0].name, op, reasons.MASK)
            elif (site, i) not in self.grids and (not readers or any(r.origin.kind == "step" or r.origin.is_unreplaced for r in readers)):
                key = f"{chain[0].name}.output" + (f"[{i}]" if i else "")
                if (shared := self._shared((site, i))) is not None:
                    key = self._join(shared, chain[0].name, spec)
                else:
                    self.ledger.add_activation(key, spec, chain[0].name, site, op, known=self.placement.known_range(site))
                if readers and not site.replaceable:
                    self.ledger.notes[Telling(reasons.UNCLIPPED.format(site.name))] = None
                self.grids[site, i] = self.actions[site].outputs[i] = key

    def _quantizes(self, site: Site) -> bool:
        """Whether an operation takes quantized operands because the target asks it to."""
        uses = self.actions[site].operands.values()
        return self.placement.is_reader(site) or any(self.quantizers[use.key].role != "weight" for use in uses)

    # Shared scales.

    def _shared(self, tensor: Made) -> Site | None:
        """The operation through which a tensor shares its scale, unless the config leaves that operation in float."""
        shared = self.placement.shared.get(tensor)
        return None if shared is None or self._shared_spec(shared) is None else shared

    def _shared_spec(self, shared: Site) -> TensorSpec | None:
        return self.specs.of_chain(self.flow.chain_of(shared))

    def _join(self, shared: Site, name: str, own: TensorSpec) -> str:
        """The key of the quantizer that several tensors share, `name` among them, by the operation that takes them together."""
        key = f"{shared.name}.input"
        spec = self._shared_spec(shared) or own
        if spec != own:
            self.ledger.notes[f"{name!r} shares the scale of {key!r}: what the config says of {name!r} alone is not used"] = None
        if spec.is_running:  # it would follow the average of several tensors, and clip the widest
            self.ledger.notes[f"{key!r} spans several tensors: its range is calibrated ('minmax') and does not run"] = None
            spec = replace(spec, method="minmax")
        if key not in self.quantizers:
            self.ledger.add(key, "activation", spec, shared.op)
        if name != shared.name:
            self.ledger.members[key][name] = None
        return key

    def _joined(self, site: Site) -> None:
        """Where all that an operation takes lies on one shared grid, its result does."""
        key = f"{self.placement.shared[site, 0].name}.input" if self.placement.joins(site) else None
        if key is not None and all(self.ledger.key_of(site, slot) == key for slot in site.operands()):
            self.grids[site, 0] = key
