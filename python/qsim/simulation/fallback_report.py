"""Selective fallback: which operations a pattern names, and the report on what falling back changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qsim.close_names import close_names
from qsim.graph.plan.actions import Operation, Post
from qsim.loggers.figures import Figures
from qsim.options import check_patterns, shown
from qsim.pages.markup import Cell, Column, Fact, Line, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import Subject, about
from qsim.table import text_table

_FORMATS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "float16": "float16", "bfloat16": "bfloat16", "float32": "float32"}
INTEGERS = "int"


@dataclass(frozen=True)
class FallenOperation:
    """An operation that falls back.

    Attributes
    ----------
    name, op : str
        Of its first member, and what it consists of: "conv2d + relu". All of it falls back, whichever member was named.
    format : str
        "float16", "bfloat16" or "float32".
    members : tuple of str
        Names of its members.
    """

    name: str
    op: str
    format: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class FallbackReport(Report):
    """What `QuantSim.fallback` returns: everything that falls back now, earlier calls included. ``print`` shows it, `save` writes a page.

    Attributes
    ----------
    operations : list of FallenOperation
        In the order of the model.
    released : list of str
        Quantizers that no longer quantize: no operation in integers has a use for them. They keep their encodings.
    borders : list of str
        Quantizers between an operation that falls back and one that does not: these tensors are still quantized, and need a scale.
    notes : list of str
        What is odd.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> sim = qsim.QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))
    >>> calibration = sim.calibrate([torch.randn(32, 4)], progress=False)
    >>> report = sim.fallback("2", to="bf16")
    >>> [(operation.name, operation.format) for operation in report.operations]
    [('2', 'bfloat16')]
    >>> report.save(tempfile.mktemp(".html"))
    """

    operations: list[FallenOperation]
    released: list[str]
    borders: list[str]
    notes: list[str]

    def __str__(self) -> str:
        if not self.operations:
            return "no operation falls back"
        rows = [(found.name, found.op, found.format) for found in self.operations]
        parts = [
            self._head,
            text_table(("operation", "consists of", "computes in"), rows),
        ]
        parts.append(f"no longer quantized ({len(self.released)}): {', '.join(self.released) or 'none'}")
        parts.append(f"quantized at the border ({len(self.borders)}): {', '.join(self.borders) or 'none'}")
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    @property
    def _head(self) -> str:
        count = len(self.operations)
        return f"{count} operations fall back" if count != 1 else "1 operation falls back"

    def figures(self) -> Figures:
        """How many operations fall back, and quantizers that no longer quantize or stand at the border."""
        found = {"operations": len(self.operations), "released": len(self.released), "borders": len(self.borders)}
        return Figures({f"fallback/{name}": float(count) for name, count in found.items()})

    def page(self) -> Page:
        """See `Report.page`."""
        facts: list[Fact] = [("operations", str(len(self.operations)))]
        facts += [("no longer quantized", str(len(self.released))), ("at the border", str(len(self.borders)))]
        fallen = [Line([name_cell(found.name), Cell(found.op), Cell(found.format)], " ".join(found.members)) for found in self.operations]
        heads = [Column("operation", wide=True), Column("consists of"), Column("computes in")]
        body = tiles(facts) + problems(self.notes) + table("Operations", "What falls back now.", heads, fallen)
        kinds = {"no longer quantized": self.released, "at the border": self.borders}
        lines = [Line([name_cell(key), Cell(kind)]) for kind, keys in kinds.items() for key in keys]
        note = "Those at the border lie between an operation that falls back and one that does not: they still need a scale."
        body += table("Quantizers", note, [Column("quantizer", wide=True), Column("now")], lines)
        return Page("Fallback", self._head, body, about(self.subject))


def format_named(to: str) -> str:
    """The full name of a format, or "int"."""
    if to == INTEGERS:
        return to
    if not isinstance(to, str) or to not in _FORMATS:
        raise ValueError(f"QuantSim.fallback: got to={shown(to)}; expected 'fp16', 'bf16', 'float32', or 'int' to run in integers again")
    return _FORMATS[to]


def matching(patterns: str | Iterable[str], operations: Mapping[str, Operation]) -> list[str]:
    """Names of the operations with a member that any of the patterns matches, in the order of the model.

    Raises
    ------
    ValueError
        A pattern matches none: the message has names close to it.
    """
    found: set[str] = set()
    several = [patterns] if isinstance(patterns, str) or not isinstance(patterns, Iterable) else list(patterns)
    check_patterns("QuantSim.fallback", several)
    for pattern in several:
        names = [name for name, operation in operations.items() if any(fnmatchcase(member, pattern) for member in operation.members)]
        if not names:
            raise ValueError(f"QuantSim.fallback: no operation matches {pattern!r}; {_close(pattern, operations)}")
        found.update(names)
    return [name for name in operations if name in found]


def _close(pattern: str, operations: Mapping[str, Operation]) -> str:
    members = list(dict.fromkeys(member for operation in operations.values() for member in operation.members))
    if any(member.startswith(f"{pattern}.") for member in members):
        return f"to name all inside that module: '{pattern}.*'"
    close = close_names(pattern, members) or members[:5]
    return f"close to it: {', '.join(map(repr, close))}"


def report_of(
    operations: Mapping[str, Operation], posts: Sequence[Post], formats: Mapping[str, str], subject: Subject | None = None
) -> FallbackReport:
    """The report on operations of which those in `formats`, by name, fall back."""
    fallen = [FallenOperation(name, operations[name].op, formats[name], operations[name].members) for name in operations if name in formats]
    needed = {post.key for post in posts if post.is_integer(formats)}
    released = [key for key in dict.fromkeys(post.key for post in posts) if key not in needed]
    borders = [post.key for post in posts if post.is_integer(formats) and any(name in formats for name in post.neighbours)]
    hidden = [member for found in fallen for member in operations[found.name].hidden]
    notes = [f"'{name}' cannot be seen by function modes: what it takes and gives is rounded where others read it" for name in hidden]
    return FallbackReport(fallen, released, list(dict.fromkeys(borders)), notes, subject=subject)
