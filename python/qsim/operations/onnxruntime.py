"""What ONNX Runtime has integer kernels for, a row an ONNX operator type.

Its optimiser puts them where DequantizeLinear stands right in front of an operation and QuantizeLinear right behind it.
(``NodeGroupSelector`` and those derived from it, onnxruntime 1.32, core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IntegerKernel:
    """An integer kernel of ONNX Runtime.

    Attributes
    ----------
    name : str
        Of the operator that stands in an optimised model in place of the float one.
    operands : tuple of int or None
        Positions of those that have to be dequantized; None: all of them.
    fused : str
        What the optimiser calls the float operation together with an activation; "" where it makes none.
    leaves_float : bool
        Whether it may leave its result in float, unless that has a float bias in it.
    """

    name: str
    operands: tuple[int, ...] | None
    fused: str = ""
    leaves_float: bool = False


INTEGER_KERNELS = {
    "Conv": IntegerKernel("QLinearConv", (0, 1), "FusedConv"),
    "Gemm": IntegerKernel("QGemm", (0, 1), "FusedGemm", leaves_float=True),
    "MatMul": IntegerKernel("QLinearMatMul", (0, 1), "FusedMatMul", leaves_float=True),
    "Add": IntegerKernel("QLinearAdd", (0, 1)),
    "Mul": IntegerKernel("QLinearMul", (0, 1)),
    "Concat": IntegerKernel("QLinearConcat", None),
    "AveragePool": IntegerKernel("QLinearAveragePool", (0,)),
    "GlobalAveragePool": IntegerKernel("QLinearGlobalAveragePool", (0,)),
    "Sigmoid": IntegerKernel("QLinearSigmoid", (0,)),
    "LeakyRelu": IntegerKernel("QLinearLeakyRelu", (0,)),
    "Softmax": IntegerKernel("QLinearSoftmax", (0,)),
    "Where": IntegerKernel("QLinearWhere", (1, 2)),
}

# What only copies numbers, and what takes them element by element or nearly so: it gains nothing by an integer kernel whose result
# operations in float read. A grid there would be a rounding for nothing.
COPYING = ("Concat", "Gather")
FOLLOWING = (*COPYING, "Add", "Sub", "Mul", "Sigmoid", "HardSigmoid", "Swish", "HardSwish", "LeakyRelu", "Softmax", "Where")
LEAVING_FLOAT = tuple(name for name, kernel in INTEGER_KERNELS.items() if kernel.leaves_float)
