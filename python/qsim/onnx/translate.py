"""From the traced graph to ONNX: the dynamo exporter, with nodes of a private domain for marks and a few translations of our own.

Ours are there because runtimes have integer kernels for one of several ways to write an operation: GlobalAveragePool, not ReduceMean;
a Gemm, not MatMul and Add; Reshape to constant sizes.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnxscript import values

from qsim.errors import ExportError
from qsim.graph.execute.marks import BIAS, QUANTIZED, ROUNDED
from qsim.graph.execute.recurrent_layers import RECURRENT
from qsim.onnx.decomposition import Decomposition
from qsim.onnx.recurrent_nodes import recurrent
from qsim.onnx.resize import resizes
from qsim.onnx.scatter import scatter_reduce
from qsim.trace.capture import Program
from qsim.trace.integer_forms import NUMBER, SCALED
from qsim.trace.linear_forms import LinearForm, linear_form
from qsim.trace.refusals import translation_refusal

MARK_DOMAIN = "qsim"
_CURE = "Write it with operations that ONNX has, or take it out of what is simulated and exported"
_COMPLEX = "The model computes with complex numbers; ONNX has few: write them as pairs of real ones (rotary embeddings: cos and sin)"
_CURES = {  # by what torch's message holds
    "only 4D query": "Give query, key and value of attention the same dimensions before their last two (expand them)",
}
_aten = torch.ops.aten
_FLOATS = [f"tensor({name})" for name in ("float", "double", "float16", "bfloat16")]


def translate(program: Program, opset: int, *, movable: Collection[str]) -> ir.Model:
    """The program as an ONNX model, with nodes ``qsim::quantized`` (attribute `key`) and ``qsim::bias`` (`input`, `weight`) for marks;
    ``qsim::rounded`` (`format`, `direction` "in" or "out") where an operation falls back; ``qsim::scaled`` (`key`, `factor`) and
    ``qsim::number`` (`key`, `value`) for integer forms.

    Parameters
    ----------
    program : Program
    opset : int
    movable : collection of str
        Quantizers whose marks may be put again behind a Reshape, so that they stand right beside operations, where integer kernels look
        for them.

    Raises
    ------
    ExportError
        The exporter has no translation for an operation: the message holds its reason.
    """
    try:
        with _quiet():
            exported = torch.onnx.export(
                Decomposition(program.exported).program(),
                dynamo=True,
                opset_version=opset,
                optimize=False,  # it deletes the addition of an eps below 1e-8
                verbose=False,
                custom_translation_table=_translations(opset, movable),
            )
    except torch.onnx.OnnxExporterError as error:
        refused = translation_refusal(error)
        cure = next((text for name, text in _CURES.items() if name in refused), _COMPLEX if _has_complex(program) else _CURE)
        raise ExportError(f"QuantSim.export: PyTorch's ONNX exporter cannot translate this model: {refused}. {cure}") from error
    assert exported is not None
    model: ir.Model = exported.model
    return model


def _has_complex(program: Program) -> bool:
    held = (node.meta.get("val") for node in program.exported.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in held)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of packages that are not installed, and torch of functions of its own that it will replace."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _private(name: str, *attributes: str, number: str = "") -> values.Op:
    schema = onnx.defs.OpSchema
    x, y = schema.FormalParameter("x", "T"), schema.FormalParameter("y", "T")
    types = [*((attribute, schema.AttrType.STRING) for attribute in attributes), *([(number, schema.AttrType.FLOAT)] if number else [])]
    fields = [schema.Attribute(attribute, kind, required=True) for attribute, kind in types]
    described = schema(name, MARK_DOMAIN, 1, inputs=[x], outputs=[y], type_constraints=[("T", _FLOATS, "")], attributes=fields)
    return values.Op(values.Opset(MARK_DOMAIN, 1), name, described)


_QUANTIZED, _BIAS = _private("quantized", "key"), _private("bias", "input", "weight")
_ROUNDED = _private("rounded", "format", "direction")
_SCALED, _NUMBER = _private("scaled", "key", number="factor"), _private("number", "key", number="value")


def mark_key(value: ir.Value | None) -> str | None:
    """The key of the mark that made `value`; None if another operation did."""
    node = None if value is None else value.producer()
    return node.attributes["key"].as_string() if node is not None and (node.domain, node.op_type) == (MARK_DOMAIN, "quantized") else None


def windows_of(length: int, size: int) -> torch.Tensor:
    """Which of so many elements each of `size` windows of adaptive pooling takes: ones, in a column each."""
    places = torch.arange(length).unsqueeze(1)
    first, end = (torch.arange(size) * length // size, -(-(torch.arange(size) + 1) * length // size))
    return ((places >= first) & (places < end)).float()


def _translations(opset: int, movable: Collection[str]) -> dict[Any, Callable[..., Any]]:
    op = values.Opset("", opset)

    def ints(numbers: Sequence[int]) -> Any:
        return op.Constant(value_ints=list(numbers))

    def reshaped(x: Any, sizes: Sequence[int]) -> Any:
        """`x`, which has a mark, in another shape, with that mark."""
        y = op.Reshape(x, ints(sizes))
        y.dtype = x.dtype
        return quantized(y, str(mark_key(x)))

    def quantized(x: Any, key: str) -> Any:
        y = _QUANTIZED(x, key=key)
        y.dtype = x.dtype
        return y

    def bias(b: Any, input: str, weight: str) -> Any:
        return _BIAS(b, input=input, weight=weight)

    def rounded(x: Any, format: str, enters: bool) -> Any:
        y = _ROUNDED(x, format=format, direction="in" if enters else "out")
        y.dtype = x.dtype
        return y

    def scaled(x: Any, key: str, factor: float) -> Any:
        y = _SCALED(x, key=key, factor=factor)
        y.dtype = x.dtype
        return y

    def number(x: Any, key: str, value: float) -> Any:
        y = _NUMBER(x, key=key, value=value)
        y.dtype = x.dtype
        return y

    def view(x: Any, size: Sequence[Any]) -> Any:
        unknown = [i for i, length in enumerate(size) if not isinstance(length, int) or length == -1]
        if len(unknown) <= 1 and all(size[i] != 0 for i in range(len(size)) if i not in unknown):
            return op.Reshape(x, ints([-1 if i in unknown else length for i, length in enumerate(size)]))
        parts = [ints([length]) if isinstance(length, int) else op.Reshape(length, ints([-1])) for length in size]
        return op.Reshape(x, op.Concat(*parts, axis=0), allowzero=int(0 in size))

    def linear(x: Any, weight: Any, b: Any = None) -> Any:
        operands = () if b is None else (b,)
        form = linear_form(x.shape, mark_key(x), mark_key(weight), movable)
        if form is LinearForm.GEMM:
            return op.Gemm(x, weight, *operands, transB=1)
        if form is LinearForm.ROWS:
            rows = op.Gemm(reshaped(x, [-1, weight.shape[1]]), weight, *operands, transB=1)
            return op.Reshape(rows, ints([length if isinstance(length, int) else -1 for length in [*x.shape[:-1], weight.shape[0]]]))
        product = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
        return product if b is None else op.Add(product, b)

    def mean(x: Any, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: int = -1) -> Any:
        rank = len(x.shape)
        axes = sorted(d % rank for d in dim) if dim else list(range(rank))
        if dtype not in (-1, x.dtype):
            x = op.Cast(x, to=dtype)
        if rank > 2 and axes == list(range(2, rank)):
            pooled = op.GlobalAveragePool(x)
            return pooled if keepdim else op.Reshape(pooled, ints([0, 0]))
        return op.ReduceMean(x, ints(axes), keepdims=int(keepdim))

    def adaptive_average(x: Any, output_size: Sequence[int]) -> Any:
        sizes, lengths = list(output_size), list(x.shape[-len(output_size) :])
        batched = len(x.shape) == len(sizes) + 2
        x = x if batched else op.Unsqueeze(x, ints([0]))
        if all(size == 1 for size in sizes):
            y = op.GlobalAveragePool(x)
        elif not all(isinstance(length, int) for length in lengths):
            raise ExportError(
                f"adaptive average pooling from sizes that are open to {sizes}: ONNX has it for known sizes. "
                "Fix them (dynamic_shapes), or resize before it"
            )
        elif all(length % size == 0 for length, size in zip(lengths, sizes, strict=True)):
            window = [length // size for length, size in zip(lengths, sizes, strict=True)]
            y = op.AveragePool(x, kernel_shape=window, strides=window)
        else:
            y = averages(x, lengths, sizes)
        return y if batched else op.Squeeze(y, ints([0]))

    def averages(x: Any, lengths: Sequence[int], sizes: Sequence[int]) -> Any:
        """Over windows that differ in size: sums by products with ones, along one axis after another."""
        rank, count = len(lengths) + 2, torch.ones(())
        for i, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            windows = windows_of(length, size)
            count = count.unsqueeze(-1) * windows.sum(0)
            order = [axis for axis in range(rank) if axis != 2 + i] + [2 + i]
            x = op.MatMul(op.Transpose(x, perm=order), op.CastLike(op.Constant(value=ir.tensor(windows)), x))
            x = op.Transpose(x, perm=[order.index(axis) for axis in range(rank)])
        return op.Div(x, op.CastLike(op.Constant(value=ir.tensor(count)), x))

    def batch_norm(x: Any, weight: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool) -> Any:
        """In evaluation."""
        ones, zeros = (op.CastLike(op.Constant(value_floats=[number] * mean.shape[0]), x) for number in (1.0, 0.0))
        made = op.BatchNormalization(x, ones if weight is None else weight, zeros if b is None else b, mean, var, epsilon=eps)
        return made[0] if isinstance(made, tuple) else made

    def embedding_bag(
        weight: Any,
        indices: Any,
        offsets: Any,
        scale_grad_by_freq: bool = False,
        mode: int = 0,
        sparse: bool = False,
        per_sample_weights: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Any:
        """Rows of the table, added up (mode 0), averaged (1) or compared (2) where their bags are."""
        zero, one = op.CastLike(op.Constant(value_float=0.0), weight), op.CastLike(op.Constant(value_float=1.0), weight)
        ending, single = op.Constant(value_ints=[-1]), op.Constant(value_ints=[1])
        starts = op.Slice(offsets, ints([0]), ints([-1]), ints([0])) if include_last_offset else offsets
        count, bags = op.Shape(indices), op.Shape(starts)
        begun = op.ScatterElements(
            op.Expand(ints([0]), op.Add(count, single)), op.Cast(starts, to=7), op.Expand(single, bags), axis=0, reduction="add"
        )
        bag = op.Unsqueeze(op.Sub(op.Slice(op.CumSum(begun, op.Constant(value_int=0)), ints([0]), count, ints([0])), single), ending)
        counted = op.Expand(one, count)
        if padding_idx is not None and padding_idx >= 0:
            counted = op.Where(op.Equal(indices, op.CastLike(op.Constant(value_int=padding_idx), indices)), zero, one)
        sizes = op.ScatterND(op.Expand(zero, bags), bag, counted, reduction="add")
        filled, counted = op.Unsqueeze(op.Greater(sizes, zero), ending), op.Unsqueeze(counted, ending)
        rows, shape = op.Gather(weight, indices), op.Concat(bags, ints([weight.shape[1]]), axis=0)
        if mode == 2:
            lowest = op.CastLike(op.Constant(value_float=float("-inf")), weight)
            rows = op.Where(op.Greater(counted, zero), rows, lowest)
            return op.Where(filled, op.ScatterND(op.Expand(lowest, shape), bag, rows, reduction="max"), zero)
        rows = op.Mul(rows, counted if per_sample_weights is None else op.Mul(counted, op.Unsqueeze(per_sample_weights, ending)))
        sums = op.ScatterND(op.Expand(zero, shape), bag, rows, reduction="add")
        return sums if mode == 0 else op.Div(sums, op.Unsqueeze(op.Max(sizes, one), ending))

    def embedding_bags(*args: Any, **kwargs: Any) -> Any:
        return embedding_bag(*args, **kwargs), *(op.Identity(args[2]) for _ in range(3))  # torch's backward pass reads these

    def unbind(x: Any, dim: int = 0) -> Any:
        parts = op.Split(x, axis=dim, num_outputs=x.shape[dim], _outputs=x.shape[dim])
        return [op.Squeeze(part, ints([dim])) for part in ([parts] if x.shape[dim] == 1 else parts)]

    pools = {getattr(_aten, f"adaptive_avg_pool{n}d").default: adaptive_average for n in (1, 2, 3)}
    views = dict.fromkeys((_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default), view)
    return {
        QUANTIZED: quantized,
        BIAS: bias,
        ROUNDED: rounded,
        SCALED: scaled,
        NUMBER: number,
        _aten.linear.default: linear,
        _aten.mean.dim: mean,
        _aten.unbind.int: unbind,
        _aten.batch_norm.default: batch_norm,
        _aten.embedding_bag.padding_idx: embedding_bags,
        _aten.embedding_bag.default: embedding_bags,
        _aten.scatter_reduce.two: scatter_reduce(op),
        **{getattr(_aten, name).default: resized for name, resized in resizes(op).items()},
        **pools,
        RECURRENT: recurrent(op),
        **views,
    }
