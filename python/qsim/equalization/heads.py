"""How many channels of an attention's values may be mixed with each other: those of a head, whose sums have the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qsim.equalization.edges import Edge
from qsim.equalization.orthogonal import hadamard, random_orthogonal
from qsim.equalization.probe import Probe, Transform
from qsim.runs.arguments import Arguments
from qsim.runs.snapshot import unchanged


def head_sizes(model: nn.Module, edges: Sequence[Edge], calls: Sequence[Arguments]) -> tuple[dict[Edge, int], dict[str, str]]:
    """The largest power of two, by edge, so that blocks of so many channels may be rotated; and the reason for every other by producer."""
    with unchanged(model), torch.no_grad():
        model.eval()
        trial = _Trial(model, edges, calls)
        found: dict[Edge, int] = {}
        refused = {edge.producer: why for edge in edges if (why := trial.cannot_tell(edge))}
        left = [edge for edge in edges if edge.producer not in refused]
        size = max((_power_of_two(edge.channels) for edge in left), default=0)
        while size > 1 and left:
            for edge in trial.rotated({edge: size for edge in left if _is_whole(edge, size)}):
                found[edge] = size
                left.remove(edge)
            size //= 2
    return found, {**refused, **{edge.producer: f"'{edge.producer}' has no even number of channels that are summed alike" for edge in left}}


def _power_of_two(n: int) -> int:
    """The largest that divides n."""
    return n & -n


def _is_whole(edge: Edge, size: int) -> bool:
    """Whether blocks of what is read are blocks of what is produced, and each reader reads whole ones."""
    if edge.channels % size:
        return False
    for index in edge.readers.values():
        if len(index) % size:
            return False
        blocks = index.view(-1, size)
        expected = blocks[:, :1] + torch.arange(size)
        if not bool(((blocks == expected) & (blocks[:, :1] % size == 0) | (blocks == -1)).all()):
            return False
    return True


class _Trial:
    """Rotates what producers return, and looks whether readers get it rotated."""

    def __init__(self, model: nn.Module, edges: Sequence[Edge], calls: Sequence[Arguments]) -> None:
        self._linear = [edge for edge in edges if _is_linear(model, edge)]
        self._probe = Probe(model, [e.producer for e in edges], {path for e in edges for path in e.readers}, calls)
        # Where each head is read several times, that alone tells how large it is.
        straight = {edge: len(next(iter(edge.readers.values()))) for edge in self._linear if _is_straight(edge)}
        self._alike = self.rotated(straight, lambda size: random_orthogonal(size, torch.Generator().manual_seed(0)))

    def cannot_tell(self, edge: Edge) -> str:
        if edge not in self._linear:
            return f"'{edge.producer}' and what reads it are not all linear layers"
        if edge in self._alike:  # one token alone has the same weight in every head
            return f"with these example inputs the heads of '{edge.producer}' cannot be told apart: give inputs with several tokens"
        return ""

    def rotated(self, sizes: dict[Edge, int], matrix_of: Callable[[int], Tensor] = hadamard) -> list[Edge]:
        """The edges whose readers get what a rotation of so many channels at a time makes of what they get without."""
        matrices = {edge.producer: matrix_of(size) for edge, size in sizes.items()}
        failed: set[Edge] = set()

        def see(path: str, x: Tensor, plain: Tensor) -> None:
            for edge in sizes:
                if path in edge.readers:
                    expected = _by_block(plain, matrices[edge.producer], edge.readers[path])
                    if x.shape != plain.shape or bool((x - expected).abs().max() > 1e-4 * expected.abs().max()):
                        failed.add(edge)

        def change(edge: Edge) -> Transform:
            read = torch.full((edge.channels,), -1)
            for index in edge.readers.values():
                read[index[index >= 0]] = index[index >= 0]
            return lambda out: _by_block(out, matrices[edge.producer], read)

        self._probe.run({edge.producer: change(edge) for edge in sizes}, see)
        return [edge for edge in sizes if edge not in failed]


def _is_linear(model: nn.Module, edge: Edge) -> bool:
    return all(isinstance(m, nn.Linear) for m in (edge.source(model), *edge.layers(model).values()))


def _is_straight(edge: Edge) -> bool:
    """Whether its readers read each of its channels once, in order, or a part of them that divides the whole."""
    index = next(iter(edge.readers.values()))
    size = len(index)
    if edge.channels % size or int(index[0]) % size:
        return False
    return all(torch.equal(other, index[0] + torch.arange(size)) for other in edge.readers.values())


def _by_block(x: Tensor, matrix: Tensor, index: Tensor) -> Tensor:
    """Blocks of the last axis times a matrix, where `index` has no -1."""
    size = len(matrix)
    blocks = x.view(*x.shape[:-1], -1, size)
    turned = blocks @ matrix.to(blocks)
    return torch.where((index.view(-1, size)[:, :1] >= 0).to(x.device), turned, blocks).view(x.shape)
