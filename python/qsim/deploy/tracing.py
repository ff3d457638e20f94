"""A simulation traced for a target: what every export begins with."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from qsim.deploy.retarget import retarget
from qsim.errors import CalibrationError, ExportError
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.sharding import sharded_modules
from qsim.simulation.borders import borders
from qsim.simulation.simulation import Simulation
from qsim.stages import Stages
from qsim.trace.capture import Program, capture
from qsim.trace.constants import fold_marked
from qsim.trace.idle_nodes import drop_idle_nodes
from qsim.trace.in_place import kept_state
from qsim.trace.integer_forms import use_integer_forms
from qsim.trace.mark_uses import MarkUses, not_finite, objections, per_channel, refusal
from qsim.trace.marks_before_moves import mark_before_moves
from qsim.trace.marks_before_rectifiers import mark_before_rectifiers
from qsim.trace.marks_behind_moves import mark_behind_moves
from qsim.trace.outputs import name_results
from qsim.trace.runtimes import Runtime
from qsim.trace.token_scales import put_scales_behind, with_scale_one
from qsim.trace.weights_second import put_weights_second
from qsim.warning import warn


class Tracing:
    """A simulation traced for a target, and what that cannot express."""

    def __init__(self, sim: Simulation, target: Runtime, dynamic_shapes: Any = None) -> None:
        if sharded_modules(sim):
            raise ExportError("QuantSim.export: fully_shard holds the weights; load the state into a simulation that is not sharded")
        borders(sim).check()
        self.sim, self.target = sim, target
        self.program: Program = capture(sim, *sim.calls[0], dynamic_shapes, open_batch=target.reads_onnx)
        fold_marked(self.program.exported)
        drop_idle_nodes(self.program.exported.graph)
        self.plain = self.program.copied()  # as it is without the target's marks
        self.quantizers = sim.quantizers()
        if target.tokens:
            put_scales_behind(self.program.exported.graph, self.quantizers)
            self.quantizers = with_scale_one(self.quantizers)
        if target.marks_moves and target.reads_onnx:
            put_weights_second(self.program.exported.graph, per_channel(self.quantizers))
        if target.marks_moves:
            mark_behind_moves(self.program.exported.graph, per_channel(self.quantizers))
        if target.marks_moves and target.reads_onnx:
            encodings = {key: encoding for key, encoding in sim.encodings().items() if sim.quantizers()[key].enabled}
            if target.only8:
                mark_before_moves(self.program.exported.graph, encodings)
            mark_before_rectifiers(self.program.exported.graph, sim.encodings())
            use_integer_forms(self.program.exported.graph, encodings)
        name_results(self.program.exported)
        self.program.exported.graph_module.recompile()
        self.mark_uses = MarkUses.of(self.program)
        sim.weights()  # an error where the model was changed
        broken = not_finite(self.program, self.quantizers, lambda path: attrgetter(path)(sim.model))
        self.objections = objections(self.mark_uses, self.quantizers, broken, target)

    def written(self) -> dict[str, Quantizer]:
        """The quantizers that a file gets: all but those of operations that fall back to float."""
        released = self.sim.released()
        return {key: quantizer for key, quantizer in self.quantizers.items() if key not in released}


def traced_for(sim: Simulation, target: Runtime, dynamic_shapes: Any, seconds: Stages, notes: list[str]) -> Tracing:
    """The simulation traced for a target, or where that cannot express it, and it was made for another one, what `retarget` makes of it.

    Raises
    ------
    ExportError
        The target cannot express it: the message lists every tensor.
    """
    with seconds.stage("trace"):
        traced = Tracing(sim, target, dynamic_shapes)
    if traced.objections and target.name != sim.config.profile.name:
        with seconds.stage("retarget"):
            traced = Tracing(_retargeted(traced, notes), target, dynamic_shapes)
    if traced.objections:
        raise ExportError(refusal(traced.objections, target))
    if state := kept_state(traced.plain.exported):
        named = f"{state[0]!r} and {len(state) - 1} more buffers" if len(state) > 1 else f"the buffer {state[0]!r}"
        notes.append(f"forward reads and writes {named}; the file keeps nothing: each run begins with what they hold now")
        warn(f"QuantSim.export: {notes[-1]}. Have forward take and return them for a file that goes on from run to run")
    return traced


def _retargeted(traced: Tracing, notes: list[str]) -> Simulation:
    """The simulation for the target of `traced`, which cannot express it as it is."""
    name, own = traced.target.name, traced.sim.config.profile.name
    try:
        made = retarget(traced.sim, name, traced.sim.calls[:1])
    except CalibrationError as error:
        raise ExportError(f"{refusal(traced.objections, traced.target)}\n{error}") from error
    first, reasons = next(iter(traced.objections.items()))
    notes.append(
        f"simulated for {own!r}, written as sim.retarget({name!r}): {len(traced.objections)} tensors cannot be expressed as they are "
        f"('{first}': {reasons[0]})"
    )
    warn(
        f"QuantSim.export: the simulation was made for {own!r}, whose results {name} cannot reproduce; the file holds "
        f"sim.retarget({name!r}), whose results differ. Evaluate that, or simulate with target={name!r}"
    )
    return made
