"""What a statement can read where it stands, and what it may change in place."""

from __future__ import annotations

from dataclasses import dataclass, field

from .ir import CHANNELS

assert CHANNELS == 8  # as the tables of operations and layers have it


@dataclass
class Scope:
    """Variables in the order in which they were made.

    Attributes
    ----------
    roots : dict of str to frozenset of str
        Whose memory a variable may lie in: parameters of the function, or "" for its own.
    closed : set of str
        Parameters that must not be changed in place: arguments of the model.
    changed : set of str
        Parameters that are.
    held : list of (str, str, str)
        What was held: name, how, source.
    read : set of str
        Variables that some statement reads.
    """

    variables: list[str] = field(default_factory=list)
    roots: dict[str, frozenset[str]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    held: list[tuple[str, str, str]] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def add(self, variable: str, *aliases: str) -> str:
        """Make a variable, which may lie in the memory of others."""
        self.variables.append(variable)
        self.roots[variable] = frozenset({""}).union(*(self.roots[alias] for alias in aliases))
        return variable

    def may_change(self, variable: str) -> bool:
        return not self.roots[variable] & self.closed

    def change(self, variable: str) -> None:
        self.changed |= self.roots[variable] - {""}

    def inner(self) -> Scope:
        """Of a block inside: what it makes is not seen outside."""
        return Scope(list(self.variables), dict(self.roots), self.closed, self.changed, list(self.held), self.read)
