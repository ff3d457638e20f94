"""What a verification found: how two computations of an output differ, which operations run in float, and how long it all takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qsim.numbers.sqnr import sqnr
from qsim.table import decibel, percent, text_table

if TYPE_CHECKING:
    from qsim.deploy.parts import Array, ConcatenatedOutput
    from qsim.deploy.times import Times

OPTIMISED, UNOPTIMISED, ON_INTEGERS, IN_FLOAT, OPENVINO = "optimised", "not optimised", "on integers", "float", "OpenVINO"
EXECUTORCH = "ExecuTorch"
_FAR = 10.0  # dB below the whole output


@dataclass
class Difference:
    """How two computations of an output differ.

    Attributes
    ----------
    elements, mismatching : int
        Of a quantized output the integers are compared, otherwise the numbers.
    largest : float
        Largest difference: in steps of the grid, or absolute.
    step : float or None
        The scale of the output; None where it is not quantized.
    signal, noise : float
        Sums of squares: of the first computation, and of the difference; the latter is NaN after results of other shapes.
    rows, agreeing : int
        Of an output of two axes, samples and classes: samples, and those whose largest entry is at the same class.

    Examples
    --------
    >>> import numpy as np
    >>> found = Difference(step=0.5)
    >>> found.add(np.array([[1.0, 2.0]]), np.array([[1.0, 2.5]]))
    >>> found.mismatching, found.largest, found.top1, round(found.sqnr, 1)
    (1, 1.0, 1.0, 13.0)
    """

    step: float | None
    elements: int = 0
    mismatching: int = 0
    largest: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    rows: int = 0
    agreeing: int = 0

    @property
    def top1(self) -> float | None:
        """The share of samples for which both name the same class; None for outputs that are no scores of classes."""
        return self.agreeing / self.rows if self.rows else None

    @property
    def sqnr(self) -> float:
        """Of the second computation beside the first, in dB: see `qsim.numbers.sqnr`."""
        return sqnr(self.signal, self.noise)

    def add(self, mine: Array, other: Array) -> None:
        """Compare another batch. Results of other shapes, as of a model that chooses rows by their values, differ throughout."""
        if mine.shape != other.shape:
            self.elements, self.mismatching = self.elements + mine.size, self.mismatching + mine.size
            self.largest, self.noise = math.inf, math.nan  # no element has one that it could be beside
            return
        import numpy as np  # every simulation reaches this file, and torch alone is enough for that

        both = [x.astype(np.float64) for x in (mine, other)]
        with np.errstate(invalid="ignore", over="ignore"):
            self.signal += float(np.square(both[0]).sum())
            self.noise += float(np.square(both[0] - both[1]).sum())
        if mine.ndim == 2 and mine.shape[1] > 1:
            self.rows += len(mine)
            self.agreeing += int((both[0].argmax(1) == both[1].argmax(1)).sum())
        if self.step is not None:
            both = [np.rint(x / self.step) for x in both]
        apart = ~((both[0] == both[1]) | (np.isnan(both[0]) & np.isnan(both[1])))
        self.elements += mine.size
        self.mismatching += int(apart.sum())
        if apart.any():
            with np.errstate(invalid="ignore"):
                self.largest = max(self.largest, float(np.nan_to_num(np.abs(both[0] - both[1])[apart], nan=math.inf).max()))


@dataclass(frozen=True)
class Verification:
    """What ONNX Runtime, OpenVINO or ExecuTorch computed. ``print(verification)`` is a table.

    Attributes
    ----------
    version : str
        Of ONNX Runtime; empty where it did not run.
    openvino : str or None
        The version of OpenVINO, if it ran: for a model that was written for it, where it is installed.
    differences : dict of (str, str) to dict of str to Difference
        By what was compared, such as ``("simulation", "optimised")``: each output.
    in_float : dict of str to str
        Operations that have an integer kernel for quantized operands, and run in float: why. By the names of their nodes, which begin
        with the module's path.
    float_types : dict of str to int
        How many operations of which ONNX types have no integer kernel: the last bits of what they compute decide at the edges of the next
        grid, so integers behind them may differ from those of `with sim.integer():`.
    times : Times or None
        How long the model takes, beside the float one; None where there is no float one, or the model is for another runtime.
    parts : dict of str to dict of str to Difference
        Of each output that a concatenation made, the parts, ``"[:, 4:84]"``: the deployed model beside the float one.
    joined : dict of str to ConcatenatedOutput
        Where they lie.
    borders : dict of str to Difference
        OpenVINO's or ExecuTorch's integers at every quantizer beside the simulation's, for the first batch, by names of tensors. It is
        given the simulation's at all of them, so that each operation between two is compared by itself. Empty for other runtimes.
    notes : list of str
        What did not run, and why.
    executorch : str or None
        The version of ExecuTorch, if it ran: for a model that was written for it.

    Examples
    --------
    >>> found = Verification("1.32.0", notes=["OpenVINO is not installed"])
    >>> print(found)  # doctest: +ELLIPSIS
    ONNX Runtime 1.32.0
    ...
    OpenVINO is not installed
    >>> found.drowned  # outputs of which a part is far worse than the whole
    []
    >>> found.runtime
    'ONNX Runtime 1.32.0'
    """

    version: str
    openvino: str | None = None
    differences: dict[tuple[str, str], dict[str, Difference]] = field(default_factory=dict)
    in_float: dict[str, str] = field(default_factory=dict)
    float_types: dict[str, int] = field(default_factory=dict)
    times: Times | None = None
    parts: dict[str, dict[str, Difference]] = field(default_factory=dict)
    joined: dict[str, ConcatenatedOutput] = field(default_factory=dict)
    borders: dict[str, Difference] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    executorch: str | None = None

    @property
    def runtime(self) -> str:
        """What ran, and its version."""
        if self.executorch is not None:
            return f"ExecuTorch {self.executorch}"
        return f"ONNX Runtime {self.version}" if self.openvino is None else f"OpenVINO {self.openvino}"

    @property
    def drowned(self) -> list[str]:
        """Sentences, one for each output of which a part is far worse than the whole, and what to do."""
        found = []
        for name, parts in self.parts.items():
            whole = next(outputs[name].sqnr for (mine, _), outputs in self.differences.items() if mine == IN_FLOAT)
            worse = [f"{part} has {decibel(d.sqnr)} dB" for part, d in parts.items() if d.sqnr < whole - _FAR]
            if worse:
                operation = self.joined[name].quantizer.rpartition(".")[0]
                own = f"leave the concatenation in float, Config.override({operation!r}, activation=None), or " if operation else ""
                found.append(
                    f"'{name}' has {decibel(whole)} dB to the float model, but its part {', '.join(worse)}: {own}return them apart"
                )
        return found

    def __str__(self) -> str:
        rows = [
            (
                f"{mine} / {other}",
                name,
                f"{d.elements:,}",
                f"{d.mismatching:,}",
                f"{d.largest:g}{'' if d.step is None else ' steps'}",
                decibel(d.sqnr),
                "" if d.top1 is None else percent(d.top1) or "0 %",
            )
            for (mine, other), outputs in self.differences.items()
            for name, d in outputs.items()
        ]
        numbers = ("elements", "differ", "largest", "SQNR dB", "top-1")
        table = text_table(("compared", "output", *numbers), rows, numbers)
        apart = sum(d.mismatching for d in self.differences.get((ON_INTEGERS, OPTIMISED), {}).values() if d.step is not None)
        if apart and self.float_types:
            named = ", ".join(f"{count} {type}" for type, count in self.float_types.items())
            table += (
                f"\n{apart:,} integers differ from sim.integer(): computed in float, whose last bits decide at the edges of a grid: {named}"
            )
        floats = [f"{len(self.in_float)} operations run in float:", *(f"  {n}: {why}" for n, why in self.in_float.items())]
        table = "\n".join([table, *self._at_borders(), *self.drowned, *self.notes])
        head = self.runtime + (f": {self.times}" if self.times is not None else "")
        return "\n".join([head, table, *(floats if self.in_float else [])])

    def _at_borders(self) -> Iterator[str]:
        if self.borders:
            apart = {name: d for name, d in self.borders.items() if d.mismatching}
            total = sum(d.elements for d in self.borders.values())
            differ = sum(d.mismatching for d in apart.values())
            largest = max(d.largest for d in self.borders.values())
            name, most = max(apart.items(), key=lambda item: item[1].mismatching / item[1].elements, default=("", None))
            worst = f", by at most {largest:g} steps; most at '{name}', {most.mismatching:,} of {most.elements:,}" if most else ""
            yield f"of the integers at {len(self.borders)} quantizers {differ:,} of {total:,} differ from the simulation's{worst}"
