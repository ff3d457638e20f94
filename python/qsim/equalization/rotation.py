"""Rotations of channels: outliers are spread over all channels of a head, or of the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qsim.equalization.candidates import Refused
from qsim.equalization.edges import Edge
from qsim.equalization.equalize_report import Change, spread
from qsim.equalization.heads import head_sizes
from qsim.equalization.input_statistics import observe
from qsim.equalization.orthogonal import hadamard, rotation_matrix
from qsim.equalization.stream import find_stream
from qsim.graph.record.tape import Tape
from qsim.graph.record.uses import Uses
from qsim.runs.arguments import Arguments
from qsim.runs.snapshot import rewriting


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrices multiplied into weights: R1 and R2 of SpinQuant, chosen as in QuaRot.

    R2 rotates the values of each attention head, and back in the output projection, by a Hadamard matrix. R1 rotates the residual stream:
    everything that writes it and, with the norm's weight folded in, everything that reads it. RMSNorm commutes with any rotation, LayerNorm
    with one that keeps the vector of ones, and so the mean: one is drawn where the model has LayerNorm.
    Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", section 4; Liu et al. 2024, "SpinQuant: LLM Quantization
    with Learned Rotations", section 3.

    Attributes
    ----------
    stream, values : bool
        Which of the two.
    seed : int
        Of the random signs and rotations of R1.
    """

    stream: bool = True
    values: bool = True
    seed: int = 0
    name = "rotation"
    needs_data = False

    def rotate(
        self, model: nn.Module, edges: Sequence[Edge], tape: Tape, uses: Uses, calls: Sequence[Arguments]
    ) -> tuple[list[Change], dict[str, str]]:
        """Rotate what can be rotated. Returns the changes, and the reason for what stays."""
        refused: dict[str, str] = {}
        rotated: list[tuple[str, list[str]]] = []
        before = _Ranges(model, edges, calls)
        if self.values:
            sizes, refused = head_sizes(model, [edge for edge in edges if edge.is_mixing], calls)
            for edge, size in sizes.items():
                rotate_heads(model, edge, size)
                rotated.append((edge.producer, list(edge.readers)))
        if self.stream:
            try:
                stream = find_stream(model, tape, uses, edges)
            except Refused as reason:
                refused["the residual stream"] = str(reason)
            else:
                generator = torch.Generator().manual_seed(self.seed)
                stream.rotate(model, rotation_matrix(stream.width, stream.keeps_mean, generator))
                rotated.append((stream.writers[0], list(dict.fromkeys(path for edge in stream.norms for path in edge.readers))))
        after = _Ranges(model, edges, calls)
        return [Change(self.name, first, tuple(readers), 1.0, before.of(readers), after.of(readers)) for first, readers in rotated], refused


class _Ranges:
    """Of what the readers of edges get."""

    def __init__(self, model: nn.Module, edges: Sequence[Edge], calls: Sequence[Arguments]) -> None:
        readers = dict.fromkeys(path for edge in edges for path in edge.readers)
        self._largest = observe(model, readers, calls).largest

    def of(self, readers: Iterable[str]) -> float:
        return spread(torch.cat([self._largest[path] for path in readers]))


def rotate_heads(model: nn.Module, edge: Edge, size: int) -> None:
    """R2: each head's values times a Hadamard matrix, and the readers' weights too, so that the products stay."""
    matrix = hadamard(size)
    source = edge.source(model)
    assert isinstance(source, nn.Linear)
    heads: set[int] = set()
    with rewriting():
        for path, layer in edge.layers(model).items():
            weight = layer.weight.detach().to("cpu", torch.float64)
            for begin in range(0, weight.shape[1], size):
                if (first := int(edge.readers[path][begin])) >= 0:
                    weight[:, begin : begin + size] = weight[:, begin : begin + size] @ matrix
                    heads.add(first)
            layer.weight.copy_(weight)
        for own in (source.weight, source.bias):
            if own is not None:
                values = own.detach().to("cpu", torch.float64)
                for first in heads:
                    values[first : first + size] = matrix.T @ values[first : first + size]
                own.copy_(values)
