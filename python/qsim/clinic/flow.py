"""Which operation reads which, by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from qsim.clinic.examined_model import ExaminedModel
from qsim.graph.record.tape import Origin


class Flow:
    """The dataflow of a subject between operations; what only moves values lies between them.

    Attributes
    ----------
    order : dict of str to int
        Position of each operation in the model.
    producers, readers : dict of str to tuple of str
        Operations whose results an operation reads, and those that read its result; each in the order of the model.
    """

    def __init__(self, subject: ExaminedModel) -> None:
        self.order = {name: i for i, name in enumerate(subject.sites)}
        name_of = {step: name for name, site in subject.sites.items() for step in site.steps}
        producers: dict[str, set[str]] = defaultdict(set)
        readers: dict[str, set[str]] = defaultdict(set)
        for name, site in subject.sites.items():
            for step in site.steps:
                if step.run == 0:
                    found: Iterable[Origin] = [o for origins in step.operands.values() for o in origins]
                    for origin in (*found, *step.side):
                        if origin.source in name_of:
                            producers[name].add(name_of[origin.source])
                            readers[name_of[origin.source]].add(name)
        self.producers = {name: self._sorted(producers[name]) for name in self.order}
        self.readers = {name: self._sorted(readers[name]) for name in self.order}

    def _sorted(self, names: set[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self.order.__getitem__))

    def downstream(self, name: str, through: Callable[[str], bool]) -> list[str]:
        """Operations that a result of `name` reaches by way of those that let it `through`, in order; the last on each way are in it."""
        found: set[str] = set()
        left = [name]
        while left:
            for reader in self.readers[left.pop()]:
                if reader not in found:
                    found.add(reader)
                    left += [reader] if through(reader) else []
        return list(self._sorted(found - {name}))
