"""What runs as one operation, and who besides it decides whether the tensors around it lie on integer grids.

Pure, as the plan is. A fallback (`QuantSim.fallback`) is about operations; a tensor at the border between one that falls back and one
that does not is still quantized. `Post.deciders` says, for every place where a quantizer stands, whose integers need it there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import cached_property

from qsim.config.profile import selects
from qsim.graph.plan.actions import Actions, Neighbours, Operation, PlannedQuantizer, Post, Readers, Regions, Unplanned
from qsim.graph.plan.computed_weights import ancestors
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.placement import Placement
from qsim.graph.plan.sharing import Made
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import InputSlot, Origin, Slot


def find_regions(
    flow: Dataflow,
    placement: Placement,
    actions: Mapping[Site, Actions],
    quantizers: Mapping[str, PlannedQuantizer],
    grids: Mapping[Made, str],
    inputs: Mapping[InputSlot, str],
) -> Regions:
    """The operations of a planned model, in evaluation and training, but for those that compute on constants alone.

    Parameters
    ----------
    flow, placement, actions, quantizers, inputs
        Of the plan.
    grids : mapping of Made to str
        Keys of the quantizers on whose grids results lie.
    """
    finder = _Finder(flow, placement, actions, quantizers, grids)
    neighbours = {site: finder.neighbours(site) for site in finder.name_of}
    unplanned = [found for site in finder.name_of for found in finder.unplanned(site, inputs)]
    posts = {slot: finder.input(slot, key) for slot, key in inputs.items()}
    left = {site: readers for site in finder.name_of if (readers := finder.left_to_readers(site)) is not None}
    made = {site: slots for site in finder.name_of if (slots := finder.made(site))}
    return Regions(finder.operations, neighbours, posts, unplanned, left, finder.older_names, made)


class _Finder:
    def __init__(
        self,
        flow: Dataflow,
        placement: Placement,
        actions: Mapping[Site, Actions],
        quantizers: Mapping[str, PlannedQuantizer],
        grids: Mapping[Made, str],
    ) -> None:
        self.flow, self.placement, self.actions, self.quantizers, self.grids = flow, placement, actions, quantizers, grids
        self._has_activations = any(map(self._is_data, quantizers))
        units: dict[Site, list[Site]] = {}
        for site in flow.sites:
            if not (flow.is_constant(site) or site.moves):
                units.setdefault(flow.end_of(site), []).append(site)
        self.name_of = {site: flow.chain_of(end)[0].name for end, members in units.items() for site in members}
        self.operations = {self.name_of[end]: self._operation(self.name_of[end], members) for end, members in units.items()}
        for site in flow.sites:
            if site.moves and (maker := self._maker_behind(site)) is not None:
                self.name_of[site] = self.name_of[maker]

    def _maker_behind(self, site: Site) -> Site | None:
        """The operation whose result is quantized where `site`, which only moves values, reads it first."""
        origins = [origin for slot in self._at(site).operands for origin in site.operands()[slot] if origin.kind != "input"]
        return next((maker for origin in origins if (maker := self.flow.site_of.get(origin.source)) in self.name_of), None)

    def _operation(self, name: str, members: list[Site]) -> Operation:
        at = [self._at(site) for site in members]
        quantized = any(found.operands or found.outputs or found.stacks for found in at) or any(map(self._grids_of, members))
        names = tuple(dict.fromkeys(site.name for site in members))
        hidden = tuple(site.name for site in members if not site.visible)
        return Operation(name, " + ".join(site.op for site in members), names, quantized, hidden)

    def _at(self, site: Site) -> Actions:
        return self.actions.get(site, Actions())

    def _grids_of(self, site: Site) -> dict[int, str]:
        return {i: self.grids[site, i] for i in range(site.outputs) if (site, i) in self.grids}

    def _quantized(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in names if self.operations[name].quantized))

    def _integer(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those that run in integers; all of them where none does: then a fallback of all of them changes the tensor."""
        names = tuple(dict.fromkeys(names))
        return self._quantized(names) or names

    def _readers(self, site: Site, output: int) -> list[str]:
        readers = [reader for step in site.steps for reader in self.flow.tape.readers(step, output)]
        sites = [self.flow.site_of[reader.step] for reader in readers if reader.step is not None and reader.slot is not None]
        return [self.name_of[at] for at in sites if at in self.name_of and not (at.training_only or at.moves)]

    def input(self, slot: InputSlot, key: str) -> Post:
        """Where the quantizer of an input of the model stands."""
        reading = [
            self.name_of[site]
            for site in self.name_of
            if any(o.kind == "input" and o.source == slot for origins in site.operands().values() for o in origins)
        ]
        return Post(key, "input", self._integer(reading), tuple(reading))

    def neighbours(self, site: Site) -> Neighbours:
        name, operands, actions = self.name_of[site], site.operands(), self._at(site)
        if (maker := self._maker_behind(site)) is not None and site.moves:
            post = Post(next(iter(actions.operands.values())).key, name, self._deciders(maker, 0), (name, *self._readers(maker, 0)))
            return Neighbours(name, tuple(actions.operands), frozenset(), 0, dict.fromkeys(actions.operands, post), {}, {}, {})
        makers = {slot: self._makers(operands[slot]) if self._is_data(use.key) else () for slot, use in actions.operands.items()}
        joined = {i: key for i, key in self._grids_of(site).items() if i not in actions.outputs}
        readers = {i: self._readers(site, i) for i in range(site.outputs)}
        return Neighbours(
            name,
            tuple(operands),
            frozenset(slot for step in site.steps for slot in step.changed),
            site.outputs,
            {
                slot: Post(use.key, name, (name, *self._integer(makers[slot])), (name, *self._makers(operands[slot], wanted=False)))
                for slot, use in actions.operands.items()
            },
            makers,
            {i: Post(key, name, self._deciders(site, i), (name, *readers[i])) for i, key in actions.outputs.items()},
            {i: Post(key, name, reading, (name, *readers[i])) for i, key in joined.items() if (reading := self._quantized(readers[i]))},
            None if actions.gate is None else Post(actions.gate, name, (name,), (name,)),
            tuple(Post(key, name, (name,), (name,)) for key in actions.stacks.values()),
            self.flow.is_changed_through(site, ()),
        )

    def unplanned(self, site: Site, inputs: Container[InputSlot]) -> list[Unplanned]:
        name, planned = self.name_of[site], self._at(site).operands
        if site.training_only or site.moves or not self.operations[name].quantized:
            return []
        found = []
        for slot, origins in site.operands().items():
            data = [origin for origin in origins if self.flow.kind(origin) in ("step", "stale", "input")]
            inside = all(self._is_inside(origin, name) for origin in data)
            if data and slot not in planned and not inside and not any(self._has_grid(origin, inputs) for origin in data):
                makers = [maker for origin in data for maker in self._names_of(origin)]
                found.append(Unplanned(name, (f"{site.name}.input[{slot}]", *dict.fromkeys(makers))))
        return found

    def left_to_readers(self, site: Site) -> Readers | None:
        """Those that read the results of a site, if these are in float because of them: inside of a chain, compared, read by what the
        target computes in float, or by an older name alone. None where the results would be in float whatever reads them, or modes cannot
        tell who does."""
        readers = self.flow.readers(site)
        if (older := self.older_names.get(site)) is not None and older.key and not self._at(site).outputs:
            return older._replace(names=frozenset(), returned=False)
        reading = [self.flow.site_of[reader.step] for reader in readers if reader.step is not None]
        ours = site.visible and not (site.moves or site.training_only or self._grids_of(site))
        if not ours or not all(at.visible for at in reading) or any(reader.origin.kind == "stale" for reader in readers):
            return None
        inner = site in self.flow.absorbed and bool(self._at(self.flow.end_of(site)).outputs)
        if not selects(self.placement.profile_of(site).outputs, site.type):
            return None
        if not (inner or (self._has_activations and (site in self.flow.metrics or not self.placement.makes(site)))):
            return None
        return Readers(frozenset(at.name for at in reading), any(reader.step is None for reader in readers))

    @cached_property
    def older_names(self) -> dict[Site, Readers]:
        return {site: readers for site in self.name_of if (readers := self.older_name(site)) is not None}

    def older_name(self, site: Site) -> Readers | None:
        """Those that read what a site changes in place by a name from before, with what quantizes it: nothing where it is written to again,
        since others may read a copy then. None where it is in float in any case."""
        flow, at = self.flow, self._at(site)
        changes_it = all(step.changed == {0} for step in site.steps) and site.visible and site.replaceable and not site.training_only
        if not changes_it or site.moves:
            return None
        stale = [reader for reader in flow.readers(site) if reader.origin.kind == "stale"]
        reading = [(flow.site_of[reader.step], reader.slot) for reader in stale if reader.step is not None]
        uses = [use for other, slot in reading if (use := self._at(other).operands.get(slot)) is not None]  # type: ignore[arg-type]
        keys = {at.outputs[0]} if 0 in at.outputs else {use.key for use in uses}
        if not keys:
            return None
        readers = Readers(frozenset(other.name for other, _ in reading), any(reader.step is None for reader in stale))
        if len(keys) > 1 or flow.is_rewritten(site):
            return readers
        spec = self.quantizers[key := keys.pop()].spec
        return readers._replace(key=key, in_parts=spec.axis is None and spec.block_size is None and not spec.is_dynamic)

    def made(self, site: Site) -> dict[Slot, str]:
        """The operands of a site that hold, on a grid of their own, what the forward makes of no parameter or buffer."""
        origins, found = site.operands(), {}
        for slot, use in self._at(site).operands.items():
            planned = self.quantizers[use.key]
            ours = planned.role in ("weight", "constant") and planned.parameter is None and planned.spec.has_scale
            if ours and not planned.spec.is_dynamic and not ancestors(origins[slot]):
                found[slot] = use.key
        return found

    def _is_inside(self, origin: Origin, name: str) -> bool:
        """Whether an origin is a result of the operation of that name itself."""
        return origin.kind != "input" and self.name_of.get(self.flow.site_of[origin.source]) == name

    def _has_grid(self, origin: Origin, inputs: Container[InputSlot]) -> bool:
        if origin.kind == "input":
            return origin.source in inputs
        return (self.flow.site_of[origin.source], origin.output) in self.grids

    def _names_of(self, origin: Origin) -> list[str]:
        if origin.kind == "input":
            return ["input", f"input[{origin.source}]", str(origin.source)]
        site = self.flow.site_of[origin.source]
        return [self.flow.chain_of(site)[0].name, site.name]

    def _is_data(self, key: str) -> bool:
        return self.quantizers[key].role in ("activation", "input")

    def _makers(self, origins: Iterable[Origin], *, wanted: bool = True) -> tuple[str, ...]:
        """The operations that make an operand; those alone whose result the target wants quantized, if `wanted`."""
        sites = [self.flow.site_of[origin.source] for origin in origins if origin.kind in ("step", "stale")]
        found = [site for site in sites if site in self.name_of and (self.placement.makes(site) or not wanted)]
        return tuple(dict.fromkeys(self.name_of[site] for site in found))

    def _deciders(self, site: Site, output: int) -> tuple[str, ...]:
        readers = self._readers(site, output)
        if site.training_only and readers:  # it stands in for a tensor of evaluation
            return self._integer(readers)
        return tuple(dict.fromkeys((self.name_of[site], *self._quantized(readers))))
