"""The residual stream of a transformer, found on the tape: what writes it, and the norms through which alone it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from qsim.equalization.candidates import Refused, is_norm
from qsim.equalization.channels import bias_of
from qsim.equalization.edges import Edge
from qsim.equalization.orthogonal import rotation_matrix
from qsim.equalization.trial import put_back
from qsim.graph.record.tape import Origin, Reader, Step, Tape
from qsim.graph.record.uses import Uses, owner
from qsim.operations.functions import name_of
from qsim.runs.snapshot import rewriting

Writer = nn.Embedding | nn.Linear


@dataclass(frozen=True)
class Stream:
    """A residual stream.

    Attributes
    ----------
    width : int
    writers : tuple of str
        Paths of the embeddings and linear layers whose results are added up.
    norms : tuple of Edge
        What reads it.
    keeps_mean : bool
        Whether a norm subtracts the mean: then rotations have to keep the vector of ones.
    """

    width: int
    writers: tuple[str, ...]
    norms: tuple[Edge, ...]
    keeps_mean: bool

    def rotate(self, model: nn.Module, matrix: Tensor) -> None:
        """R1: the stream x becomes ``matrix @ x``, float64 [width, width]; weights and biases of norms move into their readers."""
        with rewriting():
            for path in self.writers:
                writer = cast(Writer, model.get_submodule(path))
                if isinstance(writer, nn.Embedding):
                    writer.weight.copy_(_exact(writer.weight) @ matrix.T)
                    continue
                writer.weight.copy_(matrix @ _exact(writer.weight))
                if writer.bias is not None:
                    writer.bias.copy_(matrix @ _exact(writer.bias))
            for edge in self.norms:
                self._read(model, edge, matrix)

    def _read(self, model: nn.Module, edge: Edge, matrix: Tensor) -> None:
        norm = edge.source(model)
        gain = _exact(cast(Tensor, norm.weight)) + edge.offset
        bias = bias_of(norm)
        shift = None if bias is None else _exact(bias)
        for layer in edge.layers(model).values():
            weight = _exact(layer.weight)
            if shift is not None and bool(shift.any()):
                added = weight @ shift
                if layer.bias is None:
                    layer.bias = nn.Parameter(added.to(layer.weight), requires_grad=layer.weight.requires_grad)
                else:
                    layer.bias.copy_(_exact(layer.bias) + added)
            layer.weight.copy_(weight * gain @ matrix.T)
        cast(Tensor, norm.weight).fill_(1 - edge.offset)
        if bias is not None:
            bias.zero_()


def _exact(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.float64, copy=True)


def find_stream(model: nn.Module, tape: Tape, uses: Uses, edges: Sequence[Edge]) -> Stream:
    """The residual stream that the embeddings of tokens begin. Raises Refused with the reason if there is none that can be rotated."""
    walk = _StreamWalk(tape, uses)
    starts = [step for step in tape.steps if isinstance(uses.modules.get(owner(step)), nn.Embedding)]
    if not starts:
        raise Refused("the model has no embedding of tokens that begins a residual stream")
    for step in starts:
        walk.follow(step)
    walk.check_operands()
    by_producer = {edge.producer: edge for edge in edges}
    for path in walk.norms:
        edge = by_producer.get(path)
        if edge is None:
            raise Refused(f"the norm '{path}', which reads the residual stream, is not followed by layers alone that could take its weight")
        linear = all(isinstance(layer, nn.Linear) for layer in edge.layers(model).values())
        if not linear or any(not torch.equal(index, torch.arange(edge.channels)) for index in edge.readers.values()):
            raise Refused(f"what reads the norm '{path}' of the residual stream is not linear layers on all of its channels")
    if not walk.norms:
        raise Refused("no norm reads the residual stream")
    for path in walk.writers:
        if (why := uses.obstacle(path)) is not None:
            raise Refused(f"what writes the residual stream: {why}")
    norms = tuple(by_producer[path] for path in walk.norms)
    width = norms[0].channels
    wrong = [path for path in walk.writers if _width(uses.modules[path]) != width]
    if wrong:
        raise Refused(f"'{wrong[0]}' writes {_width(uses.modules[wrong[0]])} channels into a residual stream of {width}")
    keeps_mean = {_keeps_mean(model, edge) for edge in norms}
    return Stream(width, tuple(walk.writers), norms, True in keeps_mean)


def _width(module: nn.Module) -> int:
    return module.embedding_dim if isinstance(module, nn.Embedding) else cast(nn.Linear, module).out_features


def _keeps_mean(model: nn.Module, edge: Edge) -> bool:
    """Whether a norm, without its weight and bias, commutes only with rotations that keep the mean. Tried on random numbers."""
    norm = edge.source(model)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, edge.channels, generator=generator).to(cast(Tensor, norm.weight)) + 0.5
    with put_back(norm), torch.no_grad():
        cast(Tensor, norm.weight).fill_(1 - edge.offset)
        if (bias := bias_of(norm)) is not None:
            bias.zero_()
        for keeps_mean in (False, True):
            matrix = rotation_matrix(edge.channels, keeps_mean, generator).to(x)
            if torch.allclose(norm(x @ matrix), norm(x) @ matrix, rtol=1e-4, atol=1e-4):
                return keeps_mean
    raise Refused(f"the norm '{edge.producer}' of the residual stream is neither an RMSNorm nor a LayerNorm")


class _StreamWalk:
    """From the embeddings through all sums."""

    def __init__(self, tape: Tape, uses: Uses) -> None:
        self.tape, self.uses = tape, uses
        self.writers: dict[str, None] = {}
        self.norms: dict[str, None] = {}
        self._stream: set[Step] = set()
        self._sums: list[Step] = []

    def follow(self, first: Step) -> None:
        """Everything that reads the results of a writer or of a sum is a sum, or a norm."""
        if isinstance(self.uses.modules.get(owner(first)), Writer):
            self.writers[owner(first)] = None
        left = [first]
        while left:
            step = left.pop()
            if step in self._stream:
                continue
            self._stream.add(step)
            for reader in (r for i in step.results for r in self.tape.readers(step, i)):
                if (after := self._next(reader)) is not None:
                    left.append(after)

    def _next(self, reader: Reader) -> Step | None:
        step = reader.step
        if step is None:
            raise Refused("the residual stream is returned by the model, or read out as a mask or number")
        module = self.uses.modules.get(owner(step))
        if module is not None and is_norm(module):
            self.norms[owner(step)] = None
            return None
        if step.kind == "add":
            self._sums.append(step)
            return step
        if name_of(step.func) in ("mul", "div") and len(step.shapes.get(1, ())) == 0 < len(step.shapes.get(0, (1,))):
            return step
        raise Refused(f"the residual stream is also read by '{step.name}', which is neither a sum nor a norm")

    def check_operands(self) -> None:
        """What else the sums add is what linear layers return, and these write nothing else."""
        for step in self._sums:  # grows on the way
            if len(step.operands) != 2:
                raise Refused(f"'{step.name}' adds a number to the residual stream")
            for origins in step.operands.values():
                self._check_operand(step, origins)

    def _check_operand(self, step: Step, origins: frozenset[Origin]) -> None:
        for origin in origins:
            source = origin.source
            if not isinstance(source, Step):
                raise Refused(f"'{step.name}' adds to the residual stream what is no layer's result ({origin.kind})")
            if source in self._stream:
                continue
            if not isinstance(self.uses.modules.get(owner(source)), Writer) or name_of(source.func) not in ("linear", "embedding"):
                raise Refused(f"'{step.name}' adds to the residual stream what '{source.name}' returns, which is no linear layer")
            self.follow(source)
