"""The BatchNorms of a simulation that stayed: their statistics, their rest, and their folding after training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from qsim.batch_norm.fold_report import FoldReport
from qsim.batch_norm.foldable import Fold
from qsim.batch_norm.folded_states import fold_what_is_loaded
from qsim.batch_norm.statistics import batch_norms, freeze, reestimate
from qsim.batch_norm.trained_fold import fold_trained
from qsim.close_names import close_names
from qsim.graph.execute.attach import detach
from qsim.graph.record.record import record
from qsim.options import check_flag, check_function, check_patterns
from qsim.runs.batches import Forward, iterate
from qsim.runs.report_subject import subject_of
from qsim.runs.sharding import sharded_around, sharded_modules
from qsim.simulation.range_choice import fit_biases
from qsim.simulation.simulation import Simulation
from qsim.warning import warn


def reestimate_batch_norms(
    sim: Simulation, data: Iterable[Any], forward: Forward | None, *, max_batches: int | None, progress: bool
) -> dict[str, int]:
    """`QuantSim.reestimate_batch_norms` documents it."""
    if forward is not None:
        check_function("QuantSim.reestimate_batch_norms", "forward", forward, "forward(model, batch)")
    run = sim.forward_batch if forward is None else forward
    called = sim.called()
    if not batch_norms(sim.model):
        folded = f": all {len(sim.folds)} are folded, and so are their statistics" if sim.folds else ""
        warn(f"QuantSim.reestimate_batch_norms: there is no BatchNorm{folded}. They stay with Config(batch_norm='keep')")
    with sharded_around(sim):
        return reestimate(
            sim.model, iterate(data, max_batches, progress, "QuantSim.reestimate_batch_norms"), lambda batch: run(called, batch)
        )


def freeze_batch_norms(sim: Simulation, patterns: Collection[str], *, affine: bool = False) -> None:
    """`QuantSim.freeze_batch_norms` documents it."""
    norms, caller = batch_norms(sim.model), "QuantSim.freeze_batch_norms"
    check_flag(caller, "affine", affine)
    check_patterns(caller, patterns)
    for pattern in patterns:
        names = [name for name in norms if name == pattern or fnmatchcase(name, pattern)]
        if not names:
            near = ", ".join(map(repr, close_names(pattern, norms)))
            close = f"close to it: {near}" if near else f"there are: {', '.join(norms) or 'none'}"
            raise ValueError(f"{caller}: no BatchNorm matches {pattern!r}; {close}")
        sim.frozen.update(names)
        freeze({name: norms[name] for name in names})
        if affine:
            for name in names:
                norms[name].requires_grad_(False)


def fold_batch_norms(sim: Simulation) -> FoldReport:
    """`QuantSim.fold_batch_norms` documents it."""
    if not batch_norms(sim.model):
        return FoldReport(subject=subject_of(sim.model))
    if sharded_modules(sim):
        raise ValueError("QuantSim.fold_batch_norms: fully_shard holds the weights; load the state into one that is not sharded")
    examples = sim.calls
    quantizers = sim.quantizers()
    bound = sim.bound_weights()
    of_parameter = {planned.parameter: quantizers[key] for key, planned in sim.decisions.quantizers.items()}
    detach(sim.model)
    norms = batch_norms(sim.model)
    report = fold_trained(sim.model, examples, of_parameter)
    sim.folds += tuple((Fold(path, layer, before=False), norms[path]) for path, layer in report.folded.items())
    fold_what_is_loaded(sim.model, sim.folds)
    sim.simulate(examples, record(sim.model, examples), report, quantizers)
    sim.bind(bound)
    sim.frozen &= set(batch_norms(sim.model))
    made = [bias for bias in sim.decisions.biases if bias.parameter.rpartition(".")[0] in report.folded.values()]
    return dataclasses.replace(report, warnings=(*report.warnings, *fit_biases(sim, made)), biases=tuple(bias.parameter for bias in made))
