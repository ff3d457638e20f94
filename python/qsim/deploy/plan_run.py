"""What a plan's files do where they can be run: the model with Cast in ONNX Runtime, beside the float model."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qsim.runs.batches import arguments_of
from qsim.warning import warn

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

_RIGHT = 20.0  # dB: what the doctor asks of bfloat16, the coarsest of the formats

_NEEDS = {
    "coreml_op_selector.py": "coremltools and macOS",
    "trtexec.txt": "TensorRT",
    "modelopt.json": "NVIDIA ModelOpt",
    "node_block_list.json": "the converter, which casts what several nodes read: where kept nodes stand in a row, take the model with Cast",
}


@dataclass(frozen=True)
class CastRun:
    """What ONNX Runtime computed on the CPU from a model with Cast: as it is, and with each result rounded to its type; the worse of both.

    Most operations have no kernel for float16 there. ONNX Runtime computes them in float32 and leaves out the casts between, so that what
    overflows elsewhere does not; of bfloat16 it loads nothing. So the model is run in float32 too, with each result that is in half
    precision rounded explicitly. Sums inside an operation stay in float32 in both.

    Attributes
    ----------
    runtime : str
        "ONNX Runtime 1.32.0".
    elements, broken : int
        Of the results: those that are finite in float32, and those of them that are NaN or Inf here.
    sqnr : float
        dB of the worst result beside float32, where both are finite.
    error : str
        Why the model did not run as it is; "" if it did.
    """

    runtime: str
    elements: int
    broken: int
    sqnr: float
    error: str = ""

    @property
    def right(self) -> bool:
        """Whether all is finite that float32 has finite, and within 20 dB of it."""
        return not self.broken and self.sqnr >= _RIGHT

    def __str__(self) -> str:
        broken = f"{self.broken} of {self.elements} results are NaN or Inf" if self.broken else "all results are finite"
        text = f"{self.runtime}, CPU: {'right' if self.right else 'NOT RIGHT'}: {broken}, {self.sqnr:.1f} dB from the float model"
        return f"{text}; rounded in float32, it does not run as it is: {self.error}" if self.error else text


@dataclass(frozen=True)
class PlanFiles:
    """What `Plan.write` wrote; it iterates over the files. ``print(files)`` says of each whether it was run, and what was found.

    Attributes
    ----------
    files : tuple of Path
    run : CastRun or None
        Of the model with Cast; None where there is none, or no batch to run it on.
    """

    files: tuple[Path, ...]
    run: CastRun | None = None

    def __iter__(self) -> Iterator[Path]:
        return iter(self.files)

    def __str__(self) -> str:
        return "\n".join(f"{file}{self._found(file)}" for file in self.files)

    def _found(self, file: Path) -> str:
        if file.suffix == ".onnx":
            return f"  {self.run}" if self.run is not None else "  not run: give a batch, plan.write(folder, model, batch)"
        return f"  not run: that takes {_NEEDS[file.name]}" if file.name in _NEEDS else ""


def inputs_of(model: ir.Model, batch: Any) -> dict[str, np.ndarray]:
    """The inputs of a model by name, out of a batch as `qsim.doctor` takes it; ValueError where it lacks one."""
    names = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    try:
        _, found = arguments_of(batch, [((), dict.fromkeys(names))])
    except ValueError:
        found = {}
    if wrong := [name for name in names if not isinstance(found.get(name), Tensor)]:
        got = f"a dict with {', '.join(map(repr, batch))}" if isinstance(batch, dict) else f"a batch of type {type(batch).__name__}"
        raise ValueError(
            f"Plan.write: got {got}; the model takes {', '.join(map(repr, names))}: no tensor for {', '.join(map(repr, wrong))}"
        )
    return {name: found[name].detach().cpu().numpy() for name in names}


def run_casts(made: Path, model: Path, inputs: dict[str, np.ndarray]) -> CastRun:
    """Run a model with Cast beside the float model; a warning tells where it is not right. ImportError without ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError as missing:
        raise ImportError("Plan.write runs the model with Cast on the batch: pip install qsim[onnx], or give no batch") from missing

    import onnx_ir as ir

    from qsim.onnx import file as onnx_file
    from qsim.onnx.half_casts import round_in_float32
    from qsim.onnx.sessions import session

    runtime, error = f"ONNX Runtime {onnxruntime.__version__}", ""
    expected = session(model).run(None, inputs)
    with tempfile.TemporaryDirectory() as folder:
        rounded = ir.load(made)
        round_in_float32(rounded)
        path = onnx_file.write(rounded, Path(folder, made.name), external_data=True)[0]
        runs = [session(path, optimised=False).run(None, inputs)]
    try:
        runs.append(session(made).run(None, inputs))
    except Exception as refused:  # its own types, of which not all are public: no kernel for bfloat16, for instance
        error = " ".join(str(refused).split())[:300]
    found = max((_compared(runtime, expected, got, error) for got in runs), key=lambda run: (run.broken, -run.sqnr))
    if not found.right:
        warn(f"Plan.write: {made.name} is no cure: {found}")
    return found


def _compared(runtime: str, expected: list[np.ndarray], got: list[np.ndarray], error: str) -> CastRun:
    import numpy as np

    from qsim.deploy.verification import Difference

    elements = broken = 0
    worst = math.inf
    for mine, other in zip(expected, got, strict=True):
        finite = np.isfinite(mine)
        both = finite & np.isfinite(other)
        elements, broken = elements + int(finite.sum()), broken + int((finite & ~both).sum())
        difference = Difference(None)
        difference.add(mine[both], other[both])
        worst = min(worst, difference.sqnr) if both.any() else worst
    return CastRun(runtime, elements, broken, worst, error)
