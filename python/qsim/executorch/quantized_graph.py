"""A traced simulation with ``quantized_decomposed`` operators in the places of its marks: what PT2E makes, and ExecuTorch reads."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor
from torch.fx import GraphModule, Node

from qsim import ops
from qsim.errors import ExportError
from qsim.executorch.fused_forms import use_fused_forms
from qsim.executorch.kernels import INT8, as_int8, end_of_product, is_product, refused_weight
from qsim.graph.execute.marks import BIAS, QUANTIZED
from qsim.numbers.encoding import Encoding
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.quantizer import Quantizer
from qsim.trace.capture import Program
from qsim.trace.fx_nodes import arguments, module

_DECOMPOSED = torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = _DECOMPOSED.quantize_per_tensor.default, _DECOMPOSED.dequantize_per_tensor.default
_DEQUANTIZE_CHANNELS = _DECOMPOSED.dequantize_per_channel.default
_ENDS = (INT8.min, INT8.max, torch.int8)


@dataclass(frozen=True)
class QuantizedGraph:
    """A traced simulation without marks.

    Attributes
    ----------
    module : GraphModule
        Activations go through int8 and back wherever they are quantized; weights of integer kernels are int8, others float numbers on
        their grids; biases are the numbers that int32 stands for. It runs in PyTorch, and `torch.export` takes it.
    names : dict of str to str
        For each quantizer the node that makes its integers, or the buffer that holds them, or its numbers.
    in_float : dict of str to str
        Products with a quantized weight that have no integer kernel: why. By the names of their modules.
    """

    module: GraphModule
    names: dict[str, str]
    in_float: dict[str, str]


def quantized_graph(program: Program, quantizers: Mapping[str, Quantizer]) -> QuantizedGraph:
    """Put operators in the places of marks.

    Parameters
    ----------
    program : Program
        Marked for a target whose grids are int8: see `qsim.trace.runtimes`. It is not changed.
    quantizers : mapping of str to Quantizer
        Those that are to be written; the marks of all others are left out.
    """
    return _Lowering(program.exported.module(check_guards=False), quantizers).lowered()


class _Lowering:
    def __init__(self, module: Any, quantizers: Mapping[str, Quantizer]) -> None:
        self.module, self.graph = module, module.graph
        self.quantizers = {key: quantizer for key, quantizer in quantizers.items() if quantizer.enabled}
        self.names: dict[str, str] = {}
        self._made: dict[Any, str] = {}

    def lowered(self) -> QuantizedGraph:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target is QUANTIZED and node.args[1] not in self.quantizers:
                self._replace(node, _args(node)[0])
        self._refuse_other_floats()
        use_fused_forms(self.module)
        reasons = {
            node: self._refused(node) for node in self.graph.nodes if is_product(node) and self._grid(arguments(node)["weight"]) is not None
        }
        on_integers = {node for node, reason in reasons.items() if reason is None}
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target is QUANTIZED:
                self._quantized(node, on_integers)
            elif node.op == "call_function" and node.target is BIAS:
                self._bias(node)
        self._drop_unread()
        self.module.recompile()
        in_float = {module(node) or node.name: reason for node, reason in reasons.items() if reason is not None}
        return QuantizedGraph(self.module, self.names, in_float)

    def _refuse_other_floats(self) -> None:
        marked = {_args(node)[1]: node.meta["val"].dtype for node in self.graph.nodes if node.target is QUANTIZED}
        if others := {key: dtype for key, dtype in marked.items() if dtype is not torch.float32}:
            key, dtype = next(iter(others.items()))
            raise ExportError(
                f"QuantSim.export: {key!r} is {str(dtype).removeprefix('torch.')}, which PyTorch's quantized operators give back as "
                "float32. Simulate the model in float32: model.float()."
            )

    # What XNNPACK computes on integers.

    def _refused(self, product: Node) -> str | None:
        """Why a product with a quantized weight is computed in float; None if it is not."""
        given = arguments(product)
        if self._grid(given["input"]) is None or self._is_held(_args(given["input"])[0]):
            return "what it reads is not quantized"
        if not self._is_held(given["weight"].args[0]):
            return "its weight is computed anew in every call"
        if isinstance(given["bias"], Node) and not self._is_held(given["bias"].args[0] if given["bias"].target is BIAS else given["bias"]):
            return "its bias is computed anew in every call"
        readers = list(end_of_product(product).users)
        if len(readers) != 1 or self._grid(readers[0]) is None:
            return "its result is not quantized, or read by something else too"
        return refused_weight(product, self._encoding(_args(given["weight"])[1]))

    def _grid(self, node: Any) -> Quantizer | None:
        is_mark = isinstance(node, Node) and node.op == "call_function" and node.target is QUANTIZED
        return self.quantizers[_args(node)[1]] if is_mark else None

    def _encoding(self, key: str) -> Encoding:
        encoding = self.quantizers[key].encoding
        assert encoding is not None
        return encoding

    def _is_held(self, node: Any) -> bool:
        """Whether a node is a parameter, a buffer or a constant."""
        return isinstance(node, Node) and node.op == "get_attr"

    def _value(self, node: Node) -> Tensor:
        value: Tensor = operator.attrgetter(str(node.target))(self.module)
        return value.detach()

    # In the places of marks.

    def _quantized(self, mark: Node, on_integers: set[Node]) -> None:
        x, key = _args(mark)
        if not self._is_held(x):
            self._activation(mark, key)
            return
        for reader in list(mark.users):
            is_weight = reader in on_integers and arguments(reader)["weight"] is mark
            with self.graph.inserting_before(reader):
                reader.replace_input_with(mark, self._weight(x, key) if is_weight else self._number(x, key, self.quantizers[key].quantize))
        self.graph.erase_node(mark)

    def _activation(self, mark: Node, key: str) -> None:
        grid = (*as_int8(self._encoding(key)), *_ENDS)
        with self.graph.inserting_before(mark):
            q = self.graph.call_function(QUANTIZE, (mark.args[0], *grid))
        self.names.setdefault(key, q.name)
        for reader in list(mark.users):  # one for each, as the kernel that reads it takes it in
            with self.graph.inserting_before(reader):
                dq = self.graph.call_function(DEQUANTIZE, (q, *grid))
            reader.replace_input_with(mark, dq)
        self.graph.erase_node(mark)

    def _weight(self, x: Node, key: str) -> Node:
        quantizer, encoding = self.quantizers[key], self._encoding(key)
        grid = (encoding.scale, encoding.zero_point, encoding.quant_min, encoding.quant_max)
        integers = self._held(
            (x.target, key, "integers"),
            f"{key}_quantized",
            lambda: ops.quantize(self._value(x), *grid, axis=encoding.axis, rounding=quantizer.spec.rounding).to(torch.int8),
        )
        self.names.setdefault(key, str(integers.target))
        if encoding.axis is None:
            whole: Node = self.graph.call_function(DEQUANTIZE, (integers, float(encoding.scale), 0, *_ENDS))
            return whole
        scale = self._held((key, "scale"), f"{key}_scale", encoding.scale.detach().float().clone)
        zero = self._held((key, "zero_point"), f"{key}_zero_point", encoding.zero_point.to(torch.int64).clone)
        rows: Node = self.graph.call_function(_DEQUANTIZE_CHANNELS, (integers, scale, zero, encoding.axis, *_ENDS))
        return rows

    def _number(self, x: Node, key: str, rounded: Any) -> Node:
        """What is held at `x`, rounded, in float."""
        made = self._held((x.target, key, "numbers"), f"{key}_numbers", lambda: rounded(self._value(x)))
        self.names.setdefault(key, str(made.target))
        return made

    def _bias(self, mark: Node) -> None:
        x, input, weight = _args(mark)
        if self._is_held(x) and input in self.quantizers and weight in self.quantizers:
            rounded = BiasQuantizer(self.quantizers[input], self.quantizers[weight])
            with self.graph.inserting_before(mark):
                made = self._held((x.target, input, weight), f"{x.target}_rounded", lambda: rounded(self._value(x)))
            self._replace(mark, made)
        else:
            self._replace(mark, x)

    def _held(self, known: Any, name: str, value: Any) -> Node:
        """A buffer that is made once, read here."""
        if known not in self._made:
            name = "".join(c if c.isalnum() else "_" for c in name)
            while hasattr(self.module, name):
                name += "_"
            with torch.no_grad():
                self.module.register_buffer(name, value())
            self._made[known] = name
        made: Node = self.graph.get_attr(self._made[known])
        return made

    def _replace(self, node: Node, by: Node) -> None:
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def _drop_unread(self) -> None:
        """Parameters and buffers whose integers are read instead."""
        self.graph.eliminate_dead_code()
        read = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        for path, owner in self.module.named_modules():
            held = [name for name, _ in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))]
            for name in held:
                if f"{path}.{name}".lstrip(".") not in read:
                    delattr(owner, name)


def _args(node: Node) -> tuple[Any, ...]:
    return node.args
