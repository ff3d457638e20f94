"""Verification: what ONNX Runtime and OpenVINO compute from a model, beside a simulation of it, and which operations it computes in float.

Works on a file alone, too: then its optimised graph is compared with the same graph unoptimised.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from qsim.deploy.parts import Array, concatenated
from qsim.deploy.times import Session, measured
from qsim.deploy.verification import IN_FLOAT, ON_INTEGERS, OPENVINO, OPTIMISED, UNOPTIMISED, Difference, Verification
from qsim.errors import ExportError
from qsim.integer.programs import evaluate, evaluation, returned
from qsim.integer.ties import FirstOfEquals
from qsim.onnx import file, openvino_sessions
from qsim.onnx.lint import is_surrounded, lint, maker_of
from qsim.onnx.model import size_of
from qsim.onnx.openvino_sessions import OpenVinoSession
from qsim.onnx.sessions import session
from qsim.operations.moves import MOVING_TYPES
from qsim.operations.onnxruntime import INTEGER_KERNELS
from qsim.runs.batches import Forward, arguments_of, as_batch, calls_made
from qsim.runs.snapshot import unchanged
from qsim.simulation.simulation import Simulation
from qsim.table import decibel

_EXACT, _FURTHER = 40.0, 4.0  # dB, and how many times the noise of quantization, that `tried` takes for last bits
# As its optimiser leaves them; where an operation runs on integers it has another name.
_IN_FLOAT = {"ConvTranspose", *INTEGER_KERNELS, *(kernel.fused for kernel in INTEGER_KERNELS.values() if kernel.fused)}
_LEFT = "ONNX Runtime's integer kernel did not take it: it wants other scales, zero points or types than the file has around it"


def verify(
    path: Path,
    batches: Iterable[tuple[Mapping[str, Array], Mapping[str, Sequence[Array]]]],
    *,
    model: ir.Model | None = None,
    beside: Path | None = None,
) -> Verification:
    """Run ONNX Runtime on batches.

    Parameters
    ----------
    path : Path
        Of a Q/DQ model.
    batches : iterable of (inputs, references)
        Inputs by name; references by theirs ("simulation"): what another computation gives for each output. There may be none.
    model : ir.Model, optional
        The file's, where it was parsed.
    beside : Path, optional
        The float model, whose time is taken too.

    Returns
    -------
    Verification
        The optimised graph beside the unoptimised one, and both beside each reference. Of a model for OpenVINO it is OpenVINO that is
        beside them, where it is installed; of one for another runtime, which has kernels of its own, there is the unoptimised graph alone.
    """
    model = ir.load(path) if model is None else model
    steps = {str(value.name): _step(value) for value in model.graph.outputs}
    found = {str(value.name): concatenated(value) for value in model.graph.outputs}
    result = Verification(onnxruntime.__version__, joined={name: made for name, made in found.items() if made is not None})
    sessions: dict[str, Session] = {UNOPTIMISED: session(path, optimised=False, model=model)}
    if is_for_onnxruntime(model):
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder, "optimised.onnx")
            sessions[OPTIMISED] = session(path, optimised=True, save=saved, model=model)
            result.in_float.update(_in_float(model, onnx.load(saved, load_external_data=False)))
    elif _is_for_openvino(model):
        reason = openvino_sessions.refusal(path) if openvino_sessions.is_installed() else None
        if reason is not None:
            result.notes.append(f"OpenVINO cannot load the file: {reason}")
        elif openvino_sessions.is_installed():
            sessions[OPENVINO] = opened = OpenVinoSession(path)
            result = replace(result, openvino=opened.version)
            result.in_float.update(openvino_sessions.in_float(model, opened.precisions()))
        else:
            result.notes.append('OpenVINO is not installed, so its kernels did not run: pip install "qsim[openvino]"')
    for index, (inputs, references) in enumerate(batches):
        if index == 0 and OPENVINO in sessions:
            result.borders.update(_borders(path, inputs, result.notes))
        if index == 0 and beside is not None and len(sessions) > 1:
            plain = OpenVinoSession(beside) if OPENVINO in sessions else session(beside)
            result = replace(result, times=measured(plain, list(sessions.values())[-1], inputs))
        got = {name: one.run(None, dict(inputs)) for name, one in sessions.items()}
        pairs = [(UNOPTIMISED, name) for name in sessions if name != UNOPTIMISED]
        last = list(sessions)[-1]
        pairs += [(name, other) for name in references for other in sessions if other == last or name not in (ON_INTEGERS, IN_FLOAT)]
        for mine, other in pairs:
            grids = dict.fromkeys(steps) if mine == IN_FLOAT else steps
            outputs = result.differences.setdefault((mine, other), {name: Difference(step) for name, step in grids.items()})
            for (name, difference), *both in zip(outputs.items(), {**got, **references}[mine], got[other], strict=True):
                difference.add(*both)
                for part in result.joined[name].parts if mine == IN_FLOAT and name in result.joined else ():
                    parts = result.parts.setdefault(name, {})
                    parts.setdefault(str(part), Difference(None)).add(*map(part.of, both))
    return result


def verify_simulation(
    sim: Simulation,
    path: Path,
    batches: Iterable[Any],
    model: ir.Model,
    write_float: Callable[[Path], Path],
    forward: Forward | None = None,
) -> Verification:
    """Run the model's runtime and the simulation, plain, on integers and in float, on batches as `calibrate` takes them, and compare.

    Parameters
    ----------
    model : ir.Model
        That of the file.
    write_float : callable
        Writes the float model to a path.
    forward : callable, optional
        As in `QuantSim.calibrate`: every call of the model that it makes is verified.
    """
    sizes = {str(value.name): [n if isinstance(n, int) else 0 for n in value.shape or ()] for value in model.graph.inputs}
    in_float32 = all(p.dtype is torch.float32 for p in sim.model.parameters() if p.is_floating_point())  # as integer kernels want it
    ways = {"simulation": False, ON_INTEGERS: True} if is_for_onnxruntime(model) and in_float32 else {"simulation": False}

    def computed() -> Iterable[tuple[Mapping[str, Array], Mapping[str, Sequence[Array]]]]:
        for batch in batches if forward is None else map(as_batch, calls_made(sim.called(), batches, forward)):
            tensors = [t for t in tree_leaves(arguments_of(batch, sim.examples)) if isinstance(t, Tensor)]
            if len(tensors) != len(sizes):
                raise ValueError(
                    f"QuantSim.export: got a batch of verify= with {len(tensors)} tensors for the model, {type(batch).__name__}; the file, "
                    f"which stays, takes {len(sizes)}: {', '.join(map(repr, sizes))}"
                )
            inputs = dict(zip(sizes, map(_array, tensors), strict=True))
            _refuse_other_sizes(path, sizes, inputs)
            references = {name: returned(sim, batch, integer=way) for name, way in ways.items()}
            with sim.in_float():
                references[IN_FLOAT] = returned(sim, batch, integer=False)
            yield inputs, references

    with tempfile.TemporaryDirectory() as folder:
        runs = ON_INTEGERS in ways or (_is_for_openvino(model) and openvino_sessions.is_installed())
        beside = write_float(Path(folder, "float.onnx")) if runs else None
        try:
            found = verify(path, computed(), model=model, beside=beside)
        except Exception as error:
            if not _is_of_onnxruntime(error):
                raise
            raise ExportError(
                f"QuantSim.export: ONNX Runtime {onnxruntime.__version__} does not run {path}, which is written: {error}. Leave the "
                "operation that it names in float, by config.override(name, off=True), and tell us of it"
            ) from error
    if not found.differences:
        raise ValueError(
            f"QuantSim.export: verify= got no batch. Is the iterator used up? {path} is written, and was compared with nothing"
        )
    if ON_INTEGERS in ways:
        kernels = evaluation(sim, *sim.calls[0]).prepared.kernels
        found.float_types.update(Counter(kernel.op for kernel in kernels if kernel.kernel is None))
    return found


def tried(sim: Simulation, path: Path, model: ir.Model) -> str:
    """What ONNX Runtime's plain kernels compute from a file otherwise than the simulation does, on the example inputs: a sentence, "" where
    that is nothing, or cannot be told.

    Translations of PyTorch's exporter may be wrong. Last bits, which decide at the edges of a grid, move a number by a step: no result is
    further from the simulation's for that than the simulation's is from the float model's.
    """
    args, kwargs = sim.calls[0]
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    inputs, outputs = ([str(value.name) for value in values] for values in (model.graph.inputs, model.graph.outputs))
    if len(tensors) != len(inputs) or any(t.dtype is torch.bfloat16 for t in tensors) or any(_is_random(node) for node in model.graph):
        return ""
    runs = []
    for on in (True, False):
        with unchanged(sim.model, whole=False), sim.switch.turned(on), FirstOfEquals():  # type: ignore[no-untyped-call]
            computed = evaluate(sim, _copied((args, kwargs)), lambda m, call: m(*call[0], **call[1]), integer=False)
        runs.append([t.detach().cpu() for t in tree_leaves(computed) if isinstance(t, Tensor)])
    try:
        got = session(path, optimised=False, model=model).run(None, dict(zip(inputs, map(_array, tensors), strict=True)))
    except Exception as error:
        if not _is_of_onnxruntime(error):
            raise
        return f"ONNX Runtime {onnxruntime.__version__} does not run the file: {error}" if is_for_onnxruntime(model) else ""
    said = []
    for name, mine, plain, other in zip(outputs, *runs, got, strict=True):
        if mine.is_floating_point() and mine.dtype is not torch.bfloat16 and bool(mine.any()):
            file, quantization = _finite_difference(mine, other), _finite_difference(mine, _array(plain))
            if file.sqnr < _EXACT and file.noise > _FURTHER * quantization.noise:
                between = f"{name!r} has {decibel(file.sqnr)} dB between them on the example inputs"
                said.append(f"{between}, and {decibel(quantization.sqnr)} between the simulation and the float model")
    return f"the file computes something else than the simulation: {said[0]}" if said else ""


def _finite_difference(mine: Tensor, other: Array) -> Difference:
    """Of a result, where the first is finite."""
    finite, difference = mine.isfinite(), Difference(None)
    difference.add(_array(mine.where(finite, 0)), np.where(_array(finite), other, 0) if tuple(mine.shape) == other.shape else other)
    return difference


def _is_of_onnxruntime(error: Exception) -> bool:
    """Its exceptions have no class in common but Exception."""
    return type(error).__module__.startswith("onnxruntime")


def _is_random(node: ir.Node) -> bool:
    return node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")


def is_for_onnxruntime(model: ir.Model) -> bool:
    """Whether a model was written for ONNX Runtime, or for nobody in particular: other runtimes have kernels of their own."""
    return model.metadata_props.get("qsim.target", "onnxruntime") == "onnxruntime"


def _is_for_openvino(model: ir.Model) -> bool:
    return model.metadata_props.get("qsim.target") == "openvino"


def _borders(path: Path, inputs: Mapping[str, Array], notes: list[str]) -> dict[str, Difference]:
    """OpenVINO's integers at quantizers, given those of ONNX Runtime's unoptimised graph, which are the simulation's, at all quantizers.

    Where OpenVINO cannot load such a model `notes` gets a sentence.
    """
    with tempfile.TemporaryDirectory() as folder:
        probes = {given: Path(folder, f"{given}.onnx") for given in (False, True)}
        for given, probe in probes.items():
            model = ir.load(path)
            before, names = len(model.graph.outputs), json.loads(model.metadata_props.get("qsim.names", "{}")).values()
            made = openvino_sessions.exposed(model, names, given=given)
            file.write(model, probe, external_data=size_of(model) > file.LARGE)
        if (reason := openvino_sessions.refusal(probes[True])) is not None:
            notes.append(f"integers at quantizers were not compared, for OpenVINO cannot load a model with them as inputs: {reason}")
            return {}
        expected = session(probes[False], optimised=False).run(None, dict(inputs))[before:]
        fed = {f"{name}_given": integers for name, integers in zip(made, expected, strict=True)}
        got = OpenVinoSession(probes[True]).run(None, {**inputs, **fed})[before:]
    found = {}
    for name, *both in zip(made, expected, got, strict=True):
        found[name] = Difference(1.0)
        found[name].add(*both)
    return found


def _refuse_other_sizes(path: Path, sizes: Mapping[str, list[int]], inputs: Mapping[str, Array]) -> None:
    """0 stands for a size that is left open."""
    for name, expected in sizes.items():
        got = inputs[name].shape
        if len(got) != len(expected) or any(size not in (0, n) for size, n in zip(expected, got, strict=True)):
            shown = ", ".join(str(size) if size else "any" for size in expected)
            raise ValueError(
                f"verify: got a batch whose {name!r} has shape {tuple(got)}; {path.name} takes ({shown}). Sizes that the file, which "
                "stays, has fixed are those of the example inputs, where the model computes with them (len(x), for one): verify with "
                "batches of those sizes, or export with dynamic_shapes"
            )


def _copied(batch: Any) -> Any:
    """A batch for a model that may write to its inputs."""
    return tree_map_only(Tensor, Tensor.clone, batch)


def _array(t: Tensor) -> Array:
    array: Array = t.detach().cpu().numpy()
    return array


def _step(output: ir.Value) -> float | None:
    """The scale of an output, found behind operations that only move values."""
    node = maker_of(output, MOVING_TYPES | {"Cast"})
    if node is None or node.op_type != "DequantizeLinear":
        return None
    scale = None if node.inputs[1] is None else node.inputs[1].const_value
    return None if scale is None or scale.size != 1 else float(scale.numpy().reshape(()))


def _in_float(model: ir.Model, optimised: onnx.ModelProto) -> dict[str, str]:
    """Nodes of `model` that the optimised graph computes in float: why."""
    reasons = lint(model, "onnxruntime")
    floats = {str(node.name): node for node in model.graph if node.op_type in _IN_FLOAT and node.outputs[0].dtype is ir.DataType.FLOAT}
    names, found = {str(node.name) for node in model.graph}, {}
    for node in optimised.graph.node:
        if node.op_type not in _IN_FLOAT:
            continue
        origin = node.name if node.name in names else max((name for name in floats if name in node.name), key=len, default="")
        if origin in reasons:
            found[origin] = reasons[origin]
        elif origin in floats and is_surrounded(floats[origin]):
            found[origin] = _LEFT if floats[origin].op_type in INTEGER_KERNELS else "ONNX Runtime has no integer kernel for it"
    return found
