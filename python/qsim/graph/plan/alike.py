"""Which quantizers do the same in several places: in the passes of a loop, and in the members of a list of modules, as experts are.

Data choose which of them a token comes to. One that few tokens reach can have the range of all. Tokens are rows: what has other shapes
but for the first axis, as the layers of a convolutional network have that lie in a list, does not do the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from qsim.graph.plan.actions import Actions, PlannedQuantizer
from qsim.graph.record.routes import Site


def find_alike(
    actions: Mapping[Site, Actions], quantizers: Mapping[str, PlannedQuantizer], modules: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Groups of keys of activations. One is in a single group at most: that of its loop, or else that of its list.

    Parameters
    ----------
    actions, quantizers
        Of the plan.
    modules : mapping of str to str
        Names of the classes of the model's modules, by path.
    """
    loops: dict[Hashable, dict[str, None]] = defaultdict(dict)
    lists: dict[Hashable, dict[str, None]] = defaultdict(dict)
    for site, found in actions.items():
        step = site.steps[0]
        read = [("operand", slot, use.key, step.shapes.get(slot)) for slot, use in found.operands.items()]
        made = [("result", index, key, step.results.get(index)) for index, key in found.outputs.items()]
        for what, at, key, shape in [*read, *made]:
            planned = quantizers[key]
            if planned.role == "activation" and planned.range is None and not (planned.spec.is_dynamic or planned.spec.is_running):
                (spots, leaf, name), path = step.key, step.path
                code = spots, name, what, at, planned.spec, shape and shape[1:]
                loops[path, leaf, code][key] = None
                lists[_of_any_member(path, modules), _of_any_member(leaf, modules), code][key] = None
    groups = [tuple(keys) for keys in loops.values() if len(keys) > 1]
    grouped = {key for keys in groups for key in keys}
    for keys in lists.values():
        others = tuple(key for key in keys if key not in grouped)
        if len(others) > 1:
            groups.append(others)
            grouped.update(others)
    return groups


def _of_any_member(path: str, modules: Mapping[str, str]) -> str:
    """A path with a star in place of the number in the innermost list of modules."""
    parts = path.split(".")
    for i in reversed(range(1, len(parts))):
        if modules.get(".".join(parts[:i])) in ("ModuleList", "ModuleDict"):
            return ".".join([*parts[:i], "*", *parts[i + 1 :]])
    return path
