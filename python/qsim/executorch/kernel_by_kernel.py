"""Each kernel by itself: the integers at every quantizer, ExecuTorch given the simulation's at all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from qsim import ops
from qsim.executorch.program_file import lower
from qsim.executorch.quantized_graph import DEQUANTIZE, QUANTIZE
from qsim.executorch.session import Array, ExecutorchSession


def integers_at_borders(module: GraphModule, leaves: list[Any]) -> dict[str, tuple[Array, Array]]:
    """The simulation's integers and ExecuTorch's at every quantizer of activations, by the names of their nodes.

    What differs at one changes nothing behind it: what reads it is given the simulation's.

    Parameters
    ----------
    module : GraphModule
        `QuantizedGraph.module`.
    leaves : list
        The inputs of a call, in order.
    """
    recording = _Recording(module)
    with torch.no_grad():
        recording.run(*leaves, enable_io_processing=False)
    found = recording.found
    inputs = {str(i): x for i, x in enumerate([*leaves, *(numbers for _, numbers, _ in found.values())])}
    lowered = lower(_given(module, list(found)), tuple(inputs.values()), {})
    got = ExecutorchSession(lowered.contents).run(None, inputs)
    return {name: (mine.numpy(), theirs / scale) for (name, (mine, _, scale)), theirs in zip(found.items(), got, strict=True)}


class _Recording(Interpreter):
    """Runs a graph with the simulation's own rounding, and keeps the integers."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, tuple[Tensor, Tensor, float]] = {}  # integers less their zero point, the numbers they stand for, scale

    def run_node(self, n: Node) -> Any:
        if n.target is not QUANTIZE:
            return super().run_node(n)
        x, scale, zero_point, low, high, dtype = self.fetch_args_kwargs_from_env(n)[0]
        grid = torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32)
        made = ops.quantize(x, *grid, low, high).to(dtype)
        self.found[n.name] = made.int() - zero_point, ops.dequantize(made, *grid).contiguous(), scale
        return made


def _given(module: GraphModule, names: list[str]) -> GraphModule:
    """The same operations between float inputs and outputs that are on the grids."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    graph.graph_copy(module.graph, copied)
    quantized = {node.name: copied[node] for node in module.graph.nodes if node.name in names}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    results = []
    for name in names:
        q = quantized[name]
        with graph.inserting_after(last):
            last = graph.placeholder(f"{name}_given")
        with graph.inserting_after(last):
            given = graph.call_function(QUANTIZE, (last, *q.args[1:]))
        for reader in list(q.users):
            reader.replace_input_with(q, given)
        results.append(graph.call_function(DEQUANTIZE, (q, *q.args[1:])))
    graph.output(tuple(results))
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(module, graph)
