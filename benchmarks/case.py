"""What a benchmark case is: data that the runner measures, prints and writes down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Calls = dict[str, Callable[[], object]]  # "qsim" and its baselines, by the names that the ratios get
Bars = Mapping[str, float]

LARGE = 2**22  # from here on, all cores are worth their while


@dataclass(frozen=True)
class Case:
    """One operator on inputs of several sizes, with what it is compared to.

    Parameters
    ----------
    operator, name : str
        The family and the variant of it.
    sizes : tuple of int
        By which the time is divided: elements, or tensors where `unit` says so.
    make : function of a size
        Allocates the inputs and returns the calls. Each baseline alternates with "qsim" alone: the memory of a third call would
        push both out of the cache.
    bytes_moved : float
        Read and written per element; 0 where the memory is not what limits.
    dtype : str
        Name of the torch dtype.
    bars : mapping of size to mapping of baseline to largest ratio
        What the project promises for one thread. Besides baselines: "us", microseconds per call, or per tensor; "spread", the
        largest over the smallest time of all calls.
    serial, parallel : bool
        Whether it runs on one thread; whether `LARGE` sizes run on all cores.
    parallel_bars : mapping of baseline to largest ratio
        The promise there.
    """

    operator: str
    name: str
    sizes: tuple[int, ...]
    make: Callable[[int], Calls]
    bytes_moved: float = 0
    dtype: str = "float32"
    bars: Mapping[int, Bars] = field(default_factory=dict)
    serial: bool = True
    parallel: bool = False
    parallel_bars: Bars = field(default_factory=dict)
    unit: str = "element"

    def sizes_at(self, threads: int) -> tuple[int, ...]:
        if threads == 1:
            return self.sizes if self.serial else ()
        return tuple(n for n in self.sizes if self.parallel and n >= LARGE)

    def bars_at(self, size: int, threads: int) -> Bars:
        return self.bars.get(size, {}) if threads == 1 else self.parallel_bars
