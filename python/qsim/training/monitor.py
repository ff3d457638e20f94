"""Figures of a training simulation for a logger: ranges, what is clipped, gradients, NaN and Inf."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from qsim.loggers.figures import Figures, Histogram
from qsim.loggers.sinks import writer_of
from qsim.options import check_flag, check_whole
from qsim.quantizers.observer import Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.hooks import hooked
from qsim.runs.sharding import is_sharded
from qsim.simulation.clipping import clipped_counts
from qsim.simulation.simulation import Simulation

_BINS = 64


class Monitor:
    """Writes figures of training steps to a logger; `QuantSim.monitor` makes one.

    Attributes
    ----------
    steps : int
        How many steps were finished. Set it when training goes on from a checkpoint.

    Examples
    --------
    >>> class Names:
    ...     def log(self, figures, step):
    ...         print(step, figures["clipped/weight"] < 0.1, "gradient_norm/weight" in figures)
    >>> sim = qsim.QuantSim(torch.nn.Linear(4, 2), torch.randn(1, 4))
    >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
    >>> with sim.train().monitor(Names()) as monitor:
    ...     sim(torch.randn(32, 4)).sum().backward()
    ...     monitor.step()
    0 True True
    """

    def __init__(self, sim: Simulation, to: Any, every: int, histograms: bool) -> None:
        check_whole("QuantSim.monitor", "every", every, least=1)
        check_flag("QuantSim.monitor", "histograms", histograms)
        self.steps = 0
        self._sim, self._every, self._histograms = sim, every, histograms
        self._write = writer_of(to, "QuantSim.monitor")
        self._counts: dict[str, Tensor] = {}
        self._observers: dict[str, Observer] = {}
        self._entered = False
        self._hooks = ExitStack()

    def __enter__(self) -> Monitor:
        self._entered = True
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._entered = False

    def step(self) -> None:
        """End a step: call it after ``loss.backward()``, before ``optimizer.step()`` and before gradients are cleared."""
        if not self._entered:
            raise RuntimeError("QuantSim.monitor: step() was called outside of the context: with sim.monitor(writer) as monitor: ...")
        if self.steps % self._every == 0:
            self._write(self._figures(), self.steps)
        self.steps += 1
        self._look()

    def _look(self) -> None:
        """From now on look at activations, if this step is to be written."""
        self._hooks.close()
        self._counts.clear()
        self._observers.clear()
        if self.steps % self._every:
            return
        weights = self._sim.weights()
        keys = {quantizer: key for key, quantizer in self._sim.quantizers().items() if key not in weights}
        self._hooks.enter_context(hooked(keys, lambda quantizer, args: self._note(keys[quantizer], quantizer, args[0])))

    @torch.no_grad()
    def _note(self, key: str, quantizer: Quantizer, x: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # the simulation follows the model's own calls
            self._add(key, quantizer, x.detach())

    def _add(self, key: str, quantizer: Quantizer, x: Tensor) -> None:
        if quantizer.enabled and not quantizer.lacks_encoding:
            found = clipped_counts(x, quantizer)
            self._counts[key] = found if key not in self._counts else self._counts[key] + found
        if self._histograms:
            if key not in self._observers:
                self._observers[key] = Observer().to(x.device)
            self._observers[key](x)

    @torch.no_grad()
    def _figures(self) -> Figures:
        """Everything of this step; waits for the device once for scalars."""
        quantizers, weights = self._sim.quantizers(), self._sim.weights()
        with torch._C.DisableTorchFunction():
            for key, weight in weights.items():
                if not is_sharded(weight):
                    self._add(key, quantizers[key], weight.detach())
        found: dict[str, Tensor] = {}
        for key, counts in self._counts.items():
            found[f"clipped/{key}"] = counts[0].double() / counts[1]
            found[f"nonfinite/{key}"] = counts[2].double()
        for key, encoding in self._sim.encodings().items():
            found |= {f"range_low/{key}": encoding.min.min().double(), f"range_high/{key}": encoding.max.max().double()}
        found |= self._gradients()
        names, home = list(found), next(iter(found.values())).device if found else None
        scalars = dict(zip(names, torch.stack([found[name].to(home) for name in names]).tolist(), strict=True)) if names else {}
        observed = {f"values/{key}": Histogram(*o.histogram(_BINS)) for key, o in self._observers.items() if bool(o.lowest < o.highest)}
        return Figures(scalars, observed)

    def _gradients(self) -> dict[str, Tensor]:
        """Norms of the gradients of all parameters, each and together, and how many of their elements are NaN or Inf."""
        grads = {name: p.grad.detach() for name, p in self._sim.named_parameters() if p.grad is not None and not is_sharded(p.grad)}
        if not grads:
            return {}
        home = next(iter(grads.values())).device
        norms = [torch.linalg.vector_norm(grad.float()).double().to(home) for grad in grads.values()]
        broken = torch.stack([(~grad.isfinite()).sum().to(home) for grad in grads.values()]).sum().double()
        each = {f"gradient_norm/{name.removeprefix('model.')}": norm for name, norm in zip(grads, norms, strict=True)}
        return {**each, "gradient/norm": torch.linalg.vector_norm(torch.stack(norms)), "gradient/nonfinite": broken}
