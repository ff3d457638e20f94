"""Results of training that take the place of one of evaluation: NAFNet pools over the image where it pools over windows in evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.sharing import Made, made
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Reader


def stand_ins(flow: Dataflow, grids: Mapping[Made, str]) -> dict[Site, str]:
    """The quantizers of such results, by the site that runs in training only: that of the tensor which they stand in for.

    Not of the same tensor with noise (dropout, stochastic depth), whose values go beyond its range.

    Parameters
    ----------
    flow : Dataflow
    grids : mapping of Made to str
        Keys of the quantizers on whose grids tensors lie.
    """
    found = {}
    for site in flow.sites:
        if not site.training_only or not site.replaceable or site not in flow.chains:
            continue
        replaced = [_replaced(flow, reader) for reader in flow.readers(site)]
        tensors = set().union(*replaced)
        keys = {grids.get(tensor) for tensor in tensors}
        key = keys.pop() if len(keys) == 1 and all(replaced) else None
        if key is not None and tensors.isdisjoint(_sources(flow, site)):
            found[site] = key
    return found


def _replaced(flow: Dataflow, reader: Reader) -> set[Made]:
    """The tensors that the reader takes in evaluation where it takes a result of training; none if that is not known."""
    at = None if reader.step is None else flow.site_of[reader.step]
    if at is None or reader.slot is None or reader.origin.kind != "step":
        return set()
    found = {made(flow, origin) for step in at.steps if not step.training for origin in step.operands.get(reader.slot, ())}
    return {tensor for tensor in found if tensor is not None} if None not in found else set()


def _sources(flow: Dataflow, site: Site) -> set[Made]:
    """The tensors that evaluation has too, of those that a site of training computes on, directly or through others of training."""
    found: set[Made] = set()
    left, seen = [site], {site}
    while left:
        for origins in left.pop().operands().values():
            for tensor in {made(flow, origin) for origin in origins} - {None}:
                source = tensor[0] if tensor else None
                if not isinstance(source, Site) or not source.training_only:
                    found |= {tensor} if tensor else set()
                elif source not in seen:
                    seen.add(source)
                    left.append(source)
    return found
