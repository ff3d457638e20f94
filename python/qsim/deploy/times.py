"""How long a quantized model takes beside the float one, on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qsim.deploy.parts import Array
from qsim.onnx import file, model
from qsim.onnx.export_options import Options
from qsim.quantizers.quantizer import Quantizer
from qsim.trace.capture import Program
from qsim.trace.mark_uses import MarkUses
from qsim.trace.runtimes import Runtime

_WARM_UP, _FEWEST, _MOST, _SECONDS = 2, 5, 50, 2.0


class Session(Protocol):
    """What runs a model: `onnxruntime.InferenceSession`, `qsim.onnx.openvino_sessions.OpenVinoSession`."""

    def run(self, names: None, inputs: dict[str, Array], /) -> Sequence[Array]:
        """All outputs, in order."""


@dataclass(frozen=True)
class Times:
    """Medians of interleaved runs of one batch in the model's runtime, ONNX Runtime with `ExportReport.session_options`.

    Attributes
    ----------
    float_ms, quantized_ms : float
        Milliseconds that the float model takes, BatchNorm folded, and the one that was written.
    runs : int
        Of each.
    ratios : tuple of float
        Quartiles of a run's time in that of the float model's run beside it: half of them lie between. Far apart, the machine did
        something else too.
    """

    float_ms: float
    quantized_ms: float
    runs: int
    ratios: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Time of the quantized model in that of the float one: below 1 it is faster."""
        return self.quantized_ms / self.float_ms

    def __str__(self) -> str:
        return (
            f"{self.quantized_ms:.3g} ms a batch, the float model {self.float_ms:.3g} ms: {self.ratio:.2f} of its time "
            f"(medians of {self.runs} interleaved runs of the first batch, half of them {self.ratios[0]:.2f} to {self.ratios[1]:.2f})"
        )


def measured(plain: Session, quantized: Session, inputs: Mapping[str, Array]) -> Times:
    """Run two models by turns, so that what else the machine does falls on both."""
    seconds: list[list[float]] = [[], []]
    end = time.perf_counter() + _SECONDS
    while len(seconds[0]) < _WARM_UP + _FEWEST or (len(seconds[0]) < _WARM_UP + _MOST and time.perf_counter() < end):
        for taken, session in zip(seconds, (plain, quantized), strict=True):
            start = time.perf_counter()
            session.run(None, dict(inputs))
            taken.append(time.perf_counter() - start)
    in_float, in_integers = (taken[_WARM_UP:] for taken in seconds)
    low, _, high = statistics.quantiles([b / a for a, b in zip(in_float, in_integers, strict=True)], n=4, method="inclusive")
    return Times(1e3 * statistics.median(in_float), 1e3 * statistics.median(in_integers), len(in_float), (low, high))


def write_float(
    program: Program, mark_uses: MarkUses, quantizers: Mapping[str, Quantizer], target: Runtime, options: Options, path: Path
) -> Path:
    """Write a traced simulation without any quantizer: the float model, with BatchNorms folded.

    Parameters
    ----------
    program : Program
        Its graph is changed.
    """
    off = {key: Quantizer(quantizer.spec) for key, quantizer in quantizers.items()}
    for quantizer in off.values():
        quantizer.enabled = False
    built = model.build(program, mark_uses, off, target, options).model
    file.write(built, path, external_data=model.size_of(built) > file.LARGE)
    return path
