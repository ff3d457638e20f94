"""Questions about a recording that a plan depends on: what is constant, who reads what, which operations run as one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Sequence

from qsim.config.override import SiteInfo
from qsim.config.profile import selects
from qsim.graph.plan import reasons
from qsim.graph.plan.rules import hands_on, is_divisor, weight_axes
from qsim.graph.record.handing_on import Flags
from qsim.graph.record.routes import Site, build_routes
from qsim.graph.record.tape import InputSlot, Origin, Reader, Slot, Step, Tape
from qsim.operations.functions import METRICS, name_of
from qsim.operations.onnx_types import onnx_type
from qsim.operations.recurrent import RECURRENT_LAYERS

ATTENTION = onnx_type("scaled_dot_product_attention")
Chain = Sequence[frozenset[str]]  # types of operations that run as one, with alternatives


class Dataflow:
    """The sites of a recorded model and how tensors run between them.

    Parameters
    ----------
    tape : Tape
    chains, half_chains : sequence of sequence of str
        Operations that run as one, in integers and in half precision: see `qsim.Profile`.
    apart : callable
        Of an operation and the one that reads it: whether something keeps them from running as one.
    is_half : callable
        Whether an operation runs in half precision: what it returns is rounded, whatever it is.
    gates : sequence of str
        Types of operations that eager modes meet though Dynamo hides them: see `qsim.Profile`.

    Attributes
    ----------
    routes, sites, site_of
        As `build_routes` gives them; sites in the order in which they ran.
    absorbed : dict of Site to Site
        The next operation of the chain, for each but the last of a chain; and the reader of what no grid holds: see `_find_inner`.
    fused : dict of Site to Site
        Of `absorbed`, what the target's chains say.
    loose : set of Site
        Those whose results are quantized where they are read: the counted, and what must not be zero for one of several readers.
    chains : dict of Site to list of Site
        Last operation of each chain (most are of one): all of the chain, first operation first.
    returned : set of Site
        Whose results the model returns.
    metrics : set of Site
        Losses and metrics, and what they alone read.
    counted : set of Site
        What computes positions, times and masks from integers and flags alone: in float, as constants are computed.
    infos : dict of Site to SiteInfo
        What overrides may ask about.
    """

    def __init__(
        self,
        tape: Tape,
        chains: Sequence[Sequence[str]],
        half_chains: Sequence[Sequence[str]],
        apart: Callable[[SiteInfo, SiteInfo], bool],
        is_half: Callable[[SiteInfo], bool],
        gates: Sequence[str] = (),
    ) -> None:
        self.tape = tape
        gated = [step for step in tape.steps if not step.hook and selects(gates, onnx_type(name_of(step.func)))]
        self.routes, self.site_of = build_routes(tape, {step for step in tape.steps if step.visible}.union(gated).__contains__)
        self.sites = list(dict.fromkeys(self.site_of.values()))
        self._weighted = self._weighted_steps()
        self._constant, self.state = self._constant_steps()
        self.returned = {self.site_of[origin.source] for origin in tape.results if origin.kind in ("step", "stale")}
        self.infos = self._infos()
        self._apart, self._is_half = apart, is_half
        self.metrics = self._metrics()
        self.counted = self._counted_sites()
        self._made_masks = self._masks()
        self._call_of = {step: number for number, call in enumerate(tape.calls) for step in call.steps}
        self.loose = set(self.counted)
        self._handing_on: set[Site] = set()  # parts of what must not be zero that are zero where their operand is
        self.absorbed = self._absorbed(_entries(chains), _entries(half_chains))
        self.fused = dict(self.absorbed)
        self._find_inner()
        self.chains = self._chains()

    def _weighted_steps(self) -> set[Step]:
        """Steps that read a parameter, or what was computed from one."""
        found: set[Step] = set()
        for step in self.tape.steps:
            origins = itertools.chain(step.side, *step.operands.values())
            if any((o.kind == "const" and o.source in self.tape.parameters) or o.source in found for o in origins):
                found.add(step)
        return found

    def _constant_steps(self) -> tuple[dict[Step, str], set[str]]:
        """Steps that compute on constants alone: "const", or "random" if random numbers are among them. And the names of parameters and
        buffers that are no constants: the forward writes into them what it computed from data.

        Multiply-accumulates of a forward that read a parameter are never counted: a product of two weights is arithmetic of the target.
        Those of parametrizations and hooks, such as a spectral norm, are: they compute a weight, which is a constant of the target. So are
        those of buffers and positions: the angles of a rotary embedding.
        """
        state: set[str] = set()
        made_before = {step for step in self.tape.steps if step.hook or self.tape.is_parametrization(step.path)}
        while True:
            found: dict[Step, str] = {}
            for step in self.tape.steps:
                origins = {*step.side, *(o for origins in step.operands.values() for o in origins)}
                kinds = {found.get(o.source, "other" if o.source in state else o.kind) for o in origins}
                if kinds <= {"const", "random"} and (step.kind != "mac" or step not in self._weighted or step in made_before):
                    found[step] = "random" if "random" in kinds else "const"
            data = {
                name
                for name, origins in self.tape.written.items()
                if any(found.get(o.source, o.kind) not in ("const", "random") or o.source in state for o in origins)
            }
            if data <= state:
                return found, state
            state |= data

    def _metrics(self) -> set[Site]:
        """Losses, by name; single numbers that nothing but these reads, or that leave the model; on integer grids what is compared, or
        turned into integers, and read by nothing else; what only these read, up to the layers, activations and additions that the
        network ends with. State that the rest of the network reads in a later call is none."""
        carried: set[Origin] = set()
        while True:
            found = self._metrics_beside(self.tape.results | carried)
            reading = [origins for site in self.sites if site not in found for origins in site.operands().values()]
            read = {o.source for origins in reading for o in origins if o.kind == "const"}
            now = {origin for name in self.tape.written.keys() & read for origin in self.tape.written[name]}
            if now <= carried:
                return found
            carried |= now

    def _metrics_beside(self, results: set[Origin]) -> set[Site]:
        found: set[Site] = set()
        for site in reversed(self.sites):
            readers = self.readers(site)
            reading = [reader.step and self.site_of[reader.step] for reader in readers]
            alone = all(other in found for other in reading if other is not None)
            is_number = alone and all(step.scalar for step in site.steps)
            data = results.union(*(reader.step.spectra for reader in readers if reader.step))
            is_part = alone and None not in reading and bool(reading) and self._is_beside(site)
            is_asked = bool(readers) and all(reader.slot is None and reader.origin not in data for reader in readers)
            is_asked = is_asked and site.kind != "mac" and not self._is_half(self.infos[site])  # who compares there has rounded
            if site.op in METRICS or is_number or is_part or is_asked:
                found.add(site)
        return found

    def _is_beside(self, site: Site) -> bool:
        """Whether an operation is no layer, activation or addition of what layers return: a network does not end with it."""
        if site.kind != "add":
            return site.kind == "op" and not site.moves
        sources = [origin.source for origins in site.operands().values() for origin in origins if origin.kind in ("step", "stale")]
        return all(source.kind == "op" for source in sources)

    def _counted_sites(self) -> set[Site]:
        """What is computed from integers, flags and constants alone, without weights: positions, times, masks."""
        found: set[Site] = set()
        for site in self.sites:
            counts = site.kind in ("op", "add", "act") or (site.kind == "mac" and self._weighted.isdisjoint(site.steps))
            counts = counts and site.type != "Gather" and not self.is_constant(site) and not self._is_half(self.infos[site])
            read = itertools.chain(*site.operands().values(), *(step.spectra for step in site.steps))
            if counts and all(self._is_count(origin, found) for origin in read):
                found.add(site)
        return found

    def _is_count(self, origin: Origin, counted: Container[Site]) -> bool:
        if origin.kind == "input":
            dtype = self.tape.inputs[origin.source]
            return origin.source in self.tape.unreplaced and not (dtype.is_floating_point or dtype.is_complex)
        return origin.source is Flags or self.kind(origin) == "const" or (origin.kind == "step" and self.site_of[origin.source] in counted)

    def _masks(self) -> dict[Site, set[Slot]]:
        """Which operands are masks by what they are made of: counts that are added to scores which a softmax reads, or that attention takes
        as one operation. They are zero without padding: no range of such batches holds a mask. And by what they held."""
        found: dict[Site, set[Slot]] = {}
        for site in reversed(self.sites):
            operands = site.operands()
            if site.type == ATTENTION:
                operands = {slot: origins for slot, origins in operands.items() if slot in (3, "attn_mask")}
            elif site.type not in ("Add", "Sub") or not (
                (reader := self.sole_reader(site)) in found or (reader and reader.type == "Softmax")
            ):
                continue  # `in found`: another mask is added to the sum
            made = {slot for slot, origins in operands.items() if all(self._is_count(origin, self.counted) for origin in origins)}
            made -= {slot for slot in made if {*map(self.kind, operands[slot])} == {"const"}}
            if masks := made | {slot for step in site.steps for slot in step.masks if slot in operands}:
                found[site] = masks
        return found

    def mask_reason(self, site: Site, slot: Slot) -> str | None:
        """Why an operand is a mask, by what it held, or by what it is made of and where it is added; None if it is none."""
        if any(slot in step.masks for step in site.steps):
            return reasons.MASK
        return reasons.MADE_MASK if slot in self._made_masks.get(site, ()) else None

    def adds_mask(self, site: Site) -> bool:
        """Whether an operation that multiplies no matrices takes a mask."""
        return site.kind != "mac" and any(self.mask_reason(site, slot) for slot in site.operands())

    def is_constant(self, site: Site) -> bool:
        """Whether it computes on constants alone in all its calls."""
        return all(step in self._constant for step in site.steps)

    def kind(self, origin: Origin) -> str:
        """As `Origin.kind`, with what was computed from constants among the constants, and state among "other"."""
        return self._constant.get(origin.source, "other" if origin.source in self.state else origin.kind)

    def readers(self, site: Site) -> list[Reader]:
        """Everything that reads any result."""
        return [reader for step in site.steps for i in step.results for reader in self.tape.readers(step, i)]

    def works_in_place(self, site: Site) -> bool:
        """Whether it changes what it is given."""
        return any(step.changed for step in site.steps)

    def leaves(self, site: Site) -> bool:
        """Whether nothing reads a result of it, or the model returns one that cannot be replaced where it is made."""
        readers = self.readers(site)
        return not readers or any(reader.step is None and reader.origin.kind == "stale" for reader in readers)

    def is_written_to(self, site: Site) -> bool:
        """Whether an operation that reads a result of it writes into that."""
        return any(reader.step is not None and reader.slot in reader.step.changed for reader in self.readers(site))

    def is_rewritten(self, site: Site) -> bool:
        """Whether a result of it is written to afterwards."""
        return any((step, i) in self.tape.rewritten for step in site.steps for i in step.results)

    def is_changed_by_its_view(self, site: Site) -> bool:
        """Whether what it makes a view of is written to afterwards: a copy would hide that."""
        return site.moves and any((step, 0) in self.tape.rewritten for step in site.steps)

    def is_changed_through(self, site: Site, copied: Container[InputSlot]) -> bool:
        """Whether what `site` changes in place is written to again, and not read by what it returns alone: a copy would hide that.
        `copied`: the arguments of which the model gets copies."""
        if not (self.works_in_place(site) and self.is_rewritten(site)):
            return False
        chain = self._changed_in_turn(site)
        return any(self._outlives(other, copied) or self._is_read_by_older_names(other) for other in chain)

    def _is_read_by_older_names(self, site: Site) -> bool:
        """Whether something reads what a site changed by a name that it did not return. What no mode meets returns no name of its own."""
        return site.replaceable and any(reader.origin.kind == "stale" for reader in self.readers(site))

    def _changed_in_turn(self, site: Site) -> set[Site]:
        """The sites that change in place what a site does, before it and after it."""
        found, left = set[Site](), [site]
        while left:
            site = left.pop()
            if site in found or not self.works_in_place(site):
                continue
            found.add(site)
            left += [self.site_of[origin.source] for origin in self._changed(site) if origin.kind in ("step", "stale")]
            left += [self.site_of[r.step] for r in self.readers(site) if r.step is not None and r.slot in r.step.changed]
        return found

    def _outlives(self, site: Site, copied: Container[InputSlot]) -> bool:
        """Whether what a site writes into is a buffer of the model, an argument of its, or something else that others know."""
        return any(
            origin.kind == "other"
            or (origin.kind == "const" and origin.source is not None)
            or (origin.kind == "input" and origin.source not in copied)
            for origin in self._changed(site)
        )

    @staticmethod
    def _changed(site: Site) -> list[Origin]:
        """Where what a site writes into came from."""
        return [origin for step in site.steps for slot in step.changed for origin in step.operands.get(slot, ())]

    def sole_reader(self, site: Site) -> Site | None:
        """The only site that reads a result of `site`; None if there are several, or what reads it is no operation."""
        sites = {None if reader.step is None else self.site_of[reader.step] for reader in self.readers(site)}
        return next(iter(sites)) if len(sites) == 1 else None

    def chain_of(self, site: Site) -> list[Site]:
        """The chain that ends with a site; the site alone where it is inside one."""
        return self.chains.get(site, [site])

    def end_of(self, site: Site) -> Site:
        """The last of the operations that kernels compute together with `site`."""
        passed = {site}
        while (following := self.absorbed.get(site)) is not None and following not in passed:
            site = following
            passed.add(site)
        return site

    def _absorbed(self, integer: Sequence[Chain], half: Sequence[Chain]) -> dict[Site, Site]:
        found: dict[Site, Site] = {}
        inside: set[Site] = set()
        for site in self.sites:
            if site in inside:
                continue
            run, chains = [site], half if self._is_half(self.infos[site]) else integer
            longest = max(map(len, chains), default=1)
            while len(run) < longest and (reader := self._handed_to(run[-1])) is not None and reader not in run:
                if self._apart(self.infos[run[-1]], self.infos[reader]):
                    break
                run.append(reader)
            length = max((len(chain) for chain in chains if _fits(run, chain)), default=1)
            found.update(itertools.pairwise(run[:length]))
            inside.update(run[1:length])
        return found

    def _find_inner(self) -> None:
        """Note in `absorbed` results that no grid holds, with the operation that alone reads them: kernels compute the two as one.

        A softmax reads scores that a mask made -Inf. A division, a root or a logarithm reads what must not be zero, and a grid rounds
        small values to zero: the parts of a normalization that is written out, ``x / (variance + eps).sqrt()``, are one operation.
        What is changed in place again and again, ``total.index_add_(...)``, is one sum.
        """
        for site in reversed(self.sites):
            info, reader, readers, visible = self.infos[site], self.sole_reader(site), self.readers(site), site.visible
            apart = self._is_half(info) or (reader is not None and self._apart(info, self.infos[reader]))
            if apart or self.is_constant(site) or site.training_only or site in self.absorbed:
                continue
            reading = {(self.site_of[r.step], r.slot) if r.step is not None and r.slot is not None else None for r in readers}
            divides = [at is not None and self.divides(*at) for at in reading]
            masked = (site in self._made_masks and site.type != ATTENTION) or any(step.masked_outputs for step in site.steps)
            stale = all(r.origin.kind == "stale" and not (r.origin.is_unreplaced and visible) for r in readers)
            grows = readers and stale and all(r.step is not None and r.slot in r.step.changed for r in readers)
            if reader is not None and not reader.training_only and (masked or grows or (divides and all(divides))):
                self.absorbed[site] = reader
                self._handing_on |= {site} if divides and all(divides) and all(map(hands_on, site.steps)) else set()
            elif any(divides):
                self.loose.add(site)

    def divides(self, site: Site, slot: Slot) -> bool:
        """Whether what `site` takes at `slot` must not be zero, for itself or for the one that it is a part of."""
        return site in self._handing_on or any(is_divisor(step, slot) for step in site.steps)

    def _handed_to(self, site: Site) -> Site | None:
        """The sole reader, if it takes the result as its main operand."""
        return self.sole_reader(site) if all(self._is_handed_on(reader) for reader in self.readers(site)) else None

    def _is_handed_on(self, reader: Reader) -> bool:
        """Whether a result reaches the reader's main operand as it was returned, or is changed there in place for all who know it; not in
        another call of the same container."""
        in_place = reader.step is not None and reader.slot in reader.step.changed
        source: Step = reader.origin.source
        if reader.step is not None and reader.step.path == source.path and self._call_of[reader.step] != self._call_of[source]:
            return False
        returned = reader.origin.kind == "step" or (reader.origin.is_unreplaced and source.visible)
        return reader.slot in (0, "input") and reader.origin.direct and (returned or in_place)

    def _chains(self) -> dict[Site, list[Site]]:
        producers, chains = defaultdict[Site, list[Site]](list), dict[Site, list[Site]]()
        for site, reader in self.absorbed.items():
            producers[reader].append(site)
        for site in self.sites:
            if site not in self.absorbed:
                chain = [site]
                while len(producers[chain[0]]) == 1:  # several: one activation at the end of several layers goes by its own name
                    chain.insert(0, producers[chain[0]][0])
                chains[site] = chain
        return chains

    def _infos(self) -> dict[Site, SiteInfo]:
        weights = {site: self._weight(site) for site in self.sites}
        weighted = [site for site in self.sites if weights[site] is not None and not site.training_only]
        first, last = (site.layer or site.name for site in (weighted[0], weighted[-1])) if weighted else (None, None)
        shapes, found = self.tape.shapes, {}
        for site in self.sites:
            shape, name = shapes.get(weights[site] or ""), site.layer or site.name
            found[site] = SiteInfo(site.name, site.op, self._layer(site.steps[0]), shape, name == first, name == last, site.layer)
        return found

    def _layer(self, step: Step) -> str | None:
        """The class of the torch.nn module that made the call: a leaf, or the recurrent layer that is written out around it."""
        if step.leaf:
            return self.tape.modules.get(step.leaf)
        path, layers = step.path, self.tape.layers
        while path not in layers:  # a frame, as layers and steps in time have one each
            path = path.rpartition(".")[0]
        return layers[path].name if layers[path].name in RECURRENT_LAYERS else None

    def _weight(self, site: Site) -> str | None:
        """The parameter that a site multiplies with, or members of it; "" if it computes one; None if it has no weight."""
        if self.is_constant(site):
            return None
        for slot, origins in site.operands().items():
            if weight_axes(site.op, slot) is not None and {self.kind(origin) for origin in origins} == {"const"}:
                stacks = {origin.source for origin in origins} if slot in site.steps[0].stacks else set()
                return stacks.pop() if len(stacks) == 1 else site.steps[0].constants.get(slot, "")
        return None


def _entries(chains: Sequence[Sequence[str]]) -> list[Chain]:
    return [[frozenset(entry.split("|")) for entry in chain] for chain in chains]


def _fits(run: Sequence[Site], chain: Chain) -> bool:
    """Whether the chain describes the beginning of a run of sites."""
    return len(chain) <= len(run) and all(site.type in types for site, types in zip(run, chain, strict=False))
