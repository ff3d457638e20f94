"""Tables that rows are looked up in (embeddings): what lies on a grid still does when it is looked up.

A table with one scale hands its grid on, so that rows are rounded once. One with a scale for each row or column has no single grid to
hand on: where an integer kernel reads its rows, they get one of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qsim.graph.plan.actions import Actions, PlannedQuantizer
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Step
from qsim.numbers.spec import TensorSpec


def table_spec(spec: TensorSpec, site: Site, activation: TensorSpec | None) -> TensorSpec:
    """The spec of a weight, unsigned or signed as its rows are to be if it is a table that hands its grid on. Kernels that read rows take
    one kind of integers, and the numbers of the grid are the same."""
    if site.op != "embedding" or activation is None or not _serves(replace(spec, signed=activation.signed, narrow=False), activation):
        return spec
    return spec if spec.narrow else replace(spec, signed=activation.signed)


def table_grid(site: Site, actions: Actions, quantizers: Mapping[str, PlannedQuantizer], activation: TensorSpec | None) -> str | None:
    """The quantizer of the table whose rows a site looks up, if their grid serves as that of its result; None if it needs one of its own.

    Parameters
    ----------
    site : Site
    actions : Actions
        What is planned for its operands.
    quantizers : mapping of str to PlannedQuantizer
    activation : TensorSpec or None
        What the config says of its result.
    """
    if site.op != "embedding" or any(map(_renormalizes, site.steps)):
        return None
    tables = [use.key for use in actions.operands.values() if quantizers[use.key].role == "weight"]
    return tables[0] if len(tables) == 1 and _serves(quantizers[tables[0]].spec, activation) else None


def _serves(spec: TensorSpec, activation: TensorSpec | None) -> bool:
    """Whether the grid of a table is one that a result may have, and no finer than what the config asks of it."""
    if spec.is_float or spec.axis is not None or spec.block_size is not None:
        return False
    if activation is None:
        return True
    plain = not activation.is_float and activation.axis is None and not activation.is_dynamic
    return plain and spec.bits <= activation.bits and (spec.quant_min < 0) == (activation.quant_min < 0)


def _renormalizes(step: Step) -> bool:
    """Whether rows are shortened before they are returned (``max_norm``): then they leave the table's grid."""
    return step.options.get(3, step.options.get("max_norm")) is not None
