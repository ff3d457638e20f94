"""The part of `qsim.QuantSim` that lets operations fall back to float formats."""

from __future__ import annotations

from collections.abc import Iterable

from qsim.runs.report_subject import subject_of
from qsim.simulation.borders import Borders, borders
from qsim.simulation.fallback_report import INTEGERS, FallbackReport, format_named, matching, report_of
from qsim.simulation.simulation import Simulation


class SelectiveFallback(Simulation):
    """Base of `qsim.QuantSim`: operations that compute in a float format for now, with all encodings kept."""

    def fallback(self, patterns: str | Iterable[str] | None, to: str = "fp16") -> FallbackReport:
        """Have operations compute in a float format instead of integers; every encoding is kept.

        In evaluation and in training a matching operation takes its operands, weight and bias among them, rounded to the format, and
        its result is rounded to it. The result is quantized to integers as well if an operation that runs in integers reads it;
        what an operation in integers hands over stays quantized; an input of the model is quantized only if an operation in integers
        reads it. Calibration computes in float as ever and finds the ranges of all tensors.

        What runs as one (Conv, BatchNorm, ReLU) falls back as one, whichever part of it was named. A scale that several tensors share
        (`TensorRT` at a concatenation) stays the same; where the concatenation falls back, its operands are no longer quantized for
        it, and its result is, with the shared scale, if integers need it.

        Calls add up, and of several for the same operation the last one counts. State dicts, pickles and copies keep it.

        Parameters
        ----------
        patterns : str, iterable of str, or None
            Names of operations, as globs, as `Config.override` matches them: "layer4.*", "head", "layer1.0.add". None ends all
            fallbacks.
        to : str
            "fp16", "bf16", "float32" (nothing is rounded), or "int": these operations run in integers again.

        Returns
        -------
        FallbackReport

        Raises
        ------
        ValueError
            A pattern matches no operation: the message has names close to it. Nothing is changed then.

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4))
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> report = sim.fallback("2")
        >>> report.released, report.borders
        (['2.weight', '2.output'], ['0.output'])
        >>> len(sim.encodings())  # as before
        5
        """
        formats = {} if patterns is None else self.quantization.formats
        format = format_named(to)
        for name in () if patterns is None else matching(patterns, self.decisions.operations):
            formats.pop(name, None)
            if format != INTEGERS:
                formats[name] = format
        self.fall_back(formats)
        return report_of(self.decisions.operations, self.decisions.posts, formats, subject_of(self.model, self.config))

    def borders(self) -> Borders:
        """Whether every tensor at the border of a region in integers has a scale, as exporters ask before they write anything.

        Returns
        -------
        Borders
            ``print`` lists each tensor without a scale, why it has none, which operation needs it, and what to do;
            ``borders.check()`` raises that as an error, and ``sim.fallback(borders.cure)`` lets what needs them fall back.

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(4, 2), torch.zeros(1, 4))
        >>> len(sim.borders().missing)
        3
        >>> report = sim.calibrate([torch.randn(8, 4)], progress=False)
        >>> sim.borders().check()
        """
        return borders(self)
