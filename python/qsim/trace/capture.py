"""The simulated model as one graph: `torch.export`, with a mark (`qsim.graph.execute.marks`) for every quantizer."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Graph
from torch.utils._pytree import tree_leaves, tree_map_only

from qsim.errors import CaptureError
from qsim.options import shown
from qsim.runs.arguments import Arguments
from qsim.runs.snapshot import unchanged, without_autocast
from qsim.trace.apart_blocks import inline_regions
from qsim.trace.fx_nodes import function, module
from qsim.trace.in_place import held_inputs, mapped_marks, without_in_place, writes
from qsim.trace.named_keywords import named_keywords
from qsim.trace.open_sizes import doubled, names_of_sizes, open_axes, settle_sizes
from qsim.trace.refusals import trace_refusal

if TYPE_CHECKING:
    from qsim.simulation.simulation import Simulation


@dataclass(frozen=True)
class Program:
    """A traced simulation.

    Attributes
    ----------
    exported : ExportedProgram
        ATen operations before any decomposition. Its parameters and buffers are those of the model, under their names there; what is
        quantized goes through ``qsim_graph.quantized`` and ``qsim_graph.bias``.
    dynamic_batch : bool
        Whether it holds for every size of the first axis of its inputs. Otherwise it holds for the shapes it was traced with.
    example_batch : int
        Size of the first axis of the example inputs; 0 without any.
    sizes : dict of str to str, optional
        Names of open sizes by their symbols, where a caller said which are open.
    fixed : tuple of str
        Sizes that a caller left to torch, and that forward fixes: "axis 2 of 'image'".
    """

    exported: ExportedProgram
    dynamic_batch: bool
    example_batch: int
    sizes: dict[str, str] | None = None
    fixed: tuple[str, ...] = ()

    def copied(self) -> Program:
        """With a graph of its own, and its own lists of what goes in and out."""
        exported, graph, signature = self.exported, Graph(), self.exported.graph_signature
        graph.output(graph.graph_copy(exported.graph, {}))
        for node, own in zip(exported.graph.nodes, graph.nodes, strict=True):
            own.name = node.name  # the signature has it, also where a new graph gives none such: "input"
        made = ExportedProgram(
            exported.graph_module,
            graph,
            replace(signature, input_specs=list(signature.input_specs), output_specs=list(signature.output_specs)),
            exported.state_dict,
            exported.range_constraints,
            list(exported.module_call_graph),
            exported.example_inputs,
            dict(exported.constants),
            verifiers=exported.verifiers,
        )
        return replace(self, exported=made)

    def held_value(self, spec: InputSpec, stored: Callable[[str], Tensor]) -> Any:
        """What the model holds for an input of the program; `stored`: the parameter or buffer at a path in it."""
        path = str(spec.target)
        return stored(path) if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) else self.exported.constants[path]

    def held_tensors(self, stored: Callable[[str], Tensor]) -> dict[torch.fx.Node, tuple[str, Tensor]]:
        """Names and values of the placeholders of the tensors that the model holds."""
        held = {node: (str(spec.target), self.held_value(spec, stored)) for spec, node in held_inputs(self.exported)}
        return {node: (name, value) for node, (name, value) in held.items() if isinstance(value, Tensor)}

    @property
    def inputs(self) -> list[torch.fx.Node]:
        """Placeholders of the tensors that a caller gives, in order."""
        wanted = set(self.exported.graph_signature.user_inputs)
        return [node for node in self.exported.graph.nodes if node.op == "placeholder" and node.name in wanted]

    @property
    def held(self) -> list[torch.fx.Node]:
        """Placeholders of what the model holds: parameters, buffers, constants."""
        given = set(self.inputs)
        return [node for node in self.exported.graph.nodes if node.op == "placeholder" and node not in given]


def capture(
    sim: Simulation, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None, *, open_batch: bool = True
) -> Program:
    """Trace the model in eval mode, with a mark for each of its quantizers, whether it is enabled and calibrated or not.

    Parameters
    ----------
    sim : Simulation
    args, kwargs
        A call of the model, on its device. Traced with a first axis of any length where the model allows that.
    dynamic_shapes : optional
        The sizes to leave open, as `torch.export.export` takes them, instead.
    open_batch : bool
        False fixes all sizes to those of the call.

    Raises
    ------
    CaptureError
        `torch.export` cannot trace the model: the message holds its reason.
    """
    with (
        unchanged(sim.model, whole=False),
        sim.switch.turned(True, marks=True),
        torch.no_grad(),
        without_autocast(),
        named_keywords(sim.model, kwargs),
    ):
        sim.model.eval()
        if dynamic_shapes is not None:
            program = _with_sizes(sim.model, (args, kwargs), dynamic_shapes)
            return _plain(program, sim)
        reason: Exception | None = None
        for (given, named), is_doubled, is_open in _attempts(args, kwargs) if open_batch else [((args, kwargs), False, False)]:
            try:
                exported = _export(sim.model, given, named, is_open)
            except Exception as error:  # torch.export raises whatever its parts and the model raise
                reason = reason or error
                continue
            program = Program(exported, _has_dynamic_batch(exported), _batch_size(args, kwargs))
            if program.dynamic_batch or not is_doubled:
                return _plain(program, sim)
    assert reason is not None
    refusal = trace_refusal(sim.model, reason, kwargs)
    raise CaptureError(f"QuantSim: torch.export cannot trace {type(sim.model).__name__}: {refusal}") from reason


def _plain(program: Program, sim: Simulation) -> Program:
    """Without blocks that are called, `torch.vmap`, and operations in place."""
    inline_regions(program.exported)
    for key in mapped_marks(program.exported.graph):
        axis = sim.quantizers()[key].spec.axis
        if axis is not None and not (isinstance(axis, int) and axis < 0):
            raise CaptureError(
                f"QuantSim: '{key}' has several scales, along axis {axis} of a tensor that a torch.vmap in forward maps over: a traced "
                "graph has no such axis. Write the map as a product or as a loop, or give it one scale: Config.override(..., "
                "weight={'axis': None})"
            )
    changing = [node for node in program.exported.graph.nodes if writes(node)]
    try:
        return replace(program, exported=without_in_place(program.exported))
    except Exception as error:  # torch decomposes the program, and raises whatever its parts do
        what = f"operations in place ({function(changing[0])}_ in '{module(changing[0])}')" if changing else "torch.vmap"
        raise CaptureError(f"QuantSim: torch.export cannot do without {what}: {_first_words(error)}") from error


def _first_words(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).strip().partition("\n\n")[0].splitlines())


def _with_sizes(model: nn.Module, call: Arguments, dynamic_shapes: Any) -> Program:
    axes = None
    with contextlib.suppress(TypeError, ValueError, KeyError, IndexError):  # torch.export says what it wants
        axes = open_axes(model.forward, call, dynamic_shapes)
        call = doubled(call, axes)
    try:
        with _quiet():
            exported = torch.export.export(model, *call, dynamic_shapes=dynamic_shapes, strict=False)
        settle_sizes(exported)
    except Exception as error:
        said = f"cannot trace {type(model).__name__} with these dynamic_shapes: {_first_words(error)}"
        raise CaptureError(f"QuantSim: torch.export {said}") from error
    if axes is None:
        raise CaptureError(
            f"QuantSim: got dynamic_shapes={shown(dynamic_shapes)}; expected a dict, tuple or list "
            "with an entry for each argument of forward"
        )
    return Program(exported, _has_dynamic_batch(exported), _batch_size(*call), *names_of_sizes(exported, axes))


def _attempts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Arguments, bool, bool]]:
    """Calls to trace with, whether their batch was doubled (a trace is good then only if it holds for any batch), and whether to leave
    the batch open."""
    batched = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim() > 0]
    if batched and all(len(t) == 1 for t in batched):  # an axis of length 1 is always traced as 1
        yield tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, (args, kwargs)), True, True
    yield (args, kwargs), False, True
    yield (args, kwargs), False, False


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], open_batch: bool) -> ExportedProgram:
    size = _batch_size(args, kwargs)

    def shape(t: Any) -> Any:
        return {0: Dim.AUTO} if isinstance(t, Tensor) and t.dim() > 0 and len(t) == size else None

    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes = torch.utils._pytree.tree_map(shape, dict(arguments)) if open_batch else None
    with _quiet():
        exported = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    settle_sizes(exported)
    return exported


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns of what is its own (flat weights of recurrent layers), and prints the graph so far, and where to read on, if it fails."""
    said, logger = io.StringIO(), logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(said.getvalue())
    finally:
        logger.setLevel(level)


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return next((len(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim() > 0), 0)


def _has_dynamic_batch(exported: ExportedProgram) -> bool:
    inputs = set(exported.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in exported.graph.nodes if node.name in inputs and isinstance(node.meta.get("val"), Tensor)]
    sizes = [shape[0] for shape in shapes if len(shape) > 0]
    return any(isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None for size in sizes)  # a guard may have fixed it
