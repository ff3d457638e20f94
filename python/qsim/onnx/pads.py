"""Zeros around the operand of a convolution as its own padding: one operation less."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def fold_pads(model: ir.Model) -> None:
    """Take each Pad of zeros along spatial axes over into the convolution that alone reads it, through a quantizer of the same grid too.

    Zero is on every grid, and a kernel pads with the zero point: no result changes.
    """
    for pad in [node for node in model.graph if node.op_type == "Pad"]:
        ends, inside = _ends(pad), _through_quantizer(pad)
        if ends is None or inside is None:
            continue
        users = inside.consumers()
        if users and not inside.is_graph_output() and all(_takes(user, inside) for user in users):
            for conv in users:
                both = zip(_pads(conv, len(ends)), ends, strict=True)
                conv.attributes["pads"] = ir.AttrInt64s("pads", [own + more for own, more in both])
                conv.replace_input_with(0, pad.inputs[0])


def _ends(pad: ir.Node) -> list[int] | None:
    """How many zeros stand before and behind, as a Conv has it; None where a Pad does something else."""
    mode, constants = pad.attributes.get("mode"), [None if x is None else x.const_value for x in pad.inputs[1:]]
    held = constants[0] if constants else None
    given = [constant.numpy() for constant, x in zip(constants[1:], pad.inputs[2:], strict=True) if x is not None and constant is not None]
    named = [x for x in pad.inputs[2:] if x is not None]
    if held is None or (mode is not None and mode.as_string() != "constant") or len(named) > 1 or len(given) < len(named):
        return None
    pads = held.numpy().reshape(2, -1)
    if any(np.any(value != 0) for value in given) or pads.shape[1] < 3 or pads[:, :2].any() or pads.min() < 0:
        return None
    return [int(n) for n in pads[:, 2:].ravel()]


def _through_quantizer(pad: ir.Node) -> ir.Value | None:
    """The padded tensor, behind a quantizer of the grid that it is on; None where others read it before that."""
    padded, x = pad.outputs[0], pad.inputs[0]
    readers, before = padded.consumers(), None if x is None else x.producer()
    if not readers or any(reader.op_type != "QuantizeLinear" for reader in readers):
        return padded if readers else None
    (quantize, *others) = readers
    if others or before is None or before.op_type != "DequantizeLinear" or list(quantize.inputs[1:]) != list(before.inputs[1:]):
        return None
    (dequantize, *more) = quantize.outputs[0].consumers()
    return None if more or dequantize.op_type != "DequantizeLinear" else dequantize.outputs[0]


def _takes(user: ir.Node, x: ir.Value) -> bool:
    padding = user.attributes.get("auto_pad")
    return user.op_type == "Conv" and user.inputs[0] is x and (padding is None or padding.as_string() == "NOTSET")


def _pads(conv: ir.Node, count: int) -> list[int]:
    own = conv.attributes.get("pads")
    return [0] * count if own is None else list(own.as_ints())
