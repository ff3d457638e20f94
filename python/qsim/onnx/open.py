"""Opening ONNX models of strangers: bounded, whole, and with their tensors in their own folder only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from qsim.errors import FileFormatError
from qsim.files.file_place import FilePlace

MAX_MODEL_BYTES = (1 << 31) - 1  # what protocol buffers hold


def open_proto(path: str | PathLike[str]) -> onnx.ModelProto:
    """The model in a file; tensors that lie in other files stay there.

    Raises
    ------
    FileFormatError
        It is no ONNX model, is larger than one can be, or takes tensors from outside its folder.
    OSError
        It cannot be read.
    """
    file, place = Path(path), FilePlace(str(path))
    if file.stat().st_size > MAX_MODEL_BYTES:
        raise place.error(
            f"has {file.stat().st_size} bytes; expected an ONNX model of at most {MAX_MODEL_BYTES}, with its tensors in other files"
        )
    try:
        model = onnx.load(file, load_external_data=False)
    except DecodeError:
        raise place.error("is no ONNX model, or a part of one. Is the file complete?") from None
    if not model.ir_version or not (model.graph.node or model.graph.input):
        raise place.error("is no ONNX model: it has no version and no graph. Is the file complete?")
    for tensor in _elsewhere(model.graph):
        _check_location(tensor, file, place)
    return model


def open_model(path: str | PathLike[str]) -> ir.Model:
    """The model in a file as IR; tensors in other files are read when they are asked for. Errors of `open_proto`."""
    return as_ir(open_proto(path), path)


def as_ir(proto: onnx.ModelProto, path: str | PathLike[str]) -> ir.Model:
    """A model of `open_proto` as IR."""
    with damage_told(FilePlace(str(path))):
        model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, Path(path).parent)
    return model


@contextlib.contextmanager
def damage_told(place: FilePlace) -> Iterator[None]:
    """What is raised within, reading a graph that says other things than ONNX allows, becomes an error that names the file."""
    try:
        yield
    except FileFormatError:
        raise
    except Exception as error:  # attributes of another type, names that are no text, tensors that lack bytes: whatever the IR meets
        raise place.error(f"is no valid ONNX model ({type(error).__name__}: {first_line(error)})") from error


def _elsewhere(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a graph, and of the graphs inside, that lie in other files."""
    held = [*graph.initializer]
    for node in graph.node:
        for attribute in node.attribute:
            held += [attribute.t, *attribute.tensors]
            for inner in (attribute.g, *attribute.graphs):
                yield from _elsewhere(inner)
    yield from (tensor for tensor in held if tensor.data_location == onnx.TensorProto.EXTERNAL)


def _check_location(tensor: onnx.TensorProto, file: Path, place: FilePlace) -> None:
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    folder = file.parent.resolve()
    if not location or not (folder / location).resolve().is_relative_to(folder):
        raise place.at(tensor.name).wanted("the file of the tensor", location, "one in the folder of the model")


def first_line(error: Exception) -> str:
    """What an error says, for a message of one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
