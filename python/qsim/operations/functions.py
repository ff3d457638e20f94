"""What is known of torch's functions, by name: which compute, which only move values, where a weight stands.

Names, not function objects: Dynamo hands a function mode `Tensor.__rsub__` or `pow` as objects that are in no table, and strict export
calls an operator where eager calls a method.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._functorch import predispatch
from torch.overrides import get_overridable_functions, is_tensor_method_or_property
from torch.utils._device import _device_constructors

from qsim.operations.control_flow import CONTROL_FLOW
from qsim.operations.moves import MOVING
from qsim.operations.recurrent import RECURRENT

Function = Callable[..., Any]

OPENED = "_opened"  # ends the names of torch's functions whose inside is the model's: call sites tell them by it


def _table(names: str) -> frozenset[str]:
    return frozenset(names.split())


_LAYOUT = _table(
    """
    broadcast_tensors unfold fold squeeze_ unsqueeze_ transpose_ t_ swapaxes_ detach_ as_strided meshgrid _pack_padded_sequence
    _pad_packed_sequence __get__
    """
)
_SELECTION = _table(
    """
    __getitem__ masked_select tril triu diag where max min amax amin cummax cummin sort topk msort kthvalue median mode
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d_with_indices
    adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d
    """
)
# What puts other values into a tensor: the result may have a wider range.
INSERTION = _table(
    """
    __setitem__ setitem pad _pad masked_fill masked_fill_ masked_scatter masked_scatter_ scatter scatter_ index_put index_put_
    index_copy index_copy_ index_fill index_fill_ select_scatter slice_scatter diagonal_scatter copy_ fill_ zero_ set_ resize_
    """
)
COMPARISONS = _table(
    """
    eq ne lt gt le ge not_equal less less_equal greater greater_equal isclose isin searchsorted bucketize
    """
)
# What reads several operands, and computes nothing of them: which of its constants are read as they are decides what it returns.
MIXING = INSERTION | COMPARISONS | _table("where max min")
# What makes a tensor as an operand is, and takes no value of it.
CREATION = _table("empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full new_tensor")
CASTS = _table("to type type_as float half double bfloat16 int long short char byte bool cpu cuda")
# What returns its operand itself where nothing is dropped.
DROPOUTS = _table(
    "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_"
)
_REGULARIZATION = _table("dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout")
_QUESTIONS = _table(
    """
    __set__ __len__ __bool__ __contains__ __hash__ __index__ __int__ __float__ __repr__ __iter__ __array__ size dim ndimension
    numel nelement item tolist numpy stride storage_offset data_ptr element_size is_floating_point is_complex is_contiguous
    is_nonzero is_nested is_same_size is_inference is_tensor is_signed get_device result_type can_cast promote_types eq ne lt gt
    le ge equal allclose isclose isin isfinite isnan isinf isneginf isposinf all any argmax argmin argsort nonzero count_nonzero
    searchsorted bucketize histc bincount
    logical_and logical_or logical_not logical_xor and or xor invert bitwise_and bitwise_or bitwise_not
    bitwise_xor nms requires_grad_ register_hook retain_grad backward set_grad_enabled
    """
)
_WAITING = _table("wait_tensor")  # in compiled code behind each of `torch.distributed`'s functions

# The result lies on the grid of the operand, or is no quantity to be quantized.
TRANSPARENT = MOVING | _LAYOUT | _SELECTION | INSERTION | CREATION | CASTS | _REGULARIZATION | _QUESTIONS | _WAITING
RANDOM = _table("bernoulli bernoulli_ uniform_ normal normal_ rand randn randint rand_like randn_like randint_like multinomial randperm")
# Constructors of tensors out of values that may be data: lists, arrays, memory of other libraries.
CONVERSIONS = _table("tensor as_tensor asarray from_numpy frombuffer from_dlpack scalar_tensor new_tensor")
# Left to the modes outside: `torch.device(...)` is one, and gives new tensors their device.
CONSTRUCTORS = frozenset(f.__name__ for f in _device_constructors())
# And that of `torch.export`, which has to see where a `torch.vmap` begins and ends.
LEFT_OUTSIDE = CONSTRUCTORS | {
    name.strip("_") for name, f in vars(predispatch).items() if getattr(f, "__module__", "") == predispatch.__name__
}
# Transparent functions that hand values out of the graph as Python numbers.
READS = _table("__bool__ __contains__ __index__ __int__ __float__ __array__ item tolist numpy is_nonzero equal allclose")
# Of these, what code that computes with them outside torch asks.
LENDS = _table("__array__ __float__ item tolist numpy")

INDEXES = _table("__setitem__ setitem")  # their second argument says where, not what
# Of `torch.distributed`: what they write into their first argument is a sum over ranks, and its version counter does not tell.
SUMS_OF_RANKS = _table("all_reduce all_reduce_coalesced reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single")

MAC = _table(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear bilinear matmul rmatmul bmm baddbmm addmm
    addbmm addmv mv mm einsum scaled_dot_product_attention embedding embedding_bag grouped_mm
    """
)
# Of a matrix, or of as many as the first axis has: what experts are multiplied by.
MATRIX_PRODUCTS = _table("linear matmul rmatmul bmm baddbmm addmm addbmm addmv mv mm grouped_mm")
# Of transformers' experts, in compiled code: eager code calls there what no mode meets, whose result is quantized where it is read.
READ_QUANTIZED = _table("grouped_mm_fallback")
NORM = _table("batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm")
ACT = _table("relu relu6 hardtanh hardswish hardsigmoid sigmoid tanh silu gelu mish elu selu celu leaky_relu prelu clamp softplus")

# What training compares and minimises: no part of what runs on a target.
METRICS = _table(
    """
    cross_entropy nll_loss nll_loss_nd gaussian_nll_loss poisson_nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss
    l1_loss smooth_l1_loss huber_loss kl_div ctc_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss
    linear_cross_entropy
    """
)

_CONVOLUTIONS = [f"conv{n}d" for n in (1, 2, 3)]
_TRANSPOSED = [f"conv_transpose{n}d" for n in (1, 2, 3)]
# Position of a constant operand that is a weight, and its axis of output channels. As a keyword it is called `weight`.
WEIGHT: dict[str, tuple[int, int]] = {
    **dict.fromkeys((*_CONVOLUTIONS, "linear", "embedding"), (1, 0)),
    **dict.fromkeys((*_TRANSPOSED, "mm", "matmul"), (1, 1)),
    "addmm": (2, 1),
}
# Position of the bias. As a keyword it is called `bias`.
BIAS_POSITION: dict[str, int] = {**dict.fromkeys((*_CONVOLUTIONS, *_TRANSPOSED, "linear"), 2), "addmm": 0, "baddbmm": 0}

# Strict export calls operators where eager calls methods: one name for both.
SAME = {"truediv": "div", "itruediv": "div_", "iadd": "add_", "__iadd__": "add_", "isub": "sub_", "imul": "mul_"}
# Dynamo names an operator's method as it is written, ``x.__radd__(y)``, where eager names what it calls.
SAME |= {"__radd__": "add", "__rmul__": "mul", "__truediv__": "div", "__mod__": "remainder", "__isub__": "sub_", "__imul__": "mul_"}
SAME |= {"__idiv__": "div_", "__itruediv__": "div_", "__ifloordiv__": "floor_divide_", "__imod__": "remainder_"}
# Dynamo hands a mode what is computed with arrays of NumPy too, as methods of tensors, which these do not have.
ARRAY = getattr(sys.modules.get("numpy"), "ndarray", ())  # torch imports it, where it is
ON_ARRAYS: dict[str, Function] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "matmul", "pow", "neg", "abs", "eq", "ne", "lt", "gt", "le", "ge")},
    **{name: getattr(operator, name) for name in ("floordiv", "lshift", "rshift")},
    **{"div": operator.truediv, "remainder": operator.mod, "floor_divide": operator.floordiv},
    **{"add_": operator.iadd, "sub_": operator.isub, "mul_": operator.imul, "div_": operator.itruediv},
    **dict.fromkeys(("__rtruediv__", "__rdiv__"), lambda divisor, value: value / divisor),
    **{"pow_": operator.ipow, "remainder_": operator.imod, "floor_divide_": operator.ifloordiv},
}
# The method is written with super(), which Dynamo cannot trace under a mode.
ALIAS: dict[str, Function] = {"unflatten": torch.unflatten}

_OVERRIDABLE = frozenset(f for found in get_overridable_functions().values() for f in found)


def _check_key_padding_mask(mask: torch.Tensor, length: int, batch: int) -> None:
    """In place of torch's own, whose message is a closure over a tensor: Dynamo cannot trace that."""
    if mask.shape != (batch, length):
        raise AssertionError(f"expected a key_padding_mask of shape {(batch, length)}, got {tuple(mask.shape)}")


def _opened(func: Any) -> Function:
    """`func` without its own dispatch to function modes, so that a mode sees the functions inside."""
    scope = {name: value for name, value in func.__globals__.items() if name != "__name__"}
    scope |= {"has_torch_function": lambda *_: False, "_check_key_padding_mask": _check_key_padding_mask}
    code = func.__code__.replace(co_name=func.__name__ + OPENED)
    return types.FunctionType(code, scope, func.__name__, func.__defaults__, func.__closure__)


# Functions that would arrive whole although operations worth seeing are inside.
COMPOSITE: dict[str, Function] = {"multi_head_attention_forward": _opened(F.multi_head_attention_forward), **RECURRENT, **CONTROL_FLOW}


SOMETIMES_SUMS = _table("index_put index_put_ fold scatter scatter_")


def adds_up(name: str, options: Mapping[int | str, Any]) -> bool:
    """Whether a function that else only moves values computes sums (or products) of them, by its options: no operand's grid holds those.

    Examples
    --------
    >>> adds_up("index_put_", {3: True}), adds_up("scatter", {"reduce": "add"}), adds_up("fold", {1: (4, 4), 2: 2, "stride": 2})
    (True, True, False)
    """
    if name.startswith("index_put"):
        return bool(options.get(3, options.get("accumulate")))
    if name == "fold":  # of blocks that overlap
        sizes, steps = (options.get(position, options.get(key, 1)) for position, key in ((2, "kernel_size"), (5, "stride")))
        pairs = (value if isinstance(value, tuple) else (value, value) for value in (sizes, steps))
        return any(size > step for size, step in zip(*pairs, strict=False))
    return name in ("scatter", "scatter_") and options.get("reduce") is not None


def adds_nothing(name: str, options: Mapping[int | str, Any]) -> bool:
    """Whether a function adds a zero, by its options, as Python's ``sum([a, b])`` does, which is ``0 + a + b``: the result is on the
    operand's grid.

    Examples
    --------
    >>> adds_nothing("add", {1: 0}), adds_nothing("add", {"other": 0.0}), adds_nothing("add", {}), adds_nothing("mul", {1: 0})
    (True, True, False, False)
    """
    number = options.get(1, options.get("other"))
    return name == "add" and isinstance(number, (int, float)) and number == 0


# Where the numbers stand that functions put into a tensor, after it; by keyword `value`, `other` or `fill_value`.
_PUT_IN: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(("masked_fill", "masked_fill_"), (2, "value")),
    **dict.fromkeys(("index_fill", "index_fill_", "scatter", "scatter_", "pad"), (3, "value")),
    **dict.fromkeys(("__setitem__", "setitem"), (2,)),
    "fill_": (1, "value"),
    "where": (1, 2, "other", "self"),
}


def numbers_put_in(name: str, options: Mapping[int | str, Any]) -> list[Any]:
    """What a function that else only moves values puts in beside them, by its options.

    Examples
    --------
    >>> numbers_put_in("masked_fill", {2: 0.5}), numbers_put_in("pad", {1: (1, 1), "value": 1.0}), numbers_put_in("flip", {1: (0,)})
    ([0.5], [1.0], [])
    """
    return [options[slot] for slot in _PUT_IN.get(name, ()) if options.get(slot) is not None]


def visible(func: Function) -> bool:
    """Whether Dynamo hands `func` to a mode as eager does: not so `F.hardswish`, `F.hardsigmoid`, `torch.relu_` and `torch.ops`."""
    return func in _OVERRIDABLE or bool(is_tensor_method_or_property(func))


def route_name(func: Function) -> str:
    """The name by which two runs of a model are compared, call by call."""
    name = getattr(func, "__name__", "")
    return SAME.get(name, name)


def is_in_place(func: Function) -> bool:
    """Whether a function changes its first argument, by its name: not what `inplace` tells."""
    name = route_name(func)
    return name in INDEXES or (name.endswith("_") and not name.startswith("__"))


def name_of(func: Function) -> str:
    """The operation's name: `add` for `add`, `add_` and `__add__`. Names in the tables above stay as they are there."""
    name = route_name(func)
    return name if name in TRANSPARENT or name in RANDOM else name.strip("_")


def kind_of(func: Function) -> str:
    """`mac`, `batch_norm`, `norm`, `act`, `add`, or `op` for anything else."""
    name = name_of(func)
    if name in ("batch_norm", "add"):
        return name
    if name in ("iadd", "radd"):
        return "add"
    return "mac" if name in MAC else "norm" if name in NORM else "act" if name in ACT else "op"
