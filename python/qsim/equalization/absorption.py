"""High biases moved over a rectifier: what a layer returns gets smaller by a constant, which the biases of its readers make up for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qsim.equalization.candidates import Refused
from qsim.equalization.channels import along, bias_of, rows
from qsim.equalization.edges import Edge
from qsim.equalization.equalize_report import Change, spread
from qsim.equalization.input_statistics import results
from qsim.equalization.probe import Probe, Transform
from qsim.equalization.trial import is_plain
from qsim.operations.layers import LAYERS, TRANSPOSED, Layer, by_channel, channel_axis
from qsim.operations.moves import JOINING
from qsim.options import check_number
from qsim.runs.arguments import Arguments
from qsim.runs.random_numbers import seed_random_numbers
from qsim.runs.snapshot import rewriting, unchanged

_RECTIFIERS = frozenset({"relu", "leaky_relu", "prelu"})
# f(x - c) = f(x) - c where x and x - c are positive. Not products: a mask that is 1 in the examples is not 1 everywhere.
_SHIFTED = _RECTIFIERS | {"mean", "interpolate"} | {f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)} | JOINING
_UNIT = 1 / 64  # by which channels are shifted on trial, one to sixteen times
_STEPS = 16


@dataclass(frozen=True)
class BiasAbsorption:
    """High biases of layers moved into the layers that read them, over a ReLU that does nothing on the data.

    A channel that is never below some c > 0 is made smaller by c, and the readers' biases make up for it: its grid, which has to hold zero,
    becomes finer. ``c = min(least value, mean - sigmas * standard deviation)`` over example inputs and data. Nagel et al. 2019, "Data-Free
    Quantization Through Weight Equalization and Bias Correction", section 4.1.3, take the mean and the deviation from BatchNorm; with the
    least value the change is exact on the data. On other data what is below c behind the ReLU becomes c.

    Attributes
    ----------
    sigmas : float
        Standard deviations below the mean; the larger, the fewer values of other data are raised.
    """

    sigmas: float = 3.0
    name = "bias_absorption"
    needs_data = True

    def __post_init__(self) -> None:
        check_number("BiasAbsorption", "sigmas", self.sigmas, least=0)

    def absorb(
        self, model: nn.Module, edges: Sequence[Edge], calls: Sequence[Arguments], every: Sequence[Arguments]
    ) -> tuple[list[Change], dict[str, str], list[str]]:
        """Move what can be moved. Returns the changes, the reason for each producer that stays, and what holds on the data alone.

        `calls`: the example inputs, on which edges are tried; `every`: those and the data.
        """
        refused, left = dict[str, str](), list[Edge]()
        for edge in edges:
            try:
                _check(model, edge)
            except Refused as reason:
                refused[edge.producer] = str(reason)
            else:
                left.append(edge)
        refused |= _not_arriving(model, left, calls)
        left = [edge for edge in left if edge.producer not in refused]
        found, changes, notes = _observed(model, left, every), list[Change](), list[str]()
        for edge in left:
            statistics = found.get(edge.producer)
            if statistics is None or not bool((constant := statistics.constant(self.sigmas) * _is_read(model, edge)).any()):
                refused[edge.producer] = f"no channel of '{edge.producer}' is high enough on these data to have a bias absorbed"
                continue
            _move(model, edge, constant)
            changes.append(
                Change(self.name, edge.producer, tuple(edge.readers), 1.0, spread(statistics.most), spread(statistics.most - constant))
            )
            if edge.between & _RECTIFIERS:
                notes.append(
                    f"{int((constant > 0).sum())} of {edge.channels} channels of '{edge.producer}' were never below what was absorbed, "
                    f"{float(constant.max()):.3g} at most, on these data; elsewhere results differ where they are"
                )
        return changes, refused, notes


def _check(model: nn.Module, edge: Edge) -> None:
    """Raise Refused where structure says that a constant does not go from the producer into its readers' biases."""
    producer = edge.source(model)
    if not is_plain(producer):
        raise Refused(f"'{edge.producer}' ({type(producer).__name__}) is no layer of torch.nn whose bias could be absorbed")
    if bias_of(producer) is None:
        raise Refused(f"'{edge.producer}' has no bias that could be absorbed")
    if others := sorted(edge.between - _SHIFTED):
        raise Refused(f"'{others[0]}' behind '{edge.producer}' does not hand on a constant")
    for path, layer in edge.layers(model).items():
        if not is_plain(layer):
            raise Refused(f"'{path}' ({type(layer).__name__}), which reads '{edge.producer}', has a forward of its own")
        if isinstance(layer, TRANSPOSED):
            raise Refused(f"'{path}', which reads '{edge.producer}', is transposed: its border sums up fewer products than its middle")
        if _pads_with_zeros(layer):
            raise Refused(f"'{path}', which reads '{edge.producer}', pads with zeros, from which no constant is taken")


def _pads_with_zeros(layer: Layer) -> bool:
    if isinstance(layer, nn.Linear) or layer.padding_mode != "zeros" or layer.padding == "valid":
        return False
    if isinstance(layer.padding, str):
        return any(size > 1 for size in layer.kernel_size)
    return any(layer.padding)


def _not_arriving(model: nn.Module, edges: Sequence[Edge], calls: Sequence[Arguments]) -> dict[str, str]:
    """By producer, why what is taken from its channels does not arrive at its readers as it is, in eval or in training mode."""
    found: dict[str, str] = {}
    for training in (False, True) if edges else ():
        with unchanged(model), torch.no_grad():
            model.train(training)
            seed_random_numbers(0)
            probe = Probe(model, [edge.producer for edge in edges], [path for edge in edges for path in edge.readers], calls)
            for edge in edges:
                seed_random_numbers(0)
                if edge.producer not in found and (wrong := _wrong_reader(model, edge, probe)) is not None:
                    when = " in training mode" if training else ""
                    found[edge.producer] = f"a constant that is taken from '{edge.producer}' does not arrive at '{wrong}' as it is{when}"
    return found


def _wrong_reader(model: nn.Module, edge: Edge, probe: Probe) -> str | None:
    """The first reader that gets something else when constants are taken from the producer's channels; None if all get them as they are."""
    producer, readers, wrong = edge.source(model), edge.layers(model), list[str]()
    assert isinstance(producer, LAYERS)
    shift = _UNIT * (1 + torch.arange(edge.channels) % _STEPS)
    subtract: Transform = lambda out: out - along(shift, out, channel_axis(producer))  # noqa: E731

    def see(path: str, x: Tensor, plain: Tensor) -> None:
        if path in readers:
            expected = plain - along(edge.spread(path, shift, 0.0), plain, channel_axis(readers[path]))
            if x.shape != plain.shape or bool((x - expected).abs().max() > 1e-5):
                wrong.append(path)

    probe.run({edge.producer: subtract}, see)
    return wrong[0] if wrong else None


@dataclass
class _Statistics:
    """Of the channels of one producer, float64 [channels]."""

    least: Tensor
    most: Tensor
    sum: Tensor
    squares: Tensor
    count: int

    def add(self, other: _Statistics) -> None:
        self.least, self.most = torch.minimum(self.least, other.least), torch.maximum(self.most, other.most)
        self.sum, self.squares, self.count = self.sum + other.sum, self.squares + other.squares, self.count + other.count

    def constant(self, sigmas: float) -> Tensor:
        """What may be taken from each channel; 0 where nothing, or where it is not finite."""
        mean = self.sum / self.count
        deviation = (self.squares / self.count - mean.square()).clamp_min(0).sqrt()
        return torch.minimum(self.least, mean - sigmas * deviation).clamp_min(0).nan_to_num(0.0, 0.0, 0.0)


def _observed(model: nn.Module, edges: Sequence[Edge], calls: Sequence[Arguments]) -> Mapping[str, _Statistics]:
    """What the producers return in eval mode."""
    found: dict[str, _Statistics] = {}

    def watch(path: str, module: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            assert isinstance(module, LAYERS)
            values = rows(out, channel_axis(module)).cpu().double()
            if not values.shape[1]:
                return
            seen = _Statistics(values.amin(1), values.amax(1), values.sum(1), values.square().sum(1), values.shape[1])
            if path in found:
                found[path].add(seen)
            else:
                found[path] = seen

        undo.callback(module.register_forward_hook(hook).remove)

    with ExitStack() as undo:
        for edge in edges:
            watch(edge.producer, edge.source(model))
        if edges:
            results(model, calls)
    return found


def _is_read(model: nn.Module, edge: Edge) -> Tensor:
    """By channel of the producer: 1 where a reader reads it, else 0."""
    return edge.largest(model, lambda path, _: torch.ones(len(edge.readers[path])))


def _move(model: nn.Module, edge: Edge, constant: Tensor) -> None:
    """Take `constant`, float64 [channels], from what the producer returns, and have its readers' biases make up for it."""
    bias = bias_of(edge.source(model))
    assert bias is not None
    with rewriting():
        before = bias.detach().cpu().double()
        taken = before - (before - constant).to(bias.dtype).double()  # as rounded
        bias.sub_(taken.to(bias))
        for path, layer in edge.layers(model).items():
            read = edge.spread(path, taken, 0.0)
            weight = by_channel(layer.weight.detach().cpu().double().contiguous(), layer).sum(3)
            added = (weight @ read.view(weight.shape[0], -1, 1)).flatten()
            if layer.bias is None:
                layer.bias = nn.Parameter(added.to(layer.weight), requires_grad=layer.weight.requires_grad)
            else:
                layer.bias.copy_(layer.bias.detach().cpu().double() + added)
