"""What kind of file it is that was given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qsim.files import EncodingFile, load_encodings
from qsim.files.file_place import FilePlace
from qsim.files.json_text import MAX_JSON_BYTES

if TYPE_CHECKING:
    import onnx_ir as ir

_LOG = b'"qsim-numeric-log-'
_ONNX = b"\x08"  # the first field of a model, its IR version


def kind_of(path: Path) -> str:
    """ "onnx", "log" or "encodings", by the beginning of the file."""
    with path.open("rb") as stream:
        beginning = stream.read(256)
    if path.suffix == ".onnx" or beginning.startswith(_ONNX):
        return "onnx"
    if beginning.startswith(b"{") and _LOG in beginning.split(b"\n")[0]:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise FilePlace(str(path)).error(f"has more than {MAX_JSON_BYTES} bytes; expected a numeric log of at most that")
        return "log"
    if beginning.startswith(b"TRT-") or beginning.lstrip().startswith((b"{", b"\xef\xbb\xbf")):
        return "encodings"
    raise FilePlace(str(path)).wanted("the beginning", beginning[:16], "a file of encodings, a numeric log or an ONNX model")


def read_encodings(path: Path, tensor_names: bool) -> EncodingFile:
    """The encodings of a file, or of a Q/DQ model."""
    kind = kind_of(path)
    if kind == "log":
        raise FilePlace(str(path)).error("is a numeric log; expected a file of encodings or a Q/DQ model")
    if kind == "encodings":
        return load_encodings(path)
    from qsim.onnx.encodings import read_onnx_encodings

    found = read_onnx_encodings(path, tensor_names=tensor_names)
    if not found.entries:
        raise FilePlace(str(path)).error(
            "has no QuantizeLinear and no DequantizeLinear: it is a float model; `qsim quantize` makes an integer one of it, and what an "
            "integer one computes beside it says `qsim verify INT8.onnx --data BATCH.npz --reference FLOAT.onnx`"
        )
    return found


def in_float(model: ir.Model, target: str | None = None) -> dict[str, str]:
    """The operations that run in float on a target, and why; by default on the model's own. Nodes without a name go by what they make."""
    from qsim.onnx.lint import lint
    from qsim.trace.runtimes import ONNX_RUNTIMES

    own = model.metadata_props.get("qsim.target")
    for node in model.graph:
        node.name = node.name or str(node.outputs[0].name)
    return lint(model, target or (own if own in ONNX_RUNTIMES else "onnxruntime"))
