"""Restoring accuracy after calibration: which data are used, what is measured, and what of it the simulation gets."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map_only

from qsim.analysis.deviation import Deviation, float_tensors
from qsim.errors import CalibrationError
from qsim.graph.record.own_arguments import own_arguments
from qsim.numbers.sqnr import sqnr
from qsim.options import check_function, check_whole, shown
from qsim.progress import progress
from qsim.restoration.choice import Solved, Steps
from qsim.restoration.distill import NOTHING_LEARNS, DistillationLoss, Distilled, learnable, relative_error, train
from qsim.restoration.kept_weights import KeptWeights
from qsim.restoration.ranks import Group, agree, share, total
from qsim.restoration.restore_report import RestoreReport
from qsim.restoration.weight_by_weight import Layers, Pass, uses_of
from qsim.runs.arguments import Arguments
from qsim.runs.batches import Forward, arguments_of, iterate, to_device
from qsim.runs.memory import MemoryWatch
from qsim.runs.report_subject import subject_of
from qsim.runs.sharding import sharded_modules
from qsim.runs.snapshot import beginning_alike, evaluating, rewriting, unchanged, undone_on_error
from qsim.runs.unfit import unfit_told
from qsim.simulation.range_choice import fit_biases
from qsim.simulation.restored_weights import SOLVED
from qsim.simulation.simulation import Simulation
from qsim.stages import Stages

MEMORY = 4 << 30
_SHARE = 4  # one batch of so many is held back


def restore_layers(
    sim: Simulation,
    data: Iterable[Any],
    forward: Forward | None,
    steps: Steps,
    *,
    caller: str,
    max_batches: int | None,
    memory: int | None,
    show: bool,
    distilling: int = 0,
    group: Group = None,
    path: str | os.PathLike[str] | None = None,
) -> RestoreReport:
    """`QuantSim.restore` and its parts document it; `distilling`: so many steps of distillation follow."""
    refuse(sim, caller)
    check_whole(caller, "steps", distilling, least=0)
    if memory is not None:
        check_whole(caller, "memory", memory, least=1, otherwise="None for 4 GiB")
    if forward is not None:
        check_function(caller, "forward", forward, "forward(model, batch)")
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"{caller}: got group={shown(group)}; expected a torch.distributed.ProcessGroup")
    if group is not None and distilling:
        raise ValueError(f"{caller}: got steps={distilling} and a group; distillation runs in one process")
    watch, seconds = MemoryWatch([p.device for p in sim.model.parameters()]), Stages("data", "forward", "moments", "solving")
    wanted, skipped = _candidates(sim)
    with seconds.stage("data"):
        calls, measures, notes = _calls(sim, data, forward, caller, max_batches)
    if distilling and not any(learnable(sim)):
        notes.append(f"nothing was distilled: {NOTHING_LEARNS}")
        distilling = 0
    with _outside_inference_mode(), unchanged(sim), sim.calibrated(), torch.no_grad():
        sim.eval()
        with seconds.stage("forward"):
            uses, widest, stateful = uses_of(sim, calls[0])
        agree(dict(uses), "how often a run reads each weight", group)
        used = _that_fit(calls, measures, widest, MEMORY if memory is None else memory)
        if len(used) < len(calls):
            notes.append(f"{len(calls) - len(used)} of {len(calls)} batches were not used: what they keep in memory is more than memory=")
        calls, measures = [calls[i] for i in used], [measures[i] for i in used]
        keep = None if path is None else KeptWeights(path, sim, steps, group)
        layers = Layers(sim, steps, wanted, uses, seconds, stateful=stateful, keeps_results=distilling > 0, group=group, kept=keep)
        taken = len(layers.found.weights) + len(layers.found.skipped)
        if taken:
            notes.append(f"{taken} weights were taken from path=, where they had been kept")
        left = sum(uses[key] > 0 for key in wanted) - taken
        for _ in progress(layers.run(calls, measures), total=left, title=caller.rpartition(".")[2], unit="weight", show=show):
            pass
        found = layers.found
        if len(found.left_out) == len(calls):
            raise CalibrationError(f"{caller}: every batch has NaN or Inf; the first: {next(iter(found.left_out.values()))}")
        with seconds.stage("forward"):
            before = after = _level(sim, calls, found, group)
            if found.solved:  # undone on leaving: weights that are read many times were solved for when the last time came
                apply(sim, found.solved, group)
                after = _level(sim, calls, found, group)
    skipped |= found.skipped | {key: "no batch reached it" for key in wanted if not uses[key]}
    kept = bool(found.solved) and (after > before or math.isnan(after))
    distilled = None
    with _outside_inference_mode(), undone_on_error(sim):
        if kept:
            notes += apply(sim, found.solved, group)
        if distilling:
            with seconds.stage("distillation"), _evaluating(sim):
                there = [i for i in range(len(calls)) if i in found.references]
                results = [found.references[i] for i in there]
                ran, held = [calls[i] for i in there], [measures[i] for i in there]
                distilled = train(sim, ran, held, results, steps=distilling, loss=relative_error, seed=0, show=show)
            after, kept = distilled.levels[distilled.kept] if distilled.kept else after, kept or distilled.kept > 0
    solved, measured = (sum(held is there for i, held in enumerate(measures) if i not in found.left_out) for there in (False, True))
    return RestoreReport(
        found.weights,
        skipped,
        before,
        after,
        kept,
        {used[i]: why for i, why in found.left_out.items()},
        solved,
        measured,
        notes,
        distilled,
        dict(seconds),
        watch.peaks(),
        subject=subject_of(sim.model, sim.config),
    )


def distill(
    sim: Simulation,
    data: Iterable[Any],
    steps: int,
    forward: Forward | None,
    *,
    loss: DistillationLoss,
    max_batches: int | None,
    seed: int,
    show: bool,
) -> Distilled:
    """`QuantSim.distill` documents it."""
    caller = "QuantSim.distill"
    refuse(sim, caller)
    check_whole(caller, "steps", steps, least=1)
    check_whole(caller, "seed", seed, least=0)
    check_function(caller, "loss", loss, "loss(got, wanted) -> Tensor")
    if forward is not None:
        check_function(caller, "forward", forward, "forward(model, batch)")
    if not any(learnable(sim)):
        raise ValueError(f"{caller}: {NOTHING_LEARNS}")
    calls, measures, _ = _calls(sim, data, forward, caller, max_batches)
    with _outside_inference_mode(), undone_on_error(sim), _evaluating(sim):
        with sim.in_float(), torch.no_grad():
            wanted = [_undone(sim, call) for call in calls]
        return train(sim, calls, measures, wanted, steps=steps, loss=loss, seed=seed, show=show)


def _undone(sim: Simulation, call: Callable[[], Any]) -> Any:
    """What a call returns, each from the state that the model is in, with the same random numbers; a copy: a model may return its own."""
    with beginning_alike(sim.model):
        return own_arguments(sim.model, call())[0]


def _outside_inference_mode() -> AbstractContextManager[Any]:
    """Tensors that are made under it count no changes, and no gradient goes through them."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _as_outside(t: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made under `torch.inference_mode`."""
    with torch.inference_mode(False):
        return t.clone() if t.is_inference() else t


@contextmanager
def _evaluating(sim: Simulation) -> Iterator[None]:
    """The simulation on, in eval mode; training flags are afterwards as they were."""
    try:
        with sim.calibrated(), evaluating(sim):
            yield
    finally:
        sim.derived.clear()


def refuse(sim: Simulation, caller: str) -> None:
    """Raise where a simulation cannot be restored at all."""
    if sharded_modules(sim):
        raise ValueError(f"{caller}: the simulation is sharded by FSDP; restore it before fully_shard")
    if any(t.is_inference() for t in (*sim.parameters(), *(q.grid_tensors[0] for q in sim.quantizers().values()))):
        raise ValueError(
            f"{caller}: the simulation was made or calibrated under torch.inference_mode(), whose tensors take no gradient and count no "
            "changes; make and calibrate it outside"
        )
    if sim.restored:
        raise ValueError(
            f"{caller}: the weights of this simulation were solved for already ({sim.restored}), and the float model's are gone; "
            "make a new one: qsim.QuantSim(model, example_inputs, config)"
        )


def _candidates(sim: Simulation) -> tuple[list[str], dict[str, str]]:
    """The weights to be solved for, and why the others are not."""
    needed, quantizers, weights = sim.needed(), sim.quantizers(), sim.weights()
    own = {id(t) for t in (*sim.model.parameters(), *sim.model.buffers())}
    shared = Counter(id(weight) for weight in weights.values())
    wanted, skipped = [], {}
    for key, weight in weights.items():
        quantizer = quantizers[key]
        if sim.decisions.quantizers[key].role != "weight":
            continue
        if not quantizer.enabled or key not in needed:
            skipped[key] = "it is in float now"
        elif not quantizer.spec.has_scale:
            skipped[key] = f"{quantizer.spec.dtype} has no grid to choose on"
        elif id(weight) not in own:
            skipped[key] = "it is computed from other parameters"
        elif shared[id(weight)] > 1:
            skipped[key] = "two quantizers read it"
        else:
            wanted.append(key)
    return wanted, skipped


def _calls(
    sim: Simulation, data: Iterable[Any], forward: Forward | None, caller: str, max_batches: int | None
) -> tuple[list[Callable[[], Any]], list[bool], list[str]]:
    """What runs the model on each batch, which of them are held back, and what is to be said of that."""
    batches = [tree_map_only(Tensor, _as_outside, batch) for batch in iterate(data, max_batches, False, caller)]
    if not batches:
        raise CalibrationError(f"{caller}: got no batch. Is the iterator used up, or the data set empty?")
    if forward is not None:
        calls: list[Callable[[], Any]] = [partial(sim.runner(forward), batch) for batch in batches]
    else:
        arguments = [arguments_of(batch, sim.examples) for batch in batches]
        if len(arguments) == 1:
            arguments = _halves(arguments[0])
        calls = [partial(_call, sim, sim.called(), *to_device(each, sim.model)) for each in arguments]
    if len(calls) == 1:
        return calls, [False], ["nothing was held back: gains were measured on the one batch that there is"]
    last = len(calls) - 1
    return calls, [i % _SHARE == _SHARE - 1 or i == last < _SHARE for i in range(len(calls))], []


def _call(sim: Simulation, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with unfit_told((args, kwargs), lambda: sim.calls, sim.model):
        args, kwargs = sim.switch.own(sim.model, (args, kwargs))
        return called(*args, **kwargs)


def _halves(arguments: Arguments) -> list[Arguments]:
    """One batch as two, of three samples of four and of the others, where all its tensors have as many samples."""
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
    size = sizes.pop() if len(sizes) == 1 else 0
    if size < 2:
        return [arguments]
    cut = min(size - 1, -(-size * (_SHARE - 1) // _SHARE))
    return [tree_map_only(Tensor, itemgetter(part), arguments) for part in (slice(cut), slice(cut, None))]


def _that_fit(calls: list[Callable[[], Any]], measures: list[bool], widest: int, memory: int) -> list[int]:
    """The batches whose runs fit into memory: each keeps about what an operation reads, twice over, in float and simulated."""
    count = max(2, memory // max(4 * widest, 1))
    if count >= len(calls):
        return list(range(len(calls)))
    held = [i for i, measured in enumerate(measures) if measured][: max(1, count // _SHARE)]
    others = [i for i, measured in enumerate(measures) if not measured][: count - len(held)]
    return sorted(held + others)


def _level(sim: Simulation, calls: list[Callable[[], Any]], found: Pass, group: Group) -> float:
    """SQNR in dB of the simulation's results, as it is, to those in float."""
    level = Deviation()
    was, sim.savings = sim.savings, False  # no weight is kept quantized that is there for now only
    try:
        for batch, reference in found.results.items():
            with beginning_alike(sim.model):  # as the run in float did
                for wanted, got in zip(*map(float_tensors, (reference, calls[batch]())), strict=True):
                    level.add(wanted, got)
    finally:
        sim.savings = was
    return level.sqnr if group is None else sqnr(*total([level.signal, level.noise], group, torch.device("cpu")))


def apply(sim: Simulation, solved: dict[str, Solved], group: Group) -> list[str]:
    """Give the simulation what was found. Returns what a person should know."""
    weights = sim.weights()
    quantizers = sim.quantizers()
    with rewriting():
        for key, found in solved.items():
            quantizers[key].set_encoding(found.encoding)
            changed = [quantizers[key].grid_tensors[0]]
            if found.solves:
                changed.append(weights[key].copy_(found.weight))
            if found.bias is not None:
                changed.append(attrgetter(found.bias)(sim.model).copy_(found.value))
            share(changed, group)
    if any(found.solves or found.bias for found in solved.values()):
        sim.note_restored(solved, SOLVED)
    sim.derived.clear()
    return fit_biases(sim, sim.decisions.biases)
