"""How far a model is from float, and what each choice of bits adds to that by itself: estimated by one backward pass a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qsim.analysis.bit_choices import Bits, Choice
from qsim.analysis.deviation import float_tensors
from qsim.errors import CalibrationError
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.batches import Forward, arguments_of, iterate, to_device
from qsim.runs.hooks import hooked
from qsim.runs.snapshot import beginning_alike, unchanged
from qsim.runs.unfit import unfit_told
from qsim.simulation.simulation import Simulation

Grids = Mapping[Bits, Mapping[str, Quantizer]]  # calibrated quantizers by bits, then by key


class Distance:
    """How far what a model returns is from what it returns in float, over any number of batches.

    Parameters
    ----------
    classes : int, optional
        Axis of the results along which they are logits of classes: the mean Kullback-Leibler divergence of their softmax from that of
        float, in nats. None: the sum of squared errors over that of squares.

    Examples
    --------
    >>> distance = Distance(None)
    >>> distance.add([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 4.5])])
    >>> distance.value
    0.01
    """

    def __init__(self, classes: int | None) -> None:
        self.classes = classes
        self.sum = self.weight = 0.0

    def add(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Compare the results of one batch."""
        for x, y in zip(expected, found, strict=True):
            x, y = x.detach().double(), y.detach().double()
            if self.classes is None:
                self.sum += float((x - y).square().sum())
                self.weight += float(x.square().sum())
            else:
                p, q = x.log_softmax(self.classes), y.log_softmax(self.classes)
                self.sum += float((p.exp() * (p - q)).sum())
                self.weight += x.numel() / x.shape[self.classes]

    @property
    def value(self) -> float:
        return self.sum / self.weight if self.weight else 0.0

    @property
    def unit(self) -> str:
        """What `value` counts."""
        return "MSE over mean square" if self.classes is None else "nats"

    @property
    def curvature(self) -> float:
        """What `add` sums is this times the quadratic form of E[v v^T], with v from `cotangent`, to second order."""
        return 1.0 if self.classes is None else 0.5

    def cotangent(self, result: Tensor, generator: torch.Generator) -> Tensor:
        """A random vector at a result, of its shape and dtype.

        For squared errors random signs: Hutchinson's estimator of the Gauss-Newton matrix. For the divergence the gradient of
        cross-entropy with labels drawn from the model's own softmax, whose covariance is the Fisher matrix, the divergence's Hessian
        (Kunstner et al. 2019, "Limitations of the Empirical Fisher Approximation for Natural Gradient Descent", section 2).
        """
        if self.classes is None:
            return torch.randint(0, 2, result.shape, generator=generator).to(result) * 2 - 1
        if not -result.dim() <= self.classes < result.dim():
            raise ValueError(f"QuantSim.search_bits: got classes={self.classes}; the model returns a tensor of shape {tuple(result.shape)}")
        p = result.detach().float().softmax(self.classes).movedim(self.classes, -1)
        drawn = torch.multinomial(p.reshape(-1, p.shape[-1]).cpu(), 1, generator=generator)
        label = torch.nn.functional.one_hot(drawn.squeeze(-1), p.shape[-1]).reshape(p.shape).to(p)
        return (p - label).movedim(-1, self.classes).to(result.dtype)


def estimated(
    sim: Simulation, choices: Sequence[Choice], grids: Grids, data: Any, classes: int | None, *, show: bool, forward: Forward | None = None
) -> dict[tuple[int, Bits], float]:
    """The distance that each choice causes by itself, to second order around the float model; by the choice's position and its bits.

    An error e of a tensor moves the results by J e, and E[(g . e)^2] is what that adds to the distance, where g = J^T v is the gradient
    for a random vector v at the results (`Distance.cotangent`). One backward pass a batch gives g for all tensors. HAWQ-V2 (Dong et al.
    2020, section 3) takes the mean of the Hessian's diagonal times ``sum(e ** 2)`` in its place, and ModelOpt's AutoQuantize
    ``sum((g * e) ** 2)``, as if errors of elements had nothing to do with each other. Here products are added up over a sample of an
    activation, and over an output channel of a weight, before they are squared.
    """
    distance, generator = Distance(classes), torch.Generator().manual_seed(0)
    at = {key: i for i, choice in enumerate(choices) for key in choice.keys}
    sums = {(i, bits): 0.0 for i, choice in enumerate(choices) for bits in choice.candidates}
    weights = sim.weights()
    met: list[tuple[str, Tensor]] = []
    keys = {id(quantizer): key for key, quantizer in sim.quantizers().items() if key not in weights}

    def take(quantizer: Quantizer, args: tuple[Any, ...]) -> tuple[Tensor]:
        x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        met.append((keys[id(quantizer)], x))
        return (x.clone(),)  # what comes after may write into it

    def add(key: str, x: Tensor, gradient: Tensor) -> None:
        axis = sim.decisions.quantizers[key].spec.axis if key in weights else 0
        for bits in choices[at[key]].candidates:
            if bits != "float":
                products = (grids[bits][key].quantize(x) - x).double() * gradient.double()
                each = products.movedim(axis, 0).flatten(1).sum(1) if isinstance(axis, int) and x.dim() > 1 else products
                sums[at[key], bits] += float(each.square().sum())

    def run(batch: Any) -> Any:
        if forward is not None:
            return forward(sim.called(), tree_map_only(Tensor, _with_gradient, batch))
        args, kwargs = tree_map_only(Tensor, _with_gradient, to_device(arguments_of(batch, sim.examples), sim.model))
        with unfit_told((args, kwargs), lambda: sim.calls, sim.model):
            return sim(*args, **kwargs)

    def look(number: int, batch: Any) -> None:
        met.clear()
        results = [result for result in float_tensors(run(batch)) if result.requires_grad]
        if not results:
            raise ValueError("QuantSim.search_bits: nothing that the model returns has a gradient; return logits, not classes")
        if not all(bool(result.isfinite().all()) for result in results):
            raise ValueError(f"QuantSim.search_bits: batch {number} gives NaN or Inf in float: leave it out, or ask qsim.doctor why")
        tensors = [(key, x) for key, x in (*weights.items(), *met) if key in at]
        cotangents = [distance.cotangent(result, generator) for result in results]
        gradients = torch.autograd.grad(results, [x for _, x in tensors], cotangents, allow_unused=True)
        with torch.no_grad():
            distance.add(results, results)
            for (key, x), gradient in zip(tensors, gradients, strict=True):
                if gradient is not None:
                    add(key, x.detach(), gradient)
            for result in results:
                if not result._is_view():
                    result.detach_()  # it may be the model's own, which the next run writes to

    activations = [quantizer for key, quantizer in sim.quantizers().items() if key not in weights]
    with _differentiable(sim, weights.values()), hooked(activations, before=take):
        for number, batch in enumerate(iterate(data, None, show, "QuantSim.search_bits")):
            with beginning_alike(sim.model):
                look(number, batch)
    if not distance.weight:
        raise CalibrationError("QuantSim.search_bits: got no batch on which the model returns anything but zeros. Is the data set empty?")
    factor = distance.curvature / distance.weight
    return {place: total * factor for place, total in sums.items()}


def _with_gradient(x: Tensor) -> Tensor:
    return x.detach().requires_grad_().clone() if x.is_floating_point() else x  # the clone is no leaf: a model may write into it


@contextlib.contextmanager
def _differentiable(sim: Simulation, weights: Iterable[Tensor]) -> Iterator[None]:
    """Every quantizer is called and none quantizes, with gradients of all weights; afterwards the sim is as it was."""
    needed = [(weight, weight.requires_grad) for weight in weights]
    saves = sim.savings
    try:
        with unchanged(sim), sim.switch.turned(True), torch.enable_grad():
            sim.eval()
            sim.savings = False
            for quantizer in sim.quantizers().values():
                quantizer.enabled = False
            for weight, _ in needed:
                weight.requires_grad_(True)
            yield
    finally:
        sim.savings = saves
        for weight, was in needed:
            weight.requires_grad_(was)
