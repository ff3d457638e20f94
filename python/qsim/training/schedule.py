"""When quantization begins and ranges and statistics come to rest in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qsim.batch_norm.statistics import batch_norms, thaw
from qsim.options import check_whole
from qsim.simulation.batch_norms import freeze_batch_norms

if TYPE_CHECKING:
    from qsim.simulation.simulation import Simulation


class Schedule:
    """Switches of a simulation by step of training; `QuantSim.schedule` makes one.

    What is on is decided by the number of steps alone, so loading a state dict leaves the switches as they were when it was saved.

    Attributes
    ----------
    steps : int
        How often `step` was called.

    Examples
    --------
    >>> sim = qsim.QuantSim(torch.nn.Linear(4, 2), torch.zeros(1, 4))
    >>> schedule = sim.schedule(quantize_from=1)
    >>> schedule.step()
    >>> schedule.state_dict(), sim.quantizers()["weight"].enabled
    ({'steps': 1}, True)
    >>> schedule.load_state_dict({"steps": 0})
    >>> sim.quantizers()["weight"].enabled
    False
    """

    def __init__(
        self, sim: Simulation, quantize_from: int | Mapping[str, int], observe_until: int | None, freeze_batch_norms_from: int | None
    ) -> None:
        begins = dict(quantize_from) if isinstance(quantize_from, Mapping) else {"*": quantize_from}
        for pattern, step in begins.items():
            name = f"quantize_from[{pattern!r}]" if isinstance(quantize_from, Mapping) else "quantize_from"
            check_whole("QuantSim.schedule", name, step, least=0)
        for name, end in (("observe_until", observe_until), ("freeze_batch_norms_from", freeze_batch_norms_from)):
            if end is not None:
                check_whole("QuantSim.schedule", name, end, least=0, otherwise="None for never")
        if freeze_batch_norms_from is not None and not batch_norms(sim.model):
            raise ValueError("QuantSim.schedule: freeze_batch_norms_from finds no BatchNorm; Config(batch_norm='keep') does not fold them")
        self.steps = 0
        self._sim = sim
        # The last match wins. A quantizer that is off now is off because someone wanted it so.
        self._begins = {q: step for pattern, step in begins.items() for q in sim.quantization.matching((pattern,)) if q.enabled}
        running = [q for q in sim.quantizers().values() if q.spec.is_running and q.observing]
        self._ends = {} if observe_until is None else dict.fromkeys(running, observe_until)
        self._freeze = freeze_batch_norms_from
        self._frozen: set[str] = set()  # by this schedule
        self._changes = {*self._begins.values(), *self._ends.values(), *([] if self._freeze is None else [self._freeze])}
        self._apply()

    def step(self) -> None:
        """Count a step: call it after ``optimizer.step()``."""
        self.steps += 1
        if self.steps in self._changes:
            self._apply()

    def _apply(self) -> None:
        for quantizer, begin in self._begins.items():
            quantizer.enabled = self.steps >= begin
        for quantizer, end in self._ends.items():
            quantizer.observing = self.steps < end
        self._sim.waiting = frozenset(q.name for q, begin in self._begins.items() if self.steps < begin)
        norms = batch_norms(self._sim.model)  # none, if they were folded since
        if self._freeze is not None and self.steps >= self._freeze:
            self._frozen |= norms.keys() - self._sim.frozen
            freeze_batch_norms(self._sim, norms)
        elif self._frozen:
            self._sim.frozen -= self._frozen
            thaw({name: norm for name, norm in norms.items() if name in self._frozen}, self._sim.training)
            self._frozen = set()

    def state_dict(self) -> dict[str, int]:
        """The number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many steps."""
        self.steps = state["steps"]
        self._apply()
