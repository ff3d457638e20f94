"""A traced simulation with what its current encodings and parameters make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

from qsim.graph.execute.marks import BIAS, QUANTIZED
from qsim.integer.assignment import Kernel, classify, weight_of
from qsim.integer.fused_sums import fuse_sums
from qsim.integer.kernel_calls import Operators
from qsim.integer.kernels.pairs import largest_pair
from qsim.integer.kernels.quantized import quantize
from qsim.integer.runtime_weights import bias_made_integers, fused_into_weights, weights_made_integers
from qsim.numbers.encoding import Encoding
from qsim.quantizers.quantizer import Quantizer
from qsim.trace.capture import Program
from qsim.trace.constants import written
from qsim.trace.integer_forms import use_integer_forms
from qsim.trace.linear_forms import note_linear_forms
from qsim.trace.mark_uses import MarkUses, not_finite, per_channel
from qsim.trace.marks_before_moves import mark_before_moves
from qsim.trace.marks_before_rectifiers import mark_before_rectifiers
from qsim.trace.runtimes import RUNTIMES, stored_as
from qsim.trace.storages import storages
from qsim.trace.token_scales import put_scales_behind, with_scale_one
from qsim.trace.weights_second import put_weights_second
from qsim.warning import warn


class Prepared:
    """The graph that ONNX Runtime has of a simulation, its kernels and their constants.

    Parameters
    ----------
    program : Program
        With marks behind moves too; its graph is copied.
    quantizers : mapping of str to Quantizer
        All that the marks name.
    parameter : callable
        The parameter or buffer at a path in the model.

    Raises
    ------
    ValueError
        A weight or bias that becomes integers has NaN or Inf in it.

    Attributes
    ----------
    module : GraphModule
    encodings : dict of str to Encoding
        Of the quantizers that are enabled, as an exported model has them.
    kernels : list of Kernel
    biases : dict of Node to str
        Operations without a kernel whose bias in float the optimiser quantizes all the same, and its argument.
    constants : set of Node
        Marks of parameters and buffers.
    operators, marked : dict
        What runs add: constants of operations, and what is behind `constants`.
    """

    def __init__(self, program: Program, quantizers: Mapping[str, Quantizer], parameter: Callable[[str], Tensor]) -> None:
        if broken := not_finite(program, quantizers, parameter):
            raise ValueError(
                f"QuantSim.integer: NaN or Inf in {', '.join(map(repr, broken))}; expected finite numbers, as integers are. "
                "qsim.doctor says where they come from; or leave the weight in float: sim.disable('<module>.weight')"
            )
        fixed = with_scale_one(quantizers)
        found = {key: quantizer.encoding for key, quantizer in fixed.items() if quantizer.enabled}
        self.encodings = _as_stored({key: e for key, e in found.items() if e is not None}, MarkUses.of(program), fixed)
        graph = Graph()
        graph.output(graph.graph_copy(program.exported.graph, {}))
        note_linear_forms(graph, set(fixed) - per_channel(fixed))
        _bypass(graph, self.encodings)
        put_scales_behind(graph, quantizers)
        put_weights_second(graph, {key for key, encoding in self.encodings.items() if encoding.axis is not None})
        mark_before_moves(graph, self.encodings)
        mark_before_rectifiers(graph, self.encodings)
        use_integer_forms(graph, self.encodings)
        fuse_sums(graph, self.encodings)
        stored = dict(stored_inputs(program))
        self._parameters = {node: parameter(stored[node.name]) for node in graph.nodes if node.name in stored}
        held = self._held(program, graph, parameter)
        if fused := fused_into_weights(graph, self.encodings, held):
            warn(
                f"QuantSim.integer: ONNX Runtime's optimiser makes integers of the weight of {', '.join(map(repr, fused))}, which is in "
                "float, after it multiplied or added what stands behind; that is not mirrored, and results differ. Quantize the weight"
            )
        self.encodings |= weights_made_integers(graph, self.encodings, held)
        self.module = GraphModule(program.exported.graph_module, graph)
        self.kernels: list[Kernel] = classify(self.module.graph, self.encodings)
        floats = [kernel.node for kernel in self.kernels if kernel.kernel is None]
        biases = {node: bias_made_integers(node, self.encodings) for node in floats}
        self.biases = {node: name for node, name in biases.items() if name is not None}
        marks = [node for node in self.module.graph.nodes if node.op == "call_function" and node.target in (QUANTIZED, BIAS)]
        self.constants = {node for node in marks if node.args[0].target in stored}
        self.operators: Operators = {}
        self.marked: dict[Node, Any] = {}

    def _held(self, program: Program, graph: Graph, parameter: Callable[[str], Tensor]) -> dict[Node, Tensor]:
        """What placeholders of a copied graph stand for, where no run changes it."""
        changed = written(program.exported.graph)
        held = {node.name: value for node, (_, value) in program.held_tensors(parameter).items() if node not in changed}
        return {node: held[node.name] for node in graph.nodes if node.op == "placeholder" and node.name in held}

    def with_pairs(self) -> list[Kernel]:
        """The kernels, each with the largest sum of two of its products."""
        found = [(kernel, weight_of(kernel, self.encodings)) for kernel in self.kernels]
        return [kernel if weight is None else replace(kernel, pair=self._pair(*weight)) for kernel, weight in found]

    def _pair(self, mark: Node, channels: int) -> int | None:
        """None for a weight that is computed."""
        values, encoding = self._parameters.get(mark.args[0]), self.encodings[str(mark.args[1])]  # type: ignore[arg-type]
        return None if values is None else largest_pair(quantize(values.detach().float(), encoding).integers, channels)


def _bypass(graph: Graph, encodings: Mapping[str, Encoding]) -> None:
    """Take out the marks of quantizers that are off."""
    for mark in list(graph.nodes):
        if mark.op == "call_function" and mark.target in (QUANTIZED, BIAS) and not all(key in encodings for key in mark.args[1:]):
            mark.replace_all_uses_with(mark.args[0])
            graph.erase_node(mark)


def stored_inputs(program: Program) -> list[tuple[str, str]]:
    """Placeholders of parameters and buffers, with their paths in the model."""
    specs = program.exported.graph_signature.input_specs
    return [(spec.arg.name, str(spec.target)) for spec in specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)]


def _as_stored(encodings: dict[str, Encoding], mark_uses: MarkUses, quantizers: Mapping[str, Quantizer]) -> dict[str, Encoding]:
    """Encodings of activations as an exported model has them."""
    stored = storages(mark_uses, quantizers, RUNTIMES["onnxruntime"]).activations
    return {key: stored_as(encoding, stored.get(key)) for key, encoding in encodings.items()}
