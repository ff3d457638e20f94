"""Encodings out of a Q/DQ ONNX model, whoever wrote it."""

from __future__ import annotations

import dataclasses
import warnings
from os import PathLike
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from torch import Tensor

from qsim.files import EncodingFile, Entry
from qsim.files.fields import Fields, check_count, check_layout, checked_name, make_encoding, positive
from qsim.files.file_place import FilePlace
from qsim.files.json_text import parse
from qsim.files.qsim_json import read_entry
from qsim.numbers.encoding import Encoding, grid_of
from qsim.onnx.open import damage_told, open_model
from qsim.onnx.tensors import ONNX_TYPES

_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_NAMES = {known.type: name for name, known in ONNX_TYPES.items()}
_SHOWN = 3
_STORED = "_quantized"  # what our exports and ONNX Runtime's quantizer append to the name of a constant stored as integers
_LEAVING = "_QuantizeLinear_Input"  # and the latter to that of an output of the model, before it is quantized


def read_onnx_encodings(path: str | PathLike[str], *, tensor_names: bool = False) -> EncodingFile:
    """The encodings of a model with QuantizeLinear and DequantizeLinear.

    A model that qsim exported has them in its metadata, under the keys of `QuantSim.quantizers` and with all fields. Where its nodes hold
    other scales or zero points, as after another tool changed the file, these are given, with a warning. Of any other model they are read
    from its nodes: an activation is called by the tensor that QuantizeLinear reads, a constant by its initializer, without
    the ending ``_quantized`` that exporters give to integers. Their grids are all of their type.

    Parameters
    ----------
    path : path-like
    tensor_names : bool
        Read the nodes in any case, for the names of tensors.

    Returns
    -------
    EncodingFile
        Of the format "onnx", which only this function reads: to be written as any other. Scales that are computed when the model runs
        make an entry without encoding.

    Raises
    ------
    FileFormatError
        The file is no ONNX model, or holds scales or zero points that are none.
    OSError
        It cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> sim = qsim.QuantSim(nn.Linear(3, 2), torch.zeros(1, 3), qsim.int8(target="tensorrt"))
    >>> report = sim.calibrate([torch.ones(4, 3)], progress=False)
    >>> path = tempfile.mktemp(".onnx")
    >>> report = sim.export(path)
    >>> list(read_onnx_encodings(path).entries), list(read_onnx_encodings(path, tensor_names=True).entries)
    (['input', 'weight'], ['input', 'weight'])
    """
    return encodings_of(open_model(path), FilePlace(str(path)), tensor_names=tensor_names)


def encodings_of(model: ir.Model, place: FilePlace, *, tensor_names: bool = False) -> EncodingFile:
    """`read_onnx_encodings` of a model in memory. Its constants become initializers."""
    with damage_told(place):
        return _found(model, place, tensor_names)


def _found(model: ir.Model, place: FilePlace, tensor_names: bool) -> EncodingFile:
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    opset = str(model.opset_imports.get("", ""))
    text = model.metadata_props.get("qsim.encodings")
    nodes = [node for node in model.graph.all_nodes() if node.op_type in _QUANTIZERS]
    check_count(len(nodes), place)
    if text is not None and not tensor_names:
        return EncodingFile(_noted(text, model, nodes, place), "onnx", opset)
    entries: dict[str, Entry] = {}
    for node in nodes:
        found = _entry(node, place)
        if found is not None:
            name, entry = found
            if entries.get(name, entry) != entry:  # one tensor on several grids: the others go by their results
                name = checked_name(node.outputs[0].name, place)
            entries[name] = entry
    return EncodingFile(entries, "onnx", opset)


def _noted(text: str, model: ir.Model, nodes: list[ir.Node], place: FilePlace) -> dict[str, Entry]:
    """What the metadata say, where the nodes that compute it do not say something else."""
    inside = FilePlace(f"{place.file} (metadata)")
    names = Fields(parse(model.metadata_props.get("qsim.names", "{}"), inside), inside).values
    noted = Fields(parse(text, inside), inside).values
    check_count(len(noted), inside)
    integers = {node.inputs[0].name: node for node in nodes if node.op_type == "DequantizeLinear" and node.inputs[0] is not None}
    integers |= {node.outputs[0].name: node for node in nodes if node.op_type == "QuantizeLinear"}
    entries, changed = dict[str, Entry](), []
    for key, value in noted.items():
        name = names.get(key)
        role = "parameter" if name in model.graph.initializers else "activation"
        entry = read_entry({**Fields(value, inside.at(key)).values, "role": role}, None, inside.at(key))
        found = _entry(integers[name], place) if name in integers else None
        if found is not None and not _are_equal(entry.encoding, held := _on_grid(found[1].encoding, entry.encoding)):
            changed.append(key)
            entry = dataclasses.replace(found[1], encoding=held, role=role)
        entries[checked_name(key, inside)] = entry
    if changed:
        shown = ", ".join(map(repr, changed[:_SHOWN])) + (", ..." if len(changed) > _SHOWN else "")
        warnings.warn(
            f"qsim: '{place.file}': {len(changed)} of {len(noted)} encodings ({shown}) are not what its metadata say: the file was changed "
            "after qsim wrote it; what its nodes hold is given",
            stacklevel=5,
        )
    return entries


def _on_grid(held: Encoding | None, noted: Encoding | None) -> Encoding | None:
    """What a node holds, on the grid that the metadata say: runtimes' files have uint8 for int8, and know no narrower grids."""
    if held is None or noted is None or held.scale.numel() != noted.scale.numel():
        return held
    (low, high), (wanted, highest) = grid_of(held.dtype), grid_of(noted.dtype)
    zero_point = held.zero_point + (wanted - low if high - low == highest - wanted else 0)
    if bool(((zero_point < noted.quant_min) | (zero_point > noted.quant_max)).any()):
        return held
    return dataclasses.replace(noted, scale=held.scale.reshape(noted.scale.shape), zero_point=zero_point.reshape(noted.scale.shape))


def _are_equal(noted: Encoding | None, held: Encoding | None) -> bool:
    if noted is None or held is None or noted.scale.shape != held.scale.shape:
        return noted is held
    return torch.equal(noted.scale.float(), held.scale.float()) and torch.equal(noted.zero_point, held.zero_point)


def _entry(node: ir.Node, place: FilePlace) -> tuple[str, Entry] | None:
    """Name and encoding of what a node quantizes; None for DequantizeLinear behind QuantizeLinear, which says it again."""
    x = node.inputs[0]
    producer = None if x is None else x.producer()
    if x is None or (node.op_type == "DequantizeLinear" and producer is not None and producer.op_type == "QuantizeLinear"):
        return None
    constant = x.const_value is not None
    name = checked_name(x.name, place)
    name = name.removesuffix(_STORED if constant and node.op_type == "DequantizeLinear" else _LEAVING) or name
    role = "parameter" if constant else "activation"
    place = place.at(name)
    if node.domain not in ("", "com.microsoft"):
        raise place.wanted("the domain of its quantizer", node.domain, "that of ONNX or of ONNX Runtime")
    scale, zero_point = ((*node.inputs, None, None)[index] for index in (1, 2))
    if scale is None:
        raise place.error(f"{node.op_type} has no scale; expected two or three inputs")
    if scale.const_value is None or (zero_point is not None and zero_point.const_value is None):
        return name, Entry(None, role, note="quantized with scales that are computed when the model runs")
    dtype = _dtype(node, x, zero_point)
    if dtype is None:
        return name, Entry(None, role, note="of a type for which qsim has no grid")
    return name, Entry(_encoding(node, scale, zero_point, dtype, x, place), role)


def _dtype(node: ir.Node, x: ir.Value, zero_point: ir.Value | None) -> str | None:
    """What the tensor is stored in, as an Encoding calls it."""
    if zero_point is not None and zero_point.const_value is not None:
        kind: ir.DataType | None = zero_point.const_value.dtype
    elif node.op_type == "DequantizeLinear":
        kind = x.const_value.dtype if x.const_value is not None else x.dtype
    else:
        wanted = node.attributes.get("output_dtype")
        kind = ir.DataType(wanted.as_int()) if wanted is not None and wanted.as_int() else ir.DataType.UINT8
    return None if kind is None else _NAMES.get(kind)


def _encoding(node: ir.Node, scale: ir.Value, zero_point: ir.Value | None, dtype: str, x: ir.Value, place: FilePlace) -> Encoding:
    steps = positive(_values(scale).double(), place, "the scale")
    zeros = torch.zeros(steps.shape, dtype=torch.int64) if zero_point is None else _values(zero_point).double().long()
    if zeros.numel() != steps.numel():
        raise place.error(f"has {zeros.numel()} zero points and {steps.numel()} scales; expected as many")
    along, size = _integer(node, "axis", 1), _integer(node, "block_size", 0) or None
    known = tuple(x.shape) if x.shape is not None else ()
    if steps.dim() == 1 and len(steps) == 1 and (not known or not -len(known) <= along < len(known) or known[along] != 1):
        steps = steps.reshape(())  # as ONNX, which takes one number in a list too
    layout = (along, size) if steps.dim() else (None, None)
    check_layout(place, steps, *layout)
    return make_encoding(place, steps, zeros.reshape(steps.shape), *grid_of(dtype), *layout, dtype)


def _values(value: ir.Value) -> Tensor:
    held = value.const_value
    assert held is not None
    return torch.from_numpy(held.numpy().astype("float64"))


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute: Any = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())
