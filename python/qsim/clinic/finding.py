"""What the doctor finds: one value for each thing, with its place, its numbers and its cure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qsim.clinic.codes import CODES

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")  # worst first


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor found.

    Attributes
    ----------
    code : str
        "QS001" ...: `qsim.clinic.codes` says what each means.
    severity : "error", "warning" or "info"
        error: the deployed model is wrong or does not build. warning: it may be, or accuracy is lost. info: worth knowing.
    module : str
        Path of the module; "" for the model itself.
    op : str
        The operation, as overrides and plans name it ("layer1.0.add"); "" where the finding is about no single operation.
    evidence : mapping of str to numbers or strings
        What was measured: ``{"largest": 1.2e6, "limit": 65504.0, "overflowed": 312}``.
    fix : str
        One sentence: what to do.
    source : str
        "model.py:42: y = x.cumsum(-1)", the line of Python that made the call; "" where it is not known.

    Examples
    --------
    >>> class Squares(torch.nn.Module):
    ...     def forward(self, x):
    ...         return (x * x).mean(-1).sqrt()
    >>> finding = qsim.doctor(Squares(), [torch.full((2, 4), 300.0)], target="tensorrt-fp16").findings[0]
    >>> finding.code, finding.severity, finding.place
    ('QS010', 'error', 'mul')
    """

    code: str
    severity: Severity
    module: str
    op: str
    evidence: Mapping[str, Any]
    fix: str
    source: str = ""
    title: str = field(init=False)

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"Finding: got code={self.code!r}; expected one of {', '.join(CODES)}")
        if self.severity not in SEVERITIES:
            raise ValueError(f"Finding: got severity={self.severity!r}; expected one of {', '.join(SEVERITIES)}")
        object.__setattr__(self, "title", CODES[self.code])

    @property
    def place(self) -> str:
        """The operation if there is one, else the module."""
        return self.op or self.module or "the model"

    def __str__(self) -> str:
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in self.evidence.items()}
        numbers = ", ".join(f"{name} {value}" for name, value in shown.items())
        lines = [f"{self.code} {self.severity}: {self.place}: {self.title}" + (f" ({numbers})" if numbers else "")]
        lines += [f"  at {self.source}"] if self.source else []
        return "\n".join([*lines, f"  fix: {self.fix}"])
