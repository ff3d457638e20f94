"""What TensorRT's trtexec is called with for a model in which operations fall back to a float format."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from qsim.errors import ExportError
from qsim.numbers.float_format import HALF_FORMATS, SHORT_NAMES

_TYPES = {format: SHORT_NAMES[format] for format in (*HALF_FORMATS, "float32")}


def precision_flags(formats: Mapping[str, str]) -> list[str]:
    """Flags of trtexec, for TensorRT up to 10.16, that keep layers in float formats. TensorRT 11 took these flags out.

    Parameters
    ----------
    formats : mapping of str to str
        "float16", "bfloat16" or "float32", by the names of nodes in the ONNX model, which TensorRT's layers are called by.

    Returns
    -------
    list of str
        One argument each, not quoted for a shell: see `shlex.join`. Empty without layers.

    Raises
    ------
    ExportError
        A name has a comma, a quotation mark or an asterisk in it, which trtexec cannot be told. A colon is put in quotation marks.

    Examples
    --------
    >>> precision_flags({"head.Gemm": "float16"})[1:]
    ['--precisionConstraints=obey', '--layerPrecisions=head.Gemm:fp16', '--layerOutputTypes=head.Gemm:fp16']
    """
    if not formats:
        return []
    listed = ",".join(f"{_quoted(name)}:{_type(name, format)}" for name, format in formats.items())
    kinds = [f"--{kind}" for kind in dict.fromkeys(_TYPES[format] for format in formats.values()) if kind != "fp32"]
    return [*kinds, "--precisionConstraints=obey", f"--layerPrecisions={listed}", f"--layerOutputTypes={listed}"]


def _quoted(name: str) -> str:
    if bad := [character for character in ",'*\n" if character in name]:
        raise ExportError(
            f"trtexec: the layer {name!r} has {bad[0]!r} in its name, which its flags cannot express: rename the module, or build the "
            "model strongly typed (--stronglyTyped), which needs no names"
        )
    return f"'{name}'" if ":" in name else name


def _type(name: str, format: str) -> str:
    if format not in _TYPES:
        raise ExportError(f"trtexec: got the format {format!r} for {name!r}; expected one of {', '.join(map(repr, _TYPES))}")
    return _TYPES[format]


def commands(model: str, formats: Mapping[str, str]) -> str:
    """Command lines that build an exported model as it is simulated, with comments: the text of ``<model>.trtexec``.

    Parameters
    ----------
    model : str
        Name of the ONNX file.
    formats : mapping of str to str
        As in `precision_flags`.
    """
    call = ["trtexec", f"--onnx={model}", f"--saveEngine={Path(model).stem}.engine"]
    return "\n".join(
        [
            "# TensorRT 10 and later: the types of the model decide (Cast, QuantizeLinear). From 11 on that is the only way.",
            shlex.join([*call, "--stronglyTyped"]),
            "# TensorRT up to 10.16, weakly typed: layers are told by name. Where a shell refuses so long a line, use the first.",
            shlex.join([*call, "--int8", *precision_flags(formats)]),
            "",
        ]
    )
