"""What a container notes of calls that go another way than the examples did: sentences for warnings and the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from qsim.graph.execute.nodes import STRANGE, Node, Nodes
from qsim.graph.execute.switch import Switch
from qsim.graph.plan.actions import Actions
from qsim.graph.record.call_sites import CallSite, Spot
from qsim.graph.record.containers import full_name
from qsim.graph.record.routes import Route
from qsim.graph.record.tape import CallKey, Slot


class Noticing:
    """Base of `Place`, which has these attributes."""

    path: str
    switch: Switch
    quiet: bool
    width: int
    nodes_of: list[list[int | None]]
    beyond: list[int]
    sites: list[tuple[str, str]]
    planned: Nodes
    lists: list[dict[int | str, int]]
    actions_of: Sequence[Actions]
    strange: dict[tuple[Spot, ...], None]

    def expect(self, route: Route, passed: Sequence[CallKey]) -> None:
        """Note what every recorded call of the container reaches. `passed`: the calls that lead nowhere, whose results others quantize."""
        self._expected: Mapping[bool, list[int]] = {training: _always(list(route.nodes), calls) for training, calls in route.calls.items()}
        self._expected_passed = {training: _always(passed, calls) for training, calls in route.calls.items()}
        self._passed = [(route.unmet[key][-1].name, route.unmet[key][-1].steps[0].line) for key in passed]
        self._ends: dict[tuple[bool, tuple[int, ...], int | None], list[str]] = {}  # what calls with these counts missed

    def note_strange(self, site: CallSite, name: str, key: int = STRANGE, *, weighted: bool = False) -> None:
        """Note a call that computes something, and that the examples did not show. Not one that computes a parameter: what reads that has
        it on its grid, as if it were held.

        Parameters
        ----------
        site : CallSite
        name : str
        key : int
            That of a leaf, if the call is one.
        weighted : bool
            Whether its weight was quantized.
        """
        if self.quiet or site.alone or (site.parametrizing and not weighted) or site.spots in self.strange:
            return
        self.strange[site.spots] = None
        planned = self.planned.plain[self.nodes_of[key][0] or 0] if key >= self.width else Node()
        done, quantized = _what_is_done(planned, weighted), bool(planned.outputs)
        what = _named(site.leaf_path or full_name(self.path, name), site.line)
        self.switch.notice(f"{what} ran where the example inputs did not show it{done}", self.path, "" if quantized else name)

    def note_alone(self, layer: str) -> None:
        """Note that layers are called by themselves, of which this is the first."""
        if not self.switch.calls_alone:
            self.switch.calls_alone = True
            text = f"'{layer}' was called by itself: its weight is quantized, and its result by its own quantizer, not what it is given"
            self.switch.notice(text, self.path, "", "So are other layers that are. A module whose forward calls them is simulated whole.")

    def note_more(self, key: int) -> None:
        """Note that a leaf is called more often than the examples did."""
        name, line = self.sites[next(node for node in self.nodes_of[key] if node is not None)]
        planned = self.planned.plain[self.beyond[key]]
        text = f"{_named(name, line)} ran more often than the example inputs show{_what_is_done(planned)}"
        self.switch.notice(text, self.path, "" if planned.outputs else name.rpartition(".")[2])

    def note_broken(self, node: int, slot: Slot | None) -> None:
        """Note that a chain ends that did not begin: its quantizer is for what an operation returned that did not run. `slot`: it stands
        at this operand; None: at the result."""
        (name, line), planned = self.sites[node], self.actions_of[node]
        self.switch.refused |= set(planned.outputs.values()) if slot is None else {planned.operands[slot].key}
        what = "result" if slot is None else f"operand {slot}"
        text = f"{_named(name, line)} ran on what the example inputs did not show it: its {what} stays in float"
        self.switch.notice(text, self.path, name.rpartition(".")[2])

    def note_end(self, training: bool, counts: list[int], passed: int | None) -> list[str]:
        """Note what is planned and every recorded call reaches, and this one has not; and return it.

        Parameters
        ----------
        training : bool
        counts : list of int
        passed : int or None
            The calls that lead nowhere and came by, a bit for each; None where none can be seen.
        """
        known = training, tuple(counts), passed
        if known in self._ends:
            return self._ends[known]
        missed: list[str] = []
        if len(self._ends) < _CALLS:
            self._ends[known] = missed
        for key in self._expected[training]:
            node = next(at for at in self.nodes_of[key] if at is not None)
            if counts[key] == 0 and passed is None and self.actions_of[node].gate is not None:
                sentence = f"torch.compile hides {_named(*self.sites[node])}: compiled, its gate stays in float"
                self.switch.notice(sentence, self.path, "", "Evaluate it without torch.compile, or take its type out of Profile.gates.")
            elif counts[key] == 0 and (self.actions_of[node].operands or self.actions_of[node].outputs):
                missed.append(_named(*self.sites[node]))
        if passed is not None:
            missed += [_named(*self._passed[number]) for number in self._expected_passed[training] if not passed >> number & 1]
        for name in missed:
            self.switch.notice(f"{name} is planned, and was not reached where the example inputs did", self.path, "")
        return missed

    def note_longer(self, node: int, lengths: tuple[tuple[int, int], ...]) -> None:
        """Note that a list, at one of these positions, is longer than the examples showed, if it is: what lies beyond is not quantized."""
        for at, length in lengths:
            if length > (known := self.lists[node].get(at, length)):
                name, line = self.sites[node]
                text = f"{_named(name, line)} took more tensors than the example inputs show: those beyond the first {known} stay in float"
                self.switch.notice(text, self.path, name.rpartition(".")[2])

    def note_read(self, node: int, name: str, line: str) -> None:
        """Note that a node reads what another operation computes, of this name and line, which is in float because of others that do."""
        reader, maker = _named(*self.sites[node]), _named(name, line)
        text = f"{reader} read what {maker} computes, where the example inputs did not show it: that stays in float"
        self.switch.notice(text, self.path, "")

    def note_written(self, path: tuple[Any, ...]) -> None:
        """Note that the model wrote into what it got in place of an argument, whose caller has what it passed."""
        name = "".join(f"[{key!r}]" if at else str(key) for at, key in enumerate(path))
        text = f"argument {name!r} was written into where the example inputs did not show it: its caller does not get that"
        self.switch.notice(text, self.path, "")

    def note_changed(self, name: str, line: str) -> None:
        """Note that what an operation of this name and line changed in place, and was quantized then, is changed by its older name."""
        text = f"what {_named(name, line)} changed in place was written into by its older name, where the example inputs did not show it"
        self.switch.notice(f"{text}: what {_named(name, line)} returned does not get that", self.path, "")

    def note_returned(self, name: str, line: str) -> None:
        """Note that the model returns what an operation of this name and line computes, which is in float because of what reads it."""
        text = f"what {_named(name, line)} computes was returned, where the example inputs did not show it: it stays in float"
        self.switch.notice(text, self.path, "")


def _named(name: str, line: str) -> str:
    """An operation as a sentence names it: 'encoder.add' (model.py:12)."""
    return f"'{name}' ({line})" if line else f"'{name}'"


def _what_is_done(planned: Node, weighted: bool = False) -> str:
    """What is said of a call that the examples did not show."""
    weight = ", its weight is quantized" if weighted or planned.operands else ""
    return weight + (", its result by its own quantizer" if planned.outputs else ", its result stays in float")


_CALLS = 256  # so many ways through a container are remembered as complete


def _always(keys: Sequence[CallKey], calls: list[Counter[CallKey]]) -> list[int]:
    """Numbers of the keys that every recorded call has."""
    return [number for number, key in enumerate(keys) if calls and all(call[key] for call in calls)]
