"""Names of operations as rules of targets write them: ONNX operator types for torch's functions."""

from __future__ import annotations

from qsim.operations.moves import MOVING_TYPES

_FUNCTIONS = {
    "Conv": "conv1d conv2d conv3d",
    "ConvTranspose": "conv_transpose1d conv_transpose2d conv_transpose3d",
    "Gemm": "linear addmm addmv",
    "MatMul": "matmul rmatmul mm bmm mv baddbmm addbmm",
    "Einsum": "einsum",
    "Attention": "scaled_dot_product_attention",
    "Gather": "embedding",
    "Add": "add iadd radd",
    "Sub": "sub isub rsub subtract",
    "Mul": "mul imul rmul multiply",
    "Div": "div rdiv rtruediv divide true_divide",
    "Concat": "cat concat concatenate stack hstack vstack dstack",
    "BatchNormalization": "batch_norm",
    "LayerNormalization": "layer_norm",
    "GroupNormalization": "group_norm",
    "InstanceNormalization": "instance_norm",
    "RMSNormalization": "rms_norm",
    "LRN": "local_response_norm",
    "Relu": "relu",
    "Clip": "relu6 hardtanh clamp clip clamp_min clamp_max",
    "LeakyRelu": "leaky_relu rrelu",
    "PRelu": "prelu",
    "Elu": "elu",
    "Selu": "selu",
    "Celu": "celu",
    "Gelu": "gelu",
    "Swish": "silu",
    "HardSwish": "hardswish",
    "Mish": "mish",
    "Sigmoid": "sigmoid",
    "HardSigmoid": "hardsigmoid",
    "Tanh": "tanh",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "AveragePool": "avg_pool1d avg_pool2d avg_pool3d",
    "GlobalAveragePool": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "LpPool": "lp_pool1d lp_pool2d lp_pool3d",
    "ReduceMax": "amax",
    "ReduceMean": "mean",
    "ReduceMin": "amin",
    "ReduceSum": "sum",
    "ReduceProd": "prod",
    "ReduceL2": "norm",
    "LpNormalization": "normalize",
    "Resize": "interpolate upsample upsample_nearest upsample_bilinear",
    "GridSample": "grid_sample",
    "CumSum": "cumsum",
    "Max": "maximum fmax",
    "Min": "minimum fmin",
    **{name: name.lower() for name in ("Exp", "Log", "Sqrt", "Pow", "Erf", "Sin", "Cos", "Reciprocal", "Floor", "Ceil", "Round", "Sign")},
    "Abs": "abs absolute",
    "Neg": "neg negative",
}
_TYPE = {name: onnx for onnx, names in _FUNCTIONS.items() for name in names.split()}

COMPUTING = frozenset(_FUNCTIONS)
# Their results lie on the grid of an operand, so no rule about a quantizer behind them can apply.
_ON_GRID = """
    BatchPermutation BatchToSpace Cast ChannelShuffle Constant ConstantOfShape CropAndResize Dropout GatherND MaxRoiPool
    NonMaxSuppression NonZero OneHot Pad Permute ReduceMax ReduceMin ScatterElements ScatterND SpaceToBatch StridedSlice TopK Where
"""
ON_GRID = (MOVING_TYPES | frozenset(_ON_GRID.split())) - COMPUTING
# They return numbers that they read, zeros, or numbers made of integers and shapes, whatever their attributes: they hand precision on.
_HANDED_ON = """
    Cast CenterCropPad Compress Concat ConstantOfShape Dropout GatherND Pad Range ReduceMax ReduceMin ReverseSequence ScatterElements
    ScatterND TopK Trilu Where
"""
HANDING_ON = MOVING_TYPES | frozenset(_HANDED_ON.split())
# Their results are never negative.
RECTIFYING = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Softplus", "Exp", "Sqrt", "Abs")


def onnx_type(op: str) -> str:
    """The ONNX operator type of a torch function, by name; what has none keeps its own.

    Examples
    --------
    >>> onnx_type("conv2d"), onnx_type("linear"), onnx_type("pixel_norm")
    ('Conv', 'Gemm', 'pixel_norm')
    """
    return _TYPE.get(op, op)
