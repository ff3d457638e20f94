"""A simulation's weights, once and for all: the plain model with weights on their grids, and the integers that these are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from qsim import ops
from qsim.batch_norm.folded_states import fold_what_is_loaded
from qsim.graph.execute.attach import detach
from qsim.graph.execute.methods import PLACE
from qsim.graph.record.own_arguments import own_arguments
from qsim.numbers.encoding import Encoding
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.arguments import Arguments, tensors_in
from qsim.runs.random_numbers import seed_random_numbers
from qsim.runs.sharding import is_sharded
from qsim.runs.snapshot import evaluating, unchanged
from qsim.simulation.simulation import Simulation
from qsim.warning import warn

_NOISE = 64  # so many units in the last place may two kernels for one operation differ by, as those of recurrent layers do


class BakedWeight(NamedTuple):
    """A parameter that the simulation quantizes, and its quantizer."""

    name: str
    parameter: nn.Parameter
    quantizer: Quantizer


def bake(sim: Simulation) -> nn.Module:
    """`QuantSim.bake` documents it."""
    weights = _weights(sim, "bake")
    memo: dict[int, Any] = {}
    for module in sim.model.modules():
        if PLACE in vars(module):
            memo[id(vars(module)[PLACE])] = vars(module)[PLACE]  # goes with `detach`: copying it would copy the quantizers
    with torch.no_grad():
        for weight in weights:
            on_grid = weight.quantizer.quantize(weight.parameter.detach())
            memo[id(weight.parameter)] = nn.Parameter(on_grid, requires_grad=weight.parameter.requires_grad)
    baked = copy.deepcopy(sim.model, memo)
    detach(baked)
    fold_what_is_loaded(baked, ())
    _check(sim, weights, "bake", baked)
    left = [key for key in _others(sim, weights) if key in sim.needed()]
    if left:
        warn(
            f"QuantSim.bake: {len(left)} quantizers of activations are not in the baked model ({', '.join(left[:3])}"
            f"{', ...' if len(left) > 3 else ''}): it computes with float activations and biases, as weight-only runtimes do"
        )
    return baked


def integer_state_dict(sim: Simulation) -> dict[str, Tensor]:
    """`QuantSim.integer_state_dict` documents it."""
    found: dict[str, Tensor] = {}
    for name, t, weight in entries(sim, "integer_state_dict"):
        if weight is None:
            found[name] = t
            continue
        encoding = weight.quantizer.encoding
        assert encoding is not None
        found[name] = integers(t, encoding, weight.quantizer.spec.rounding)
        found[f"{name}_scale"] = encoding.scale
        if encoding.dtype.startswith(("int", "uint")):
            found[f"{name}_zero_point"] = encoding.zero_point
        if encoding.two_levels is not None:
            found[f"{name}_scale_integers"], found[f"{name}_super_scale"] = encoding.two_levels.split(encoding.scale)
    return found


def entries(sim: Simulation, caller: str) -> Iterator[tuple[str, Tensor, BakedWeight | None]]:
    """The state of the model, each entry with what it is quantized by, if it is. Raises where the model computes with other numbers too."""
    weights = _weights(sim, caller)
    if infinite := [weight.name for weight in weights if not bool(weight.parameter.isfinite().all())]:
        raise ValueError(
            f"QuantSim.{caller}: NaN or Inf in {', '.join(map(repr, infinite))}; expected finite numbers, as a grid has them: others "
            "would be stored. qsim.doctor says where they come from; or leave such weights in float: sim.disable('<module>.weight')"
        )
    _check(sim, weights, caller)
    own = {id(weight.parameter): weight for weight in weights}
    for name, t in sim.model.state_dict(keep_vars=True).items():
        yield name, t.detach(), own.get(id(t))


def integers(weight: Tensor, encoding: Encoding, rounding: str) -> Tensor:
    """What is stored for a weight: integers in the smallest type that holds the grid, or float8."""
    if encoding.dtype.startswith(("int", "uint")):
        scale = encoding.scale.double() if weight.dtype is torch.float64 else encoding.scale
        layout: Any = {"axis": encoding.axis, "block_size": encoding.block_size}
        return ops.quantize(weight, scale, encoding.zero_point, encoding.quant_min, encoding.quant_max, rounding=rounding, **layout)
    stored = getattr(torch, encoding.dtype, None)
    if stored is None:
        raise ValueError(f"QuantSim.integer_state_dict: torch has no type that stores {encoding.dtype}; the values are in sim.bake()")
    rounded = ops.round_to_format(weight.float(), encoding.dtype, scale=encoding.scale, axis=encoding.axis, block_size=encoding.block_size)
    one = torch.zeros_like(encoding.scale, dtype=torch.int32)
    spread = ops.dequantize(
        torch.ones_like(rounded, dtype=torch.int8), encoding.scale, one, axis=encoding.axis, block_size=encoding.block_size
    )
    steps: Tensor = rounded / spread
    return steps.to(stored)


def _weights(sim: Simulation, caller: str) -> list[BakedWeight]:
    """The parameters whose quantizers quantize. Raises where a weight is quantized otherwise than as a parameter of its own."""
    needed, quantizers = sim.needed(), sim.quantizers()
    found, parameters, computed, halves = [], sim.weights(), [], []
    for key, planned in sim.decisions.quantizers.items():
        quantizer = quantizers[key]
        if planned.role != "weight" or not quantizer.enabled or key not in needed:
            continue
        if planned.parameter is None:
            computed.append(key)
        elif not planned.spec.has_scale:
            halves.append(key)
        elif quantizer.encoding is None:
            raise sim.no_encoding()
        elif is_sharded(parameters[key]):
            raise ValueError(f"QuantSim.{caller}: '{planned.parameter}' is sharded by fully_shard; bake a simulation that is not")
        else:
            found.append(BakedWeight(planned.parameter, parameters[key], quantizer))  # type: ignore[arg-type]
    if computed:
        raise ValueError(
            f"QuantSim.{caller}: {', '.join(map(repr, computed))} quantize what the model computes from its parameters, or parts of them "
            f"(experts, standardized weights): no parameter can hold that. Leave them in float: sim.disable({computed[0]!r}, ...)"
        )
    if halves:
        raise ValueError(f"QuantSim.{caller}: {', '.join(map(repr, halves))} are in half precision; that is model.half(), without qsim")
    return found


def _others(sim: Simulation, weights: list[BakedWeight]) -> list[str]:
    own = {id(weight.quantizer) for weight in weights}
    return [key for key, quantizer in sim.quantizers().items() if quantizer.enabled and id(quantizer) not in own]


def _check(sim: Simulation, weights: list[BakedWeight], caller: str, baked: nn.Module | None = None) -> None:
    """The baked model computes on the example inputs what the simulation does with its quantizers of weights alone. Where none was made,
    because a second model takes memory, the model itself reads its weights as a baked one would."""
    plain = sim.model if baked is None else baked
    with unchanged(sim, whole=False), _weights_alone(sim, weights), evaluating(plain), torch.no_grad():
        for call in sim.calls:
            expected = _results(sim.model, call)
            with contextlib.nullcontext() if baked is not None else _in_plain(sim, weights):
                got = _results(plain, call)
            if not all(_agree(theirs, own) for theirs, own in zip(expected, got, strict=True)):
                raise RuntimeError(
                    f"QuantSim.{caller}: the baked model differs from the simulation on the example inputs: a weight is read at one place "
                    "where it is quantized and at another where it is not, or a forward is not deterministic. Leave such a weight in "
                    "float: sim.disable('<module>.weight')"
                )


def _results(model: nn.Module, call: Arguments) -> list[Tensor]:
    """What a model returns for a call, which leaves no trace in it."""
    with unchanged(model, whole=False):
        seed_random_numbers(0)
        (given, named), _ = own_arguments(model, call)  # a cache among them is written to
        out = model(*given, **named)
        return [*tensors_in(list(out) if isinstance(out, Iterator) else out)]


@contextmanager
def _in_plain(sim: Simulation, weights: list[BakedWeight]) -> Iterator[None]:
    """The model as it was written, with these weights on their grids wherever something reads them."""
    with sim.switch.turned(False), _OnGrids(weights):
        yield


class _OnGrids(TorchFunctionMode):
    """Functions that are given one of these weights get it on its grid. One at a time is held."""

    def __init__(self, weights: list[BakedWeight]) -> None:
        super().__init__()
        self._weights = {id(weight.parameter): weight for weight in weights}
        self._held: tuple[int, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._on_grid, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _on_grid(self, t: Tensor) -> Tensor:
        weight = self._weights.get(id(t))
        if weight is None:
            return t
        if self._held is None or self._held[0] != id(t):
            self._held = None
            self._held = id(t), weight.quantizer.quantize(t.detach())
        return self._held[1]


def _agree(expected: Tensor, got: Tensor) -> bool:
    if torch.equal(expected, got) or not expected.is_floating_point():
        return torch.equal(expected, got)
    limit = _NOISE * torch.finfo(expected.dtype).eps
    return bool(torch.allclose(expected, got, rtol=limit, atol=limit * float(expected.abs().nan_to_num(0.0).max()), equal_nan=True))


@contextmanager
def _weights_alone(sim: Simulation, weights: list[BakedWeight]) -> Iterator[None]:
    """In eval mode, with the quantizers of these weights on and all others off."""
    on = [sim.quantizers()[key] for key in _others(sim, weights)]
    try:
        for quantizer in on:
            quantizer.enabled = False
        with evaluating(sim), sim.switch.turned(True, falls_back=False):
            yield
    finally:
        for quantizer in on:
            quantizer.enabled = True
