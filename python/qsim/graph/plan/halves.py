"""Which operations run in half precision."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

from qsim.graph.plan.actions import Actions
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.specs import Specs
from qsim.graph.record.handing_on import Flags
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Slot
from qsim.operations.functions import CREATION, MIXING
from qsim.operations.half import Half

Source = tuple[str, object]  # kind and source of an origin, however it was moved
_CONSTANTS: frozenset[Source] = frozenset({("const", None), ("other", None), ("other", Flags)})


class Halves:
    """The operations of a recorded model that run in half precision, those that only move values too: constants that they read are rounded.

    Parameters
    ----------
    specs : Specs
    """

    def __init__(self, specs: Specs) -> None:
        self.specs, self.flow = specs, specs.flow

    def run_by(self, actions: Mapping[Site, Actions], accumulator: str) -> dict[Site, Half]:
        """What runs them.

        Parameters
        ----------
        actions : mapping of Site to Actions
        accumulator : str
            As `Profile.half_accumulator`.
        """
        return {
            site: Half(
                site.op,
                format,
                narrow=accumulator == format,
                writes=any(0 in step.changed for step in site.steps),
                written_in_float=not site.moves and self.specs.is_written_in_float(site, 0),
                keys=_keys(site, self.flow, actions),
                beside_operations=self._beside_operations(site) if site.moves else (),
            )
            for site in self.flow.sites
            if (format := self._format_of(site)) is not None
        }

    def reads_constant(self, site: Site, slot: Slot) -> bool:
        """Whether what moves or compares values in half precision reads a constant or a literal there, beside data."""
        if site.op not in MIXING or self.flow.is_constant(site) or any(slot in step.changed for step in site.steps):
            return False
        return all(self.flow.kind(origin) in ("const", "other") for origin in site.operands()[slot]) and self._format_of(site) is not None

    def _format_of(self, site: Site) -> str | None:
        """The format in which an operation runs, if that is half precision."""
        runs = self._is_half(site) and (self._is_beside_halves(site) if site.moves else not self.flow.is_constant(site))
        spec = self.specs.of(site, "activation") if runs else None
        return None if spec is None else spec.dtype

    def _is_half(self, site: Site) -> bool:
        """Whether an operation is in half precision: losses and metrics are in float, whatever the config says of them."""
        return site not in self.flow.metrics and self.specs.is_half(self.flow.infos[site])

    def _is_beside_halves(self, site: Site) -> bool:
        """Whether what only moves values rounds what it puts in: if what it reads was computed in half precision. What no operation has
        computed is rounded by each that reads it, and there as a whole, where one of them is left in float."""
        if makers := _makers(site, self.flow):
            return all(map(self._is_half, makers))
        origins = () if site.op in CREATION else itertools.chain(*site.operands().values())
        handed_on = {(origin.kind, origin.source) for origin in origins} or _CONSTANTS
        return handed_on.isdisjoint(self._read_in_float) and all(map(self._is_half, _beside(site, self.flow)))

    def _beside_operations(self, site: Site) -> tuple[str, ...]:
        sites = _makers(site, self.flow) or {at for at in _beside(site, self.flow) if not (at.moves or self.flow.is_constant(at))}
        return tuple(sorted({self.flow.chain_of(self.flow.end_of(at))[0].name for at in sites}))

    @cached_property
    def _read_in_float(self) -> set[Source]:
        """What operations on data read that are left in float, where no operation has computed it."""
        readers = [site for site in self.flow.sites if not (site.moves or self.flow.is_constant(site))]
        operands = [site.operands() for site in readers if site in self.flow.metrics or self.specs.of(site, "activation") is None]
        origins = itertools.chain(*(found for each in operands for found in each.values()))
        return {(origin.kind, origin.source) for origin in origins if origin.kind not in ("step", "stale")}


def _keys(site: Site, flow: Dataflow, actions: Mapping[Site, Actions]) -> tuple[str, ...]:
    """Of the quantizers at a site, or at others of its chain; of those beside it, if it only moves values."""
    left, seen = [site], {site}
    while left:
        there = [each for one in left for each in flow.chain_of(one)]
        found = [key for each in there if each in actions for key in actions[each].standing()]
        if found:
            return tuple(dict.fromkeys(found))
        left = [each for one in left if one.moves for each in _beside(one, flow) if each not in seen]
        seen.update(left)
    return ()


def _makers(site: Site, flow: Dataflow) -> set[Site]:
    """The operations on data that computed what a site hands on, however it was moved on the way."""
    found, seen, left = set[Site](), {site}, [site]
    while left:
        sources = {flow.site_of[o.source] for o in itertools.chain(*left.pop().operands().values()) if o.kind in ("step", "stale")} - seen
        seen |= sources
        left += [source for source in sources if source.moves]
        found |= {source for source in sources if not (source.moves or flow.is_constant(source))}
    return found


def _beside(site: Site, flow: Dataflow) -> set[Site]:
    """Whose precision a site has that only moves values: of what it reads, or of who reads the numbers that it makes."""
    origins = {origin for found in site.operands().values() for origin in found if origin.kind in ("step", "stale")}
    makers = {maker for origin in origins if not flow.is_constant(maker := flow.site_of[origin.source])}
    made = {tensor for step in site.steps for tensor in step.made}
    return makers or {flow.site_of[step] for step in flow.tape.steps if not made.isdisjoint(step.same.values())}
