"""Traced simulations, kept by the structure and the shapes of their inputs, and what runs on them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from qsim.integer.evaluate import Evaluation
from qsim.options import check_flag
from qsim.runs.batches import Forward
from qsim.runs.sharding import sharded_modules
from qsim.runs.snapshot import beginning_alike, without_autocast
from qsim.simulation.simulation import Evaluator, Simulation
from qsim.trace.capture import capture
from qsim.trace.token_scales import has_scale_behind

PROGRAMS = "integer programs"  # where they are in `Simulation.derived`: with other fallbacks their marks stand elsewhere


def evaluation(sim: Simulation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Evaluation:
    """The traced simulation for such arguments."""
    programs: dict[Any, Evaluation] = sim.derived.setdefault(PROGRAMS, {})
    leaves, structure = tree_flatten((args, kwargs))
    shapes = [t.shape[1:] if isinstance(t, Tensor) else None for t in leaves]
    others = [(t.dtype, t.device, t.dim()) if isinstance(t, Tensor) else t for t in leaves]
    key = (str(structure), repr(shapes), repr(others), repr(sim.followed))
    whole = (*key, repr([t.shape[:1] for t in leaves if isinstance(t, Tensor)]))
    for name in (key, whole):
        if name in programs and not programs[name].is_of_now():
            del programs[name]
    found = programs.get(key) or programs.get(whole)
    if found is None:
        _check_scales(sim)
        program = capture(sim, args, kwargs)
        found = Evaluation(program, sim.quantizers(), sim.model)
        programs[key if program.dynamic_batch else whole] = found
    return found


def _check_scales(sim: Simulation) -> None:
    dynamic = [key for key, q in sim.quantizers().items() if q.enabled and q.spec.is_dynamic and not has_scale_behind(q.spec)]
    if dynamic:
        raise ValueError(
            f"QuantSim.integer: {dynamic[0]!r} and {len(dynamic) - 1} others have method='dynamic', a scale from each tensor; integer "
            "kernels take those for a whole tensor or token, of integers of at most 8 bits. Use such a spec, another method, or "
            "sim.disable() them"
        )


def run(sim: Simulation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a simulation, on integers."""
    if sim.training:
        raise RuntimeError("QuantSim.integer: the simulation is in training mode; integers have no gradient: call sim.eval()")
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs))):
        raise RuntimeError("QuantSim.integer: an input requires a gradient, and integers have none: call under torch.no_grad()")
    with without_autocast():
        return evaluation(sim, args, kwargs).run(args, kwargs)


class _Interpreter:
    """`run`, which a compiled simulation leaves to Python."""

    def __init__(self) -> None:
        reason = "within sim.integer() a simulation is interpreted, not compiled: call sim(...) itself, or compile without fullgraph=True"
        self._run: Evaluator = torch.compiler.disable(run, reason=reason)  # type: ignore[no-untyped-call]

    def __call__(self, sim: Simulation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(sim, args, kwargs)

    def __reduce__(self) -> tuple[type[_Interpreter], tuple[()]]:
        return _Interpreter, ()


_interpreter = functools.cache(_Interpreter)  # torch.compiler.disable imports Dynamo, which takes time


@contextlib.contextmanager
def on_integers(sim: Simulation) -> Iterator[None]:
    """Within the context calls of the simulation are computed on integers. `QuantSim.integer` documents the rest."""
    if sharded_modules(sim):
        raise ValueError("QuantSim.integer: fully_shard holds the weights; load the state into a simulation that is not sharded")
    with sim.calibrated():
        was, sim.evaluator = sim.evaluator, _interpreter()
        try:
            yield
        finally:
            sim.evaluator = was


def evaluate(sim: Simulation, batch: Any, forward: Forward | None = None, *, integer: bool) -> Any:
    """What the model returns for a batch, in eval mode and without gradients: see `QuantSim.evaluate`."""
    check_flag("QuantSim.evaluate", "integer", integer)
    training = [module for module in sim.modules() if module.training]
    if training:
        sim.eval()
    try:
        with torch.no_grad(), on_integers(sim) if integer else contextlib.nullcontext():
            return sim.runner(forward)(batch)
    finally:
        for module in training:
            module.training = True


def returned(sim: Simulation, batch: Any, *, integer: bool) -> list[Any]:
    """The tensors among what the model returns for a batch, as arrays of their own. It begins from the state that it is in, and may write
    into what it is given."""
    with beginning_alike(sim.model):
        results = evaluate(sim, tree_map_only(Tensor, Tensor.clone, batch), integer=integer)
        return [t.clone().cpu().numpy() for t in tree_leaves(results) if isinstance(t, Tensor)]
