"""What a traced model returns: tensors, which a file has, and what forward returns besides (None, numbers, text), which it has not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils._pytree import TreeSpec, tree_structure

Path = tuple[str | int, ...]


def output_names(exported: ExportedProgram) -> tuple[list[str], list[str]]:
    """Of tensors, and of what else is returned but None: "output" for a single one; keys of a dict; "output_0" ... for others."""
    spec: TreeSpec = exported.call_spec.out_spec  # type: ignore[assignment]
    given = [end.arg for end in exported.graph_signature.output_specs if end.kind is OutputKind.USER_OUTPUT]
    named = [("_".join(map(str, path if path and isinstance(path[0], str) else ("output", *path)))) for path in _paths(spec)]
    tensors = [name for name, arg in zip(named, given, strict=True) if isinstance(arg, TensorArgument)]
    others = [name for name, arg in zip(named, given, strict=True) if name not in tensors and getattr(arg, "value", arg) is not None]
    return tensors, others


def name_results(exported: ExportedProgram) -> None:
    """Have the signature call results as the graph does, after a pass that put others in their places."""
    specs, results = exported.graph_signature.output_specs, exported.graph.output_node().args[0]
    specs[:] = [  # copies of the program have these too, in lists of their own
        dataclasses.replace(spec, arg=TensorArgument(result.name)) if isinstance(spec.arg, TensorArgument) else spec  # type: ignore[union-attr]
        for spec, result in zip(specs, results, strict=True)  # type: ignore[arg-type]
    ]


def keep_tensors(exported: ExportedProgram) -> None:
    """Return tensors alone, as a tuple: PyTorch's exporter to ONNX knows no other results."""
    specs = exported.graph_signature.output_specs
    kept = [end.kind is not OutputKind.USER_OUTPUT or isinstance(end.arg, TensorArgument) for end in specs]
    if all(kept):
        return
    end: Any = next(node for node in reversed(exported.graph.nodes) if node.op == "output")
    end.args = (tuple(value for value, keep in zip(end.args[0], kept, strict=True) if keep),)
    specs[:] = [spec for spec, keep in zip(specs, kept, strict=True) if keep]
    returned = tree_structure(tuple(spec for spec in specs if spec.kind is OutputKind.USER_OUTPUT))
    whole = exported.module_call_graph[0]
    assert whole.signature is not None
    exported.module_call_graph[0] = dataclasses.replace(whole, signature=dataclasses.replace(whole.signature, out_spec=returned))


def _paths(spec: TreeSpec) -> Iterator[Path]:
    """Where each result is among what a model returns: keys, names of fields, numbers."""
    if spec.is_leaf():
        yield ()
        return
    for name, child in zip(_names_of_parts(spec), spec.children(), strict=True):
        yield from ((name, *path) for path in _paths(child))


def _names_of_parts(spec: TreeSpec) -> Sequence[str | int]:
    """Of a dict its keys. A type of its own says how it is put together by what it was registered with: keys may be among it."""
    context = spec.context
    held = [getattr(context, "_fields", context), *(context if isinstance(context, (list, tuple)) else ())]
    for names in held:
        if isinstance(names, (list, tuple)) and len(names) == spec.num_children and all(isinstance(name, str) for name in names):
            return names
    return range(spec.num_children)
