"""With which parameters of a simulation its quantizers observed what they hold: what others showed is forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn

from qsim.quantizers.quantizer import Quantizer
from qsim.runs.fingerprint import fingerprints
from qsim.runs.sharding import sharded_around
from qsim.runs.snapshot import Snapshot


class ObservedWith:
    """Part of a simulation's state.

    Attributes
    ----------
    parameters : dict of str to tuple, or None
        Fingerprints of the parameters of the last calibration; None before the first.
    outdated : set of str
        Keys of quantizers that nothing has reached since the parameters became others: what they hold was observed before.
    waits : bool
        Whether nothing has reached any of them, since calibrations had no data.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, tuple[int | str, ...]] | None = None
        self.outdated: set[str] = set()
        self.waits = False

    def is_before(self, sim: nn.Module) -> bool:
        """Whether the parameters became others since quantizers observed: a state dict says so, as `QuantizerBank.observed_before`."""
        return self.parameters is not None and (self.waits or self.parameters != _found(sim))

    def follow_state(self, sim: nn.Module, is_before: bool) -> None:
        """What was observed was loaded together with the parameters: with others, if these were trained before they were saved."""
        self.parameters, self.outdated, self.waits = {} if is_before else _found(sim), set(), False

    @contextlib.contextmanager
    def anew(self, sim: nn.Module, quantizers: Mapping[str, Quantizer]) -> Iterator[None]:
        """Around a calibration: what was observed with other parameters is forgotten, however they changed, by every quantizer that
        something reaches. The others go on with what they have."""
        before, self.parameters = self.parameters, _found(sim)
        is_changed = before is not None and before != self.parameters
        if is_changed:
            self.outdated = set(quantizers)
        held = {key: Snapshot(quantizer) for key, quantizer in quantizers.items() if key in self.outdated}
        for key in held:
            quantizers[key].reset()
        try:
            yield
        finally:
            reached = {key for key in held if quantizers[key].counts.elements}
            self.outdated -= reached
            self.waits = (self.waits or is_changed) and not reached
            for key in held.keys() - reached:
                held[key].restore()


def _found(sim: nn.Module) -> dict[str, tuple[int | str, ...]]:
    with sharded_around(sim):
        return fingerprints(sim.get_submodule("model"))
