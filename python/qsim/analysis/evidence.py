"""What is known of a model's operations before any set of them is tried."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Evidence:
    """What is known of the operations before the first probe.

    Attributes
    ----------
    operations : sequence of str
        All that can be kept, in the order in which they run.
    readers : mapping of str to collection of str
        Who reads the result of each, also through what only moves values.
    leaving : collection of str
        Those whose results leave the range of the format: who reads them must be kept too.
    suspects : collection of str
        Others that are likely needed: a constant or a sum inside leaves the range, a result is finite and wrong.
    suspicion : mapping of str to float
        The higher, the likelier needed. Decides between operations of which nothing else is known, and between equal answers.
    """

    operations: Sequence[str]
    readers: Mapping[str, Collection[str]] = field(default_factory=dict)
    leaving: Collection[str] = ()
    suspects: Collection[str] = ()
    suspicion: Mapping[str, float] = field(default_factory=dict)

    def by_suspicion(self, names: Iterable[str]) -> list[str]:
        """The most suspicious first: whose values leave the range, the other suspects, the rest; equals in the order of the model."""
        place = {name: i for i, name in enumerate(self.operations)}
        leaving, suspects = set(self.leaving), set(self.suspects)

        def key(name: str) -> tuple[bool, bool, float, int]:
            return name not in leaving, name not in suspects, -self.suspicion.get(name, 0.0), place[name]

        return sorted(names, key=key)

    def islands(self) -> list[list[str]]:
        """Operations that have to be kept together, by what is known: those that hand on values out of range, with all who read these.

        The most suspicious island first, and so within each. Chains that meet in a reader are one.
        """
        known = set(self.operations)
        neighbours: dict[str, set[str]] = {name: set() for name in (*self.leaving, *self.suspects) if name in known}
        for name in filter(known.__contains__, self.leaving):
            for reader in filter(known.__contains__, self.readers.get(name, ())):
                neighbours[name].add(reader)
                neighbours.setdefault(reader, set()).add(name)
        found: list[list[str]] = []
        seen: set[str] = set()
        for name in self.by_suspicion(neighbours):
            island, left = [], [name]
            while left:
                if (at := left.pop()) not in seen:
                    seen.add(at)
                    island.append(at)
                    left += neighbours[at]
            found += [self.by_suspicion(island)] if island else []
        return found
