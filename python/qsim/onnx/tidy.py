"""What is done to a translated model besides lowering: constants, names, symbolic sizes, what the exporter leaves behind."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from qsim.onnx.insert import OWN, NodeInserter
from qsim.onnx.translate import MARK_DOMAIN, mark_key

_SCOPES = "pkg.torch.onnx.name_scopes"


def fold(model: ir.Model) -> None:
    """Compute what depends on nothing but constants, and drop what does nothing. Before lowering: quantized weights shall stay."""
    optimizer.fold_constants(model, onnx_shape_inference=True)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)


def mark_before_reshapes(model: ir.Model, movable: Collection[str]) -> None:
    """Put a mark again before the Reshape that it stands behind, where nothing else reads the Reshape: next to what computed the tensor."""
    for node in list(model.graph):
        if mark_key(node.outputs[0]) not in movable:
            continue
        reshape = node.inputs[0].producer() if node.inputs[0] is not None else None
        if reshape is None or reshape.op_type != "Reshape" or len(reshape.outputs[0].uses()) > 1 or reshape.outputs[0].is_graph_output():
            continue
        made = reshape.inputs[0]
        if made is None or made.producer() is None or mark_key(made) is not None:
            continue
        mark = ir.Node(MARK_DOMAIN, "quantized", [made], dict(node.attributes), num_outputs=1)
        mark.metadata_props.update(node.metadata_props)
        (marked,) = mark.outputs
        marked.type = node.outputs[0].type
        marked.shape = made.shape
        marked.name = f"{node.outputs[0].name}_moved_mark"
        model.graph.insert_before(reshape, mark)
        reshape.replace_input_with(0, marked)


def read_sizes_of_integers(model: ir.Model) -> None:
    """Have what asks for the size of a tensor ask for that of its integers: an operation whose result is read in float, too, has no integer
    kernel."""
    for node in model.graph:
        x = node.inputs[0] if node.op_type == "Shape" else None
        quantize = next((user for user in x.consumers() if user.op_type == "QuantizeLinear"), None) if x is not None else None
        if quantize is not None:
            node.replace_input_with(0, quantize.outputs[0])
    model.graph.sort()


def clean(model: ir.Model) -> None:
    """Drop what nothing reads, and all that the exporter noted for debugging: it names files of the machine."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common.RemoveUnusedOpsetsPass()(model)
    common.ShapeInferencePass()(model)


def name_nodes(model: ir.Model) -> None:
    """Name nodes by module and operation ("layer1.0.conv1.Conv"), their results by them. Quantizers have their names already."""
    insertion = NodeInserter(model.graph)
    kept = {id(value) for value in model.graph.outputs}
    names: set[str] = set()
    for node in model.graph:
        result = node.outputs[0]
        if OWN in node.meta:
            node.name = result.name
            continue
        name = ".".join(filter(None, [_module(node), node.op_type]))
        number = 0
        while (chosen := name if not number else f"{name}_{number}") in names:
            number += 1
        names.add(chosen)
        node.name = chosen
        for value in node.outputs:
            if id(value) not in kept:
                value.name = insertion.free(f"{chosen}_output")
    common.ClearMetadataAndDocStringPass()(model)


def _module(node: ir.Node) -> str:
    """Path of the module whose forward called the operation."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    return str(scopes[-2]) if len(scopes) > 1 else ""


def name_ends(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs their names; a tensor inside the graph that has one of them gets another."""
    ends = [*zip(model.graph.inputs, inputs, strict=True), *zip(model.graph.outputs, outputs, strict=True)]
    wanted = {name for _, name in ends}
    insertion = NodeInserter(model.graph)
    others = [value for node in model.graph for value in node.outputs]
    for value in [*others, *model.graph.initializers.values()]:
        if value.name in wanted:
            value.name = insertion.free(f"{value.name}_inside")
    for value, name in ends:
        value.name = name


def pass_on_ends(model: ir.Model) -> None:
    """Return what forward returns as it came in, or twice, by an Identity: inputs and outputs have a name each."""
    graph = model.graph
    named, insertion = {id(value) for value in graph.inputs}, NodeInserter(graph)
    for i, value in enumerate(graph.outputs):
        if id(value) in named:
            assert value.dtype is not None
            graph.outputs[i] = insertion.node(None, "Identity", [value], f"{value.name}_returned", value.dtype, value.shape)
        named.add(id(value))


def name_batch(model: ir.Model, size: int | None) -> None:
    """Call the first axis of the inputs "batch", or fix it to a size."""
    symbols: dict[str, str] = {}
    for value in model.graph.inputs:
        first = value.shape[0] if value.shape else None
        if isinstance(first, ir.SymbolicDim) and first.value is not None and first.value not in symbols:
            symbols[first.value] = f"batch_{len(symbols)}" if symbols else "batch"
    name_sizes(model, symbols, size)


def name_sizes(model: ir.Model, symbols: dict[str, str], size: int | None = None) -> None:
    """Give open sizes their names, by symbol, or fix them to `size`."""
    values = [*model.graph.inputs, *model.graph.outputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(length, symbols, size) for length in value.shape])


def _renamed(length: int | ir.SymbolicDim, symbols: dict[str, str], size: int | None) -> int | str | None:
    if isinstance(length, int) or length.value is None:
        return length if isinstance(length, int) else None
    if size is not None and length.value in symbols:
        return size
    if length.value.isdigit():  # left to torch, and fixed by a guard
        return int(length.value)
    name = re.sub(r"\w+", lambda match: symbols.get(match[0], match[0]), length.value)
    return name if size is None else None
