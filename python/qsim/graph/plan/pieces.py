"""What was put together, and lies on no grid though its parts do."""

from __future__ import annotations

from qsim.graph.plan.ledger import Ledger
from qsim.graph.plan.rules import is_multiplied
from qsim.graph.plan.sharing import made
from qsim.graph.plan.specs import Specs
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Origin, Slot


class Pieces:
    """Questions about factors of products.

    Parts may come from several grids, ``x[:, :4] = y``, ``where(mask, x, y)``, or stand beside numbers that lie on none,
    ``where(mask, self.token, y)``. Where evaluation reads a factor, what training does to it is no reason.
    """

    def __init__(self, specs: Specs, ledger: Ledger) -> None:
        self._specs, self._flow, self._ledger = specs, specs.flow, ledger

    def lie_on_no_grid(self, site: Site, slot: Slot) -> bool:
        """Whether a product reads such a factor in any of its calls, on integers."""
        if site.kind != "mac" or not is_multiplied(site.op, slot, site.dims(slot)) or not self._specs.placement.on_integers(site):
            return False
        if self._specs.is_half(self._flow.infos[site]):
            return False
        return any(self._are_several(step.operands.get(slot, frozenset())) for step in site.evaluated)

    def _are_several(self, origins: frozenset[Origin]) -> bool:
        grids = set(map(self._grid, origins)) - {None}
        beside = any(origin.mixed or (origin.kind == "step" and self._flow.kind(origin) == "const") for origin in origins)
        return len(grids) > 1 or (bool(grids) and beside)

    def _grid(self, origin: Origin) -> object:
        """What stands for the grid that a tensor is on, or will be: what makes it may come later in a plan, as in a loop."""
        if (known := self._ledger.grid_of(origin)) is not None or self._flow.kind(origin) != "step":
            return known
        maker, placement = self._flow.site_of[origin.source], self._specs.placement
        idle = maker.training_only or maker in self._flow.metrics or maker not in self._flow.chains
        if idle or not placement.makes(maker) or self._specs.of_chain(self._flow.chains[maker]) is None:
            return None
        shared = placement.shared.get((maker, origin.output))
        return made(self._flow, origin) if shared is None else f"{shared.name}.input"
