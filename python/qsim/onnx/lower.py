"""Lowering: QuantizeLinear and DequantizeLinear, integer weights and int32 biases in the places of marks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from qsim import ops
from qsim.numbers.blocks import Axes, along_one_axis
from qsim.numbers.encoding import Encoding, grid_of
from qsim.onnx.insert import NodeInserter
from qsim.onnx.tensors import ONNX_TYPES
from qsim.onnx.translate import MARK_DOMAIN
from qsim.quantizers.bias import BiasQuantizer
from qsim.quantizers.quantizer import Quantizer
from qsim.trace.integer_forms import number, scaled
from qsim.trace.runtimes import stored_as
from qsim.trace.storages import Storages

_FLOAT = ir.DataType.FLOAT
Order = tuple[int, ...] | None


class Lowering:
    """Replaces the marks of a translated model.

    Parameters
    ----------
    model : ir.Model
        Changed in place.
    quantizers : mapping of str to Quantizer
        By the keys of the marks. Those that are enabled have encodings, which the target takes.
    storages : Storages

    Attributes
    ----------
    names : dict of str to str
        For each quantizer the tensor that holds what it makes: integers, or numbers of a float format. The first, where it has several.
    bypassed : list of str
        Quantizers that are off: nothing stands for them.
    """

    def __init__(self, model: ir.Model, quantizers: Mapping[str, Quantizer], storages: Storages) -> None:
        self.graph, self.quantizers, self.storages = model.graph, quantizers, storages
        self.names: dict[str, str] = {}
        self.bypassed: list[str] = []
        self._insert = NodeInserter(model.graph)
        self._made: dict[tuple[Any, ...], ir.Value] = {}
        self._lowered = {"quantized": self._quantized, "bias": self._bias, "scaled": self._scaled, "number": self._number}

    def run(self) -> None:
        """Replace every mark."""
        for node in list(self.graph):
            if node.domain == MARK_DOMAIN:
                value = self._lowered[node.op_type](node)
                node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
                self.graph.remove(node, safe=True)

    def _quantized(self, node: ir.Node) -> ir.Value:
        key, x = node.attributes["key"].as_string(), node.inputs[0]
        assert x is not None
        if not self.quantizers[key].enabled:
            if key not in self.bypassed:
                self.bypassed.append(key)
            return x
        if x.const_value is None or key not in self.storages.constants:
            known = (key, x)
            if known not in self._made:  # a tensor that several operations read quantized
                self._made[known] = self._activation(node, key, x)
            return self._made[known]
        for summed in _sums_of(node.outputs[0]):
            self._sum(key, x, summed, None)
        for user in [user for user in node.outputs[0].consumers() if user.op_type == "Transpose"]:
            order = tuple(user.attributes["perm"].as_ints())
            for summed in _sums_of(user.outputs[0]):
                self._sum(key, x, summed, order)
            turned = self._constant(node, key, x, order)
            user.outputs[0].replace_all_uses_with(turned, replace_graph_outputs=True)
            self.graph.remove(user, safe=True)
        return self._constant(node, key, x, None) if node.outputs[0].uses() or node.outputs[0].is_graph_output() else x

    # Activations.

    def _activation(self, node: ir.Node, key: str, x: ir.Value) -> ir.Value:
        spec, encoding = self.quantizers[key].spec, self.quantizers[key].encoding
        assert encoding is not None
        storages = self.storages
        storage, shape = storages.activations.get(key) or storages.constants[key], x.shape  # a constant that was reshaped since
        own = node.outputs[0].dtype if x.dtype is None else x.dtype  # the exporter notes no types inside a translation
        assert own is not None
        x.dtype = own
        if not spec.has_scale:
            if spec.saturate:
                low, high = grid_of(storage)
                x = self._clip(node, key, x, torch.tensor(float(low)), torch.tensor(float(high)))
            y = self._cast(node, x, ONNX_TYPES[storage].type, f"{key}_quantized")  # to Inf beyond the largest number
            self.names.setdefault(key, str(y.name))
            return self._cast(node, y, own, f"{key}_dequantized")
        encoding = stored_as(encoding, storage)
        x = self._cast(node, x, _FLOAT, f"{key}_float")
        if not spec.is_float and (encoding.quant_min, encoding.quant_max) != grid_of(storage):
            x = self._clip(node, key, x, encoding.min, encoding.max, encoding.axis)
        options: dict[str, Any] = {} if encoding.axis is None else {"axis": encoding.axis}
        saturate = {"saturate": 0} if spec.saturate is False else {}
        grid = self._grid(key, encoding, storage)
        q = self._insert.node(
            node, "QuantizeLinear", [x, *grid], f"{key}_quantized", ONNX_TYPES[storage].type, shape, **options, **saturate
        )
        self.names.setdefault(key, str(q.name))
        y = self._insert.node(node, "DequantizeLinear", [q, *grid], f"{key}_dequantized", _FLOAT, shape, **options)
        return self._cast(node, y, own, f"{key}_cast")

    def _clip(self, node: ir.Node, key: str, x: ir.Value, low: Tensor, high: Tensor, axis: Axes = None) -> ir.Value:
        """`x` within the ends of a grid that is narrower than the type that stores it. Clip takes one number for each end."""
        assert x.dtype is not None
        kind = "float32" if x.dtype is _FLOAT else next(name for name, known in ONNX_TYPES.items() if known.type is x.dtype)
        if axis is not None:
            assert isinstance(axis, int)
            assert x.shape is not None or axis < 0
            behind = -axis - 1 if axis < 0 else len(x.shape) - axis - 1  # type: ignore[arg-type]
            low, high = (end.reshape(-1, *[1] * behind) for end in (low, high))
        ends = [self._insert.initializer(f"{key}_{name}", end, kind) for name, end in (("min", low), ("max", high))]
        if axis is None:
            return self._insert.node(node, "Clip", [x, *ends], f"{key}_clipped", x.dtype, x.shape)
        raised = self._insert.node(node, "Max", [x, ends[0]], f"{key}_raised", x.dtype, x.shape)
        return self._insert.node(node, "Min", [raised, ends[1]], f"{key}_clipped", x.dtype, x.shape)

    def _cast(self, node: ir.Node, x: ir.Value, to: ir.DataType, name: str) -> ir.Value:
        return x if x.dtype is to else self._insert.node(node, "Cast", [x], name, to, x.shape, to=int(to))

    def _grid(self, key: str, encoding: Encoding, storage: str) -> list[ir.Value]:
        """Scale and zero point. The latter is there even where it is 0: its type says what the integers are stored in."""
        scale = self._insert.initializer(f"{key}_scale", encoding.scale.float(), "float32")
        return [scale, self._insert.initializer(f"{key}_zero_point", encoding.zero_point, storage)]

    # Integer forms: see `qsim.trace.integer_forms`.

    def _scaled(self, node: ir.Node) -> ir.Value:
        key, (x,) = node.attributes["key"].as_string(), node.inputs
        dequantize = None if x is None else x.producer()
        q = None if dequantize is None else dequantize.inputs[0]
        assert q is not None
        return self._dequantized(node, q, scaled(self._encoding(key), node.attributes["factor"].as_float()), f"{key}_scaled", q.shape)

    def _number(self, node: ir.Node) -> ir.Value:
        key, value = node.attributes["key"].as_string(), node.attributes["value"].as_float()
        integer, encoding = number(value, self._encoding(key))
        q = self._insert.initializer(f"{key}_number_quantized", torch.tensor(integer), encoding.dtype)
        return self._dequantized(node, q, encoding, f"{key}_number", ir.Shape(()))

    def _encoding(self, key: str) -> Encoding:
        """As activations are stored."""
        encoding = self.quantizers[key].encoding
        assert encoding is not None
        return stored_as(encoding, self.storages.activations[key])

    def _dequantized(self, node: ir.Node, q: ir.Value, encoding: Encoding, name: str, shape: ir.Shape | None) -> ir.Value:
        grid = self._grid(name, encoding, encoding.dtype)
        return self._insert.node(node, "DequantizeLinear", [q, *grid], f"{name}_dequantized", _FLOAT, shape)

    # Constants.

    def _constant(self, node: ir.Node, key: str, x: ir.Value, order: Order) -> ir.Value:
        """A constant on its grid, with its axes in the given order."""
        known = (key, x, order)
        if known not in self._made:
            own, end = x.dtype, "" if order is None else "_transposed"
            assert own is not None
            values = as_tensor(x).to(self.quantizers[key].scale.device)
            value = self._stored(node, key, values, order, end)
            self._made[known] = self._cast(node, value, own, f"{key}_cast{end}")
        return self._made[known]

    def _sum(self, key: str, x: ir.Value, summed: ir.Node, order: Order) -> None:
        """A sum over a constant on its grid, with its axes in the given order, computed here: runtimes keep DequantizeLinear, and would
        compute it in each run."""
        axes, (rounded,) = summed.inputs[1], summed.outputs[0].consumers()
        assert axes is not None
        values = self.quantizers[key].quantize(as_tensor(x).to(self.quantizers[key].scale.device))
        values = values if order is None else values.permute(order)
        total = values.double().sum(as_tensor(axes).tolist(), keepdim=bool(summed.attributes["keepdims"].as_int()))
        rounded.outputs[0].replace_all_uses_with(self._insert.initializer(f"{key}_sums", total, "float32"))
        self.graph.remove([rounded, summed], safe=True)

    def _stored(self, node: ir.Node, key: str, values: Tensor, order: Order, end: str) -> ir.Value:
        quantizer, encoding = self.quantizers[key], self.quantizers[key].encoding
        assert encoding is not None
        storage = self.storages.constants[key]
        if not quantizer.spec.has_scale:
            numbers = quantizer.quantize(values)
        else:
            axis, block, (scale, zero_point) = along_one_axis(
                values, encoding.axis, encoding.block_size, encoding.scale, encoding.zero_point
            )
            encoding = dataclasses.replace(encoding, scale=scale.float(), zero_point=zero_point, axis=axis, block_size=block)
            numbers = _numbers(quantizer, values, encoding)
        shape = numbers.shape if order is None else [numbers.shape[i] for i in order]
        numbers = numbers if order is None else numbers.permute(order)
        q = self._insert.initializer(f"{key}_quantized{end}", numbers, storage)
        self.names.setdefault(key, str(q.name))
        if not quantizer.spec.has_scale:
            return q
        encoding = _reordered(encoding, order)
        options = {} if encoding.axis is None else {"axis": encoding.axis}
        blocks = {} if encoding.block_size is None else {"block_size": encoding.block_size}
        inputs = [q, *self._grid(f"{key}{end}", encoding, storage)]
        return self._insert.node(node, "DequantizeLinear", inputs, f"{key}_dequantized{end}", _FLOAT, ir.Shape(shape), **options, **blocks)

    def _bias(self, node: ir.Node) -> ir.Value:
        input, weight = (node.attributes[name].as_string() for name in ("input", "weight"))
        quantizer, b = BiasQuantizer(self.quantizers[input], self.quantizers[weight]), node.inputs[0]
        assert b is not None
        assert b.dtype is not None
        if not quantizer.enabled:
            return b
        known = (b, input, weight)
        if known not in self._made:
            values = as_tensor(b).to(quantizer.weight.scale.device)
            q = self._insert.initializer(f"{b.name}_quantized", quantizer.integers(values), "int32")
            scale = self._insert.initializer(f"{b.name}_scale", quantizer.scale(len(values)), "float32")
            y = self._insert.node(node, "DequantizeLinear", [q, scale], f"{b.name}_dequantized", _FLOAT, b.shape, axis=0)
            self._made[known] = self._cast(node, y, b.dtype, f"{b.name}_cast")
        return self._made[known]


def _sums_of(x: ir.Value) -> list[ir.Node]:
    """The nodes that sum over what is marked, in float64 and rounded behind that: see `qsim.trace.token_scales`."""
    casts = [user for user in x.consumers() if user.op_type == "Cast"]
    return [user for cast in casts for user in cast.outputs[0].consumers() if user.op_type == "ReduceSum"]


def as_tensor(value: ir.Value) -> Tensor:
    """The parameter or constant that an initializer holds."""
    held = value.const_value
    raw = getattr(held, "raw", held)
    return raw.detach() if isinstance(raw, Tensor) else torch.from_numpy(held.numpy())  # type: ignore[union-attr]


def _numbers(quantizer: Quantizer, values: Tensor, encoding: Encoding) -> Tensor:
    """What is stored for a constant: integers, or of a float format its numbers, as the simulation rounds to them."""
    if not quantizer.spec.is_float:
        scale = encoding.scale.to(torch.float64 if values.dtype is torch.float64 else torch.float32)
        grid = (scale, encoding.zero_point, encoding.quant_min, encoding.quant_max)
        rounding = quantizer.spec.rounding
        return ops.quantize(values, *grid, axis=encoding.axis, block_size=encoding.block_size, rounding=rounding)
    ones = torch.ones_like(values, dtype=torch.int8)
    steps = ops.dequantize(ones, encoding.scale, encoding.zero_point, axis=encoding.axis, block_size=encoding.block_size)
    return ops.round_to_format(quantizer.quantize(values).float() / steps, encoding.dtype)


def _reordered(encoding: Encoding, order: Order) -> Encoding:
    """The encoding of a tensor whose axes are permuted."""
    if order is None or encoding.axis is None:
        return encoding
    assert isinstance(encoding.axis, int)
    axis = order.index(encoding.axis % len(order))
    if encoding.block_size is None:
        return dataclasses.replace(encoding, axis=axis)
    return dataclasses.replace(encoding, axis=axis, scale=encoding.scale.permute(order), zero_point=encoding.zero_point.permute(order))
