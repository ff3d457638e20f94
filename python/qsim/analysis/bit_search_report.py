"""What a search for bits found: points, a table, a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qsim.analysis.bit_choices import Bits
from qsim.analysis.bit_costs import Budget, Costs
from qsim.config.config import Config
from qsim.loggers.figures import Figures
from qsim.pages.chart import Axis, Chart, Series
from qsim.pages.markup import Cell, Column, Fact, Line, finite, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.table import text_table

_SHARES = {
    "size": "share of float32",
    "bit operations": "share of float32",
    "tensors": "share above the fewest bits",
    "latency": "share of float32",
}


@dataclass(frozen=True)
class Point:
    """One assignment of bits.

    Attributes
    ----------
    bits : dict of str to int or "float"
        Of every quantizer, by its key.
    places : dict of str to (str, str)
        The operation of each quantizer, as overrides match it, and its role there: "weight" or "activation".
    costs : Costs
        `size`, `bit_operations` and `tensors`, as `Budget` counts them.
    predicted : float
        The loss, as the sum of what each tensor loses by itself: in units of the metric, or the distance from float.
    measured : float
        The metric, or the distance, of a simulation with `config`.
    loss : float
        What of it is lost beside float.
    config : Config
    """

    bits: dict[str, Bits]
    places: dict[str, tuple[str, str]] = field(repr=False)
    costs: Costs
    predicted: float
    measured: float
    loss: float
    config: Config = field(repr=False)


def dominates(one: Point, other: Point, budget: Budget) -> bool:
    """Whether `one` is nowhere worse than `other`, in what the budget counts and in what is lost, and somewhere better."""
    mine, its = (one.loss, *one.costs.spent(budget)), (other.loss, *other.costs.spent(budget))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


@dataclass(frozen=True)
class BitSearch(Report):
    """What `QuantSim.search_bits` returns; ``print`` shows the points and the bits of the best one.

    Attributes
    ----------
    front : list of Point
        Those that no other is better than, the cheapest first.
    best : Point
        The one that loses least within the budget.
    budget : Budget
    baseline : float or None
        The metric in float; None without a metric: then `Point.measured` is the distance from float.
    higher_is_better : bool
        Of the metric.
    note : str
        What is not known of the model; "" for nothing.
    unit : str or None
        Of the distance from float: "nats" of a divergence of classes, or "MSE over mean square"; None with a metric.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(64, 16)
    >>> sim = qsim.QuantSim(model, x, qsim.int4())
    >>> report = sim.calibrate([x], progress=False)
    >>> search = sim.search_bits([x], budget=Budget(tensors=0.2), candidates=(4, 8), probes=0, progress=False)
    >>> finer = qsim.QuantSim(model, x, search.config)
    >>> finer.quantizers()["0.weight"].spec.bits == search.best.bits["0.weight"]
    True
    >>> search.save(tempfile.mktemp(".html"))
    """

    front: list[Point]
    best: Point
    budget: Budget
    baseline: float | None
    higher_is_better: bool
    note: str = ""
    unit: str | None = None

    @property
    def config(self) -> Config:
        """That of the best point: ``QuantSim(model, example_inputs, search.config)`` calibrates into what was found."""
        return self.best.config

    def __str__(self) -> str:
        known, best = self._known, "best within the budget"
        columns = (*known.values(), "predicted loss", self._measured, "")
        rows = [
            (*_costs(point, known), f"{point.predicted:.4g}", f"{point.measured:.6g}", best if point is self.best else "")
            for point in self.front
        ]
        bits = text_table(("operation", "weight", "activation"), [(name, *both) for name, both in _by_operation(self.best).items()])
        return "\n".join([text_table(columns, rows, columns[:-1]), bits, *([f"note: {self.note}"] if self.note else [])])

    @property
    def _measured(self) -> str:
        if self.baseline is None:
            return f"distance from float ({self.unit})"
        return f"metric ({self.baseline:.6g} in float)"

    @property
    def _known(self) -> dict[str, str]:
        """Heads of the costs that some point has."""
        return {name: head for name, head in _HEADS.items() if any(getattr(point.costs, name) is not None for point in self.front)}

    def figures(self) -> Figures:
        """Costs, loss and bits of the best point."""
        bits = {f"bits/{key}": 32.0 if isinstance(bits, str) else float(bits) for key, bits in self.best.bits.items()}
        costs = {f"costs/{name}": cost for name, cost in vars(self.best.costs).items() if cost is not None}
        return Figures({"lost": self.best.loss, **costs, **bits})

    def page(self) -> Page:
        """See `Report.page`."""
        return bit_search_page(self)


_HEADS = {"size": "size", "bit_operations": "bit operations", "tensors": "tensors above", "latency": "latency"}  # fields of `Costs`


def _costs(point: Point, known: Iterable[str]) -> list[str]:
    """Those costs of a point, as shares."""
    values = {name: getattr(point.costs, name) for name in known}
    return ["" if v is None else f"{100 * v:.1f} %" if name == "tensors" else f"{v:.4f}" for name, v in values.items()]


def _by_operation(point: Point) -> dict[str, tuple[str, str]]:
    """The bits of each operation's weights and activations."""
    found: dict[str, dict[str, dict[Bits, None]]] = {}
    for key, bits in point.bits.items():
        name, role = point.places[key]
        found.setdefault(name, {"weight": {}, "activation": {}})[role][bits] = None
    return {name: (", ".join(map(str, roles["weight"])), ", ".join(map(str, roles["activation"]))) for name, roles in found.items()}


def bit_search_page(search: BitSearch) -> Page:
    """The front as a curve, its points, and the bits of the best one."""
    best = search.best
    facts: list[Fact] = [("size of float32", f"{100 * best.costs.size:.1f} %")]
    if best.costs.bit_operations is not None:
        facts.append(("bit operations of float32", f"{100 * best.costs.bit_operations:.2f} %"))
    if best.costs.latency is not None:
        facts.append(("time of float32", f"{100 * best.costs.latency:.1f} %"))
    facts += [("tensors above the fewest bits", f"{100 * best.costs.tensors:.1f} %"), ("lost", f"{best.loss:.4g}", "beside float")]
    along = [point.costs.spent(search.budget)[0] for point in search.front]
    name = next(name for name, most in vars(search.budget).items() if most is not None).replace("_", " ")
    losses = [finite(point.loss) for point in search.front]
    is_logarithmic = min(losses) >= 0 and max(losses) > 0
    axes = Axis(name, _SHARES[name]), Axis("lost beside float" + (f" ({search.unit})" if search.unit else ""), logarithmic=is_logarithmic)
    series = [Series("the best that was found", "inside", losses)]
    places, picked = list(range(len(losses))), search.front.index(best)
    chart = Chart("What is lost, by budget", *axes, series, places, along, picked=picked, points=True)
    known = search._known
    heads = (*known.values(), "predicted loss", "measured" if search.unit is None else f"measured ({search.unit})")
    columns = [Column("point"), *(Column(head, number=True, ascending=True) for head in heads)]
    lines = [_line(point, "best" if point is best else "", known) for point in search.front]
    note = "None of them is worse in all than another; the large dot is the best."
    if is_logarithmic and min(losses) == 0:
        note += " What loses nothing has no place on the logarithmic axis."
    points = table("Points", note, columns, lines, chart)
    rows = [_bits_line(key, bits, " · ".join(best.places[key])) for key, bits in best.bits.items()]
    chosen = table("Bits", "Of each quantizer, at the best point.", [Column("quantizer", wide=True), Column("bits", number=True)], rows)
    notes = problems([search.note] if search.note else [])
    return Page("Bits under a budget", str(search.budget), tiles(facts) + notes + points + chosen, about(search.subject), chart)


def _line(point: Point, name: str, known: Iterable[str]) -> Line:
    values: Sequence[float | None] = (*(getattr(point.costs, cost) for cost in known), point.predicted, point.measured)
    texts = (*_costs(point, known), f"{point.predicted:.4g}", f"{point.measured:.6g}")
    return Line([Cell(name), *(Cell(text, value) for text, value in zip(texts, values, strict=True))])


def _bits_line(key: str, bits: Bits, below: str) -> Line:
    return Line([name_cell(key, below), Cell(str(bits), 32.0 if isinstance(bits, str) else bits)])
