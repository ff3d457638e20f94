"""What ends a command: an error, in one line."""

from __future__ import annotations

from qsim.errors import CaptureError, ExportError, FileFormatError

# Errors that are written for whom they reach; of others, the type tells more than the text.
_SPEAKING = (CaptureError, ExportError, FileFormatError)
_LONGEST = 1000
_EXTRA = ("numpy", "onnx", "onnx_ir", "onnxscript", "onnxruntime")  # of qsim[onnx]


class Failure(Exception):
    """A command cannot do what it was asked for: bad arguments, or files that do not fit each other."""


def one_line(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"'{error.filename}': {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _EXTRA:
        return f"this needs {error.name}: pip install qsim[onnx]"
    if isinstance(error, ImportError) and error.name == "shtab":
        return "this needs shtab: pip install qsim[cli]"
    text = " ".join(str(error).split()).removeprefix("qsim: ")
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return text if isinstance(error, (Failure, *_SPEAKING)) else f"{type(error).__name__}: {text}"
