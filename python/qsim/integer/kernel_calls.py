"""From a node of a traced graph and the tensors that it reads to a call of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from qsim.integer.kernels import activations, elementwise, pooling, products
from qsim.integer.kernels.products import Bias, Operator
from qsim.integer.kernels.quantized import QuantizedTensor, quantize
from qsim.numbers.encoding import Encoding
from qsim.trace.fx_nodes import arguments, function, per_axis

Operators = dict[Node, Operator]


class Launcher:
    """Runs kernels.

    Parameters
    ----------
    value_of : callable
        What an argument of a node is in this run: a tensor, a `QuantizedTensor`, or what it is if it is no node.
    kept : set of Node
        Nodes whose values do not change from run to run: parameters, and marks of them.
    operators : dict of Node to Operator
        Constants that were prepared in earlier runs; grows.
    """

    def __init__(self, value_of: Callable[[Any], Any], kept: set[Node], operators: Operators) -> None:
        self._value, self._kept, self._operators = value_of, kept, operators

    def run(self, node: Node, y: Encoding | None) -> QuantizedTensor | Tensor:
        """The result of an operation that `qsim.integer.assignment.classify` found a kernel for, on the grid `y`."""
        return _KERNEL_CALLS[function(node)](self, node, y)

    def _operator(self, node: Node, x: QuantizedTensor, weight: Any, bias: Any, channels: int) -> Operator:
        if node in self._operators:
            return self._operators[node]
        constant, added = self._value(weight), self._value(bias)
        if isinstance(added, Tensor):
            added = Bias.made_by_runtime(added, x.encoding, constant.encoding)
        operator = Operator.of(constant, added, channels=channels)
        if {n for n in (weight, bias) if isinstance(n, Node)} <= self._kept:
            self._operators[node] = operator
        return operator

    def _conv(self, node: Node, y: Encoding | None) -> QuantizedTensor:
        given = arguments(node)
        x: QuantizedTensor = self._value(given["input"])
        operator = self._operator(node, x, given["weight"], given["bias"], 0)
        axes = x.integers.dim() - 2
        stride, dilation = (per_axis(given[name], axes) for name in ("stride", "dilation"))
        padding = given["padding"]
        if isinstance(padding, str):
            x, padding = _padded(x, padding, [d * (k - 1) for d, k in zip(dilation, operator.weight.values.shape[2:], strict=True)]), 0
        assert y is not None
        padding = per_axis(padding, axes)
        return products.conv(x, operator, y, stride=stride, padding=padding, dilation=dilation, groups=given["groups"])

    def _linear(self, node: Node, y: Encoding | None) -> QuantizedTensor | Tensor:
        given = arguments(node)
        x: QuantizedTensor = self._value(given["input"])
        return products.gemm(x, self._operator(node, x, given["weight"], given["bias"], 0), y, product=F.linear)

    def _addmm(self, node: Node, y: Encoding | None) -> QuantizedTensor | Tensor:
        given = arguments(node)
        x: QuantizedTensor = self._value(given["mat1"])
        return products.gemm(x, self._operator(node, x, given["mat2"], given["self"], 1), y, product=torch.matmul)

    def _matmul(self, node: Node, y: Encoding | None) -> QuantizedTensor | Tensor:
        left, right = node.args[:2]
        a, b = self._value(left), self._value(right)
        if b.encoding.axis is None:
            return products.matmul(a, b, y)
        return products.gemm(a, self._operator(node, a, right, None, 1), y, product=torch.matmul)

    def _add(self, node: Node, y: Encoding) -> QuantizedTensor:
        a, b = map(self._value, node.args[:2])
        return elementwise.add(a, b, y)

    def _mul(self, node: Node, y: Encoding) -> QuantizedTensor:
        a, b = map(self._value, node.args[:2])
        return elementwise.mul(a, b, y)

    def _cat(self, node: Node, y: Encoding) -> QuantizedTensor:
        tensors, *options = node.args
        joined = torch.cat([self._value(t).dequantized() for t in tensors], *options, **node.kwargs)  # type: ignore[union-attr, arg-type]
        return quantize(joined, y)

    def _average_pool(self, node: Node, y: Encoding) -> QuantizedTensor:
        given = arguments(node)
        x: QuantizedTensor = self._value(given["self"])
        axes = x.integers.dim() - 2
        kernel, padding = (per_axis(given[name], axes) for name in ("kernel_size", "padding"))
        stride = per_axis(given["stride"] or kernel, axes)
        flags = {"ceil_mode": given["ceil_mode"], "count_padding": given["count_include_pad"]}
        return pooling.average_pool(x, y, kernel=kernel, stride=stride, padding=padding, **flags)

    def _adaptive_pool(self, node: Node, y: Encoding) -> QuantizedTensor:
        given = arguments(node)
        x: QuantizedTensor = self._value(given["self"])
        kernel = [n // r for n, r in zip(x.integers.shape[2:], given["output_size"], strict=True)]
        return pooling.average_pool(x, y, kernel=kernel, stride=kernel, padding=[0] * len(kernel))

    def _mean(self, node: Node, y: Encoding) -> QuantizedTensor:
        given = arguments(node)
        pooled = pooling.global_average_pool(self._value(given["self"]), y)
        return pooled if given["keepdim"] else QuantizedTensor(pooled.integers.flatten(1), y)

    def _sigmoid(self, node: Node, y: Encoding) -> QuantizedTensor:
        return activations.sigmoid(self._value(node.args[0]), y)

    def _softmax(self, node: Node, y: Encoding) -> QuantizedTensor:
        return activations.softmax(self._value(node.args[0]), y, arguments(node)["dim"])

    def _by_table(self, node: Node, y: Encoding) -> QuantizedTensor:
        """What the runtime computes in float too, once for each of 256 integers."""
        args = [value.dequantized() if isinstance(value, QuantizedTensor) else value for value in map(self._value, node.args)]
        return quantize(node.target(*args, **node.kwargs), y)  # type: ignore[operator]


def _padded(x: QuantizedTensor, mode: str, total: Sequence[int]) -> QuantizedTensor:
    """`x` with its zero point around it, as torch pads: what is odd goes behind."""
    if mode == "valid":
        return x
    ends = [end for n in reversed(total) for end in (n // 2, n - n // 2)]
    return QuantizedTensor(F.pad(x.integers, ends, value=float(x.encoding.zero_point)), x.encoding)


_KERNEL_CALLS: dict[str, Callable[..., QuantizedTensor | Tensor]] = {
    **{f"conv{n}d": Launcher._conv for n in (1, 2, 3)},
    **{f"avg_pool{n}d": Launcher._average_pool for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": Launcher._adaptive_pool for n in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm", "bmm"), Launcher._matmul),
    **dict.fromkeys(("cat", "concat", "concatenate"), Launcher._cat),
    **dict.fromkeys(("leaky_relu", "where"), Launcher._by_table),
    "linear": Launcher._linear,
    "addmm": Launcher._addmm,
    "add": Launcher._add,
    "mul": Launcher._mul,
    "mean": Launcher._mean,
    "sigmoid": Launcher._sigmoid,
    "softmax": Launcher._softmax,
}
