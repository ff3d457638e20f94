"""The ways to choose a range, as data (docs/numerics.md, section 4)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class RangeMethod:
    """What the library asks of a method, beside what it chooses.

    Attributes
    ----------
    searches : bool
        Whether `ops.search_range` and its kin know it: it chooses from all that was observed.
    takes_range : bool
        Whether it takes the range as it was observed: then channels and blocks, which keep no sketch, may have it.
    weighs_clipping : bool
        Whether it weighs clipping against the step of an even grid: float formats have none, and no use for it.
    """

    searches: bool
    takes_range: bool
    weighs_clipping: bool


RANGE_METHODS = {
    "minmax": RangeMethod(searches=True, takes_range=True, weighs_clipping=False),
    "percentile": RangeMethod(searches=True, takes_range=False, weighs_clipping=False),
    "mse": RangeMethod(searches=True, takes_range=False, weighs_clipping=True),
    "tf_enhanced": RangeMethod(searches=True, takes_range=False, weighs_clipping=True),
    "entropy": RangeMethod(searches=True, takes_range=False, weighs_clipping=True),
    "ema": RangeMethod(searches=False, takes_range=True, weighs_clipping=True),
    "dynamic": RangeMethod(searches=False, takes_range=False, weighs_clipping=False),
}
READ_BY = {"percentile": "percentile", "gamma": "tf_enhanced", "averaging": "ema"}  # fields of a spec that one method reads, and which
SEARCHES = tuple(name for name, method in RANGE_METHODS.items() if method.searches)


def check_read(caller: str, methods: Collection[str], **given: float | None) -> None:
    """Raise a ValueError where a field is given that none of `methods` reads.

    Examples
    --------
    >>> check_read("QuantSim.set_method", ["mse"], percentile=99.9, gamma=None)
    Traceback (most recent call last):
        ...
    ValueError: QuantSim.set_method: got percentile=99.9 and method='mse', which does not read it; expected method='percentile'
    """
    for name, value in given.items():
        if value is not None and READ_BY[name] not in methods:
            got = ", ".join(repr(method) for method in methods)
            raise ValueError(f"{caller}: got {name}={value} and method={got}, which does not read it; expected method={READ_BY[name]!r}")
