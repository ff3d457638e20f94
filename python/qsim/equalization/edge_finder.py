"""Which channel goes where, and whether it is scaled there: asked of the model itself, with powers of two, which no rounding touches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qsim.equalization.candidates import Candidate, Refused
from qsim.equalization.channels import along, rows
from qsim.equalization.edges import Edge
from qsim.equalization.probe import Probe, Transform
from qsim.equalization.trial import output_form, reads_scaled
from qsim.operations.layers import LAYERS, channel_axis
from qsim.runs.arguments import Arguments
from qsim.runs.snapshot import unchanged

_DIGITS = 16  # of the code of a channel, in one run: factors from 1 to 2^15
_NO_POWER, _ZEROS = -1, -2


def find_edges(model: nn.Module, candidates: Sequence[Candidate], calls: Sequence[Arguments]) -> tuple[list[Edge], dict[str, str]]:
    """The candidates that are edges, and the reason for every other by its producer."""
    with unchanged(model), torch.no_grad():
        finder = _EdgeFinder(model.eval(), candidates, calls)
        finder.choose_slices()
        return finder.edges(), finder.refused


@dataclass
class _Source:
    """What is known of a producer."""

    candidate: Candidate
    channels: int = 0
    axis: int | None = None
    offset: float = 0.0
    slice: tuple[int, int] = (0, 0)  # the channels that are scaled
    first: int = 0  # number of its first channel among those of all producers

    def times(self, exponents: Tensor) -> Transform:
        """Its channels in the slice times powers of two."""
        begin, end = self.slice
        factors = torch.ones(self.channels)
        factors[begin:end] = exponents[begin:end].exp2()
        axis = self.axis or 0
        return lambda out: out * along(factors, out, axis)


@dataclass
class _Digits:
    """Exponents of the factors by which the channels of each reader are larger, over all calls."""

    axes: dict[str, int]
    found: dict[str, Tensor] = field(default_factory=dict)

    def see(self, reader: str, x: Tensor, plain: Tensor) -> None:
        axis = self.axes[reader]
        digits = _exponents(rows(x, axis), rows(plain, axis)) if x.shape == plain.shape else torch.full((plain.shape[axis],), _NO_POWER)
        before = self.found.get(reader, digits)
        same = (digits == before) | (digits == _ZEROS)
        self.found[reader] = torch.where(before == _ZEROS, digits, torch.where(same, before, _NO_POWER))


def _exponents(x: Tensor, plain: Tensor) -> Tensor:
    at = plain.abs().argmax(1, keepdim=True)
    largest = plain.gather(1, at)
    digits = (x.gather(1, at) / largest).abs().log2().round().nan_to_num(0.0).clamp(0, _DIGITS - 1)
    expected = plain * digits.exp2()
    fits = ((x - expected).abs() <= 1e-4 * expected.abs() + 1e-6 * largest.abs()).all(1)
    found = torch.where(fits, digits.flatten(), float(_NO_POWER))
    return torch.where(largest.flatten() == 0, float(_ZEROS), found).long().cpu()


class _EdgeFinder:
    """Asks a probe."""

    def __init__(self, model: nn.Module, candidates: Sequence[Candidate], calls: Sequence[Arguments]) -> None:
        self._model, self._calls = model, calls
        self.sources = {c.producer: _Source(c) for c in candidates}
        self.refused: dict[str, str] = {}
        readers = {reader: model.get_submodule(reader) for c in candidates for reader in c.readers}
        self._axes = {path: channel_axis(m) for path, m in readers.items() if isinstance(m, LAYERS)}
        self.probe = Probe(model, self.sources, readers, calls, self._learn, self._check)
        for path, source in self.sources.items():
            if source.axis is None:
                self.refused.setdefault(path, f"'{path}' is not called as a module with these example inputs")

    @property
    def _left(self) -> list[_Source]:
        return [source for path, source in self.sources.items() if path not in self.refused]

    def _refuse(self, source: _Source, why: str) -> None:
        self.refused.setdefault(source.candidate.producer, why)

    def _learn(self, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
        """Note where a producer has its channels, and how it is scaled."""
        source = self.sources[path]
        if not isinstance(out, Tensor):
            self._refuse(source, f"'{path}' returns a {type(out).__name__}, not a tensor")
            return False
        form = output_form(module, args, kwargs, out)
        if form is None:
            self._refuse(source, f"'{path}' ({type(module).__name__}) does not end with a multiplication by its weight, channel by channel")
            return False
        source.axis, source.offset = form
        source.channels = out.shape[source.axis]
        source.slice = (0, source.channels)
        return True

    def _check(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(module, LAYERS) and not reads_scaled(module, args, kwargs):
            for source in self._left:
                if path in source.candidate.readers:
                    self._refuse(source, f"'{path}' ({type(module).__name__}) has a forward of its own, which does not scale")

    def choose_slices(self) -> None:
        """For producers part of whose result goes elsewhere: the half or the third of it that their readers alone read."""
        sliced = [source for source in self._left if source.candidate.blocked]
        left = sliced
        for number in range(3):
            for source in left:
                source.slice = self._slices(source)[number]
            digits = _Digits(self._axes)
            self.probe.run({s.candidate.producer: s.times(torch.ones(s.channels)) for s in left}, digits.see)
            left = [source for source in left if not _is_scaled(source, digits.found)]
        chosen = [source for source in sliced if source not in left]
        if not self._reach_nothing_else(chosen):
            left = [*left, *(source for source in chosen if not self._reach_nothing_else([source]))]
        for source in left:
            self._refuse(source, source.candidate.blocked)

    def _reach_nothing_else(self, sources: Sequence[_Source]) -> bool:
        """Whether the model returns the same, to the bit, where nothing but the slices is scaled, and their readers do not see it."""
        readers = {reader for source in sources for reader in source.candidate.readers}
        probe = Probe(self._model, [source.candidate.producer for source in sources], readers, self._calls)
        before = probe.run({}, lambda *_: None)
        after = probe.run({s.candidate.producer: s.times(torch.ones(s.channels)) for s in sources}, lambda *_: None)
        return all(map(torch.equal, before, after))

    def _slices(self, source: _Source) -> list[tuple[int, int]]:
        """The second half (gate and up, in one layer), the first (a gated linear unit), the values behind queries and keys."""
        n = source.channels
        widths = [x.shape[-1] for (_, path), x in self.probe.plain.items() if path in source.candidate.readers]
        values = max(n - min(widths, default=n), 0) // 2
        return [(n // 2, n), (0, n // 2), (n - values, n)]

    def edges(self) -> list[Edge]:
        """Read every channel's number, digit by digit, at the readers."""
        total = 1  # 0 is what no producer's channel has
        for source in self._left:
            source.first = total
            total += source.channels
        once = _Digits(self._axes)
        self.probe.run({source.candidate.producer: source.times(torch.ones(source.channels)) for source in self._left}, once.see)
        # Each number is read from factors: a square, or a product of two producers, would show another one.
        numbers = {reader: torch.where(digits > 1, _NO_POWER, digits.clamp(max=0)) for reader, digits in once.found.items()}
        for place in range(math.ceil(math.log(total + 1, _DIGITS))):
            codes = {}
            for source in self._left:
                number = torch.arange(source.first, source.first + source.channels)
                codes[source.candidate.producer] = source.times((number // _DIGITS**place % _DIGITS).float())
            digits = _Digits(self._axes)
            self.probe.run(codes, digits.see)
            for reader, found in digits.found.items():
                so_far = numbers[reader]
                bad = torch.minimum(found, so_far)
                numbers[reader] = torch.where(bad < 0, bad, so_far + found * _DIGITS**place)
        edges = []
        for source in self._left:
            try:
                edges.append(_edge(source, numbers))
            except Refused as reason:
                self._refuse(source, str(reason))
        return edges


def _edge(source: _Source, numbers: dict[str, Tensor]) -> Edge:
    """What the numbers that arrived at the readers of a producer say. Raises Refused where they say nothing."""
    candidate, readers = source.candidate, {}
    for reader in candidate.readers:
        number = numbers.get(reader)
        if number is None:
            raise Refused(f"'{reader}' is not called as a module with these example inputs")
        if bool((number == _ZEROS).any()):
            channels = (number == _ZEROS).nonzero().flatten().tolist()
            raise Refused(f"'{reader}' reads zeros alone in {len(channels)} channels, first in {channels[0]}: whose is not told")
        if bool((number < 0).any()):
            what = f" behind {', '.join(sorted(candidate.between))}" if candidate.between else ""
            raise Refused(f"'{reader}' does not read each channel of '{candidate.producer}' by itself{what}")
        index = number - source.first
        readers[reader] = torch.where((index >= 0) & (index < source.channels), index, -1)
    if not any(bool((index >= 0).any()) for index in readers.values()):
        raise Refused(f"no channel of '{candidate.producer}' reaches its readers with a scale")
    return Edge(candidate.producer, source.channels, readers, candidate.between, source.offset, bool(candidate.blocked))


def _is_scaled(source: _Source, digits: dict[str, Tensor]) -> bool:
    found = torch.cat([digits.get(reader, torch.full((1,), _NO_POWER)) for reader in source.candidate.readers])
    return bool((found >= 0).all()) and bool((found == 1).any())
