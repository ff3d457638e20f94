from __future__ import annotations


class CalibrationError(RuntimeError):
    """What was observed does not give a range: nothing arrived, nothing finite arrived, or non-finite values are forbidden.

    The message names the observer or quantizer, what reached it, and what to do. Nothing that was observed is lost.
    """


class NoEncodingError(RuntimeError):
    """A quantizer was asked to quantize before it had an encoding."""


class FileFormatError(ValueError):
    """A file is not what its format asks for, or cannot hold what is to be written.

    The message names the file, the entry, what was found, what was expected, and what to do. Nothing was read or written.
    """


class AccumulatorError(ArithmeticError):
    """A sum of products leaves int32, in which integer kernels add: `QuantSim.integer` names the operation and the sum."""


class ExportError(ValueError):
    """A simulation cannot be written for a target. The message lists every tensor that is in the way, why, and what to change."""


class CaptureError(ExportError, RuntimeError):
    """A simulated model cannot be traced into one graph, which integer evaluation and export need. The message holds the reason."""
