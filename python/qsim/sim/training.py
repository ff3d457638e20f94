"""The part of `qsim.QuantSim` that serves training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from qsim.graph.attach import detach
from qsim.graph.batch_norm import Fold
from qsim.sim.calibration import Forward, iterate, to_device
from qsim.sim.ranges import RangeChoice
from qsim.sim.sharding import sharded_around, sharded_modules
from qsim.training.batch_norm import FoldReport
from qsim.training.param_groups import param_groups
from qsim.training.running_statistics import batch_norms, reestimate
from qsim.training.schedule import Schedule
from qsim.training.trained_fold import fold_trained
from qsim.training.watch import Watch


class Training(RangeChoice):
    """Base of `qsim.QuantSim`: BatchNorm, groups for optimizers, schedules, and a watch for NaN."""

    def reestimate_batch_norms(
        self, data: Iterable[Any], forward: Forward | None = None, *, max_batches: int | None = None, progress: bool = True
    ) -> dict[str, int]:
        """Set the running statistics of all BatchNorms to what the simulated model gives them: the average over batches.

        Weights and activations are quantized as the switches say (``with sim.in_float():`` for none). A batch with NaN or Inf where a
        BatchNorm reads it does not count there. Everything else is afterwards as it was: training flags, ranges, random numbers.

        Parameters
        ----------
        data, forward, max_batches, progress
            As in `calibrate`.

        Returns
        -------
        dict of str to int
            How many batches counted, for each BatchNorm.

        Raises
        ------
        CalibrationError
            There was no batch, or a BatchNorm, which it names, met none that counts. No statistics are changed then.
        """
        run = self._forward_batch if forward is None else forward
        called = self._called()
        with sharded_around(self):
            return reestimate(
                self.model, iterate(data, max_batches, progress, "QuantSim.reestimate_batch_norms"), lambda batch: run(called, batch)
            )

    def freeze_batch_norms(self, *patterns: str, affine: bool = False) -> None:
        """From now on the BatchNorms that match any glob normalize with their running statistics in training mode too.

        Parameters
        ----------
        *patterns : str
            Globs for the paths of modules: ``"*"`` for all. One that matches no BatchNorm is an error.
        affine : bool
            Stop the training of their weight and bias as well.
        """
        norms = batch_norms(self.model)
        for pattern in patterns:
            names = [name for name in norms if name == pattern or fnmatchcase(name, pattern)]
            if not names:
                raise ValueError(f"QuantSim: no BatchNorm matches {pattern!r}; there are: {', '.join(norms) or 'none'}")
            self._frozen.update(names)
            for name in names:
                norms[name].eval()
                if affine:
                    norms[name].requires_grad_(False)

    def fold_batch_norms(self) -> FoldReport:
        """Fold the BatchNorms that stayed (``Config(batch_norm="keep")``) into the layers before them, after training.

        A weight with a scale for each output channel keeps its integers: the scale absorbs BatchNorm's factor. Where that factor is
        negative the integers change their sign, and where it is zero they become zero. A scale that spans channels cannot absorb
        it; the range of such a weight is chosen anew. BatchNorms before their layer stay: their results are quantized.

        Returns
        -------
        FoldReport
            Its `warnings` name each weight whose integers changed.

        Raises
        ------
        ValueError
            The simulation is sharded by FSDP.
        """
        if not batch_norms(self.model):
            return FoldReport()
        if sharded_modules(self):
            raise ValueError("QuantSim.fold_batch_norms: fully_shard holds the weights; load the state into one that is not sharded")
        examples = [to_device(call, self.model) for call in self._calls]
        quantizers = self.quantizers()
        of_parameter = {planned.parameter: quantizers[key] for key, planned in self._planned.items()}
        detach(self.model)
        norms = batch_norms(self.model)
        report = fold_trained(self.model, examples, of_parameter)
        self._folds += tuple((Fold(path, layer, before=False), norms[path]) for path, layer in report.folded.items())
        self._simulate(examples, report, quantizers)
        self._frozen &= set(batch_norms(self.model))
        raised = self._fit_biases([bias for bias in self._biases if bias.parameter.rpartition(".")[0] in report.folded.values()])
        return dataclasses.replace(report, warnings=(*report.warnings, *raised))

    def param_groups(
        self, lr: float | None = None, *, scale_lr: float | None = None, weight_decay: float | None = None, bias_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """All parameters in groups for an optimizer of `torch.optim`: each in exactly one, tied ones once.

        Parameters
        ----------
        lr : float, optional
            Learning rate of all; the optimizer's own by default.
        scale_lr : float, optional
            That of learned scales; `lr` by default.
        weight_decay : float, optional
            Of weights; the optimizer's own by default. Scales never decay.
        bias_decay : float, optional
            Of biases and of the parameters of normalizations: all with one dimension or none; `weight_decay` by default.

        Returns
        -------
        list of dict
            Those that have members of "weights", "biases" and "scales", with the keys `name`, `params`, and, where given, `lr` and
            `weight_decay`. (LBFGS takes one group only, Muon only matrices: their kinds of optimizer want lists of their own.)

        Examples
        --------
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(3, 2), torch.zeros(1, 3))
        >>> optimizer = torch.optim.AdamW(sim.param_groups(1e-3, weight_decay=0.01, bias_decay=0.0))
        >>> [(group["name"], group["weight_decay"]) for group in optimizer.param_groups]
        [('weights', 0.01), ('biases', 0.0)]
        """
        return param_groups(self, self.quantizers().values(), lr, scale_lr, weight_decay, bias_decay)

    def schedule(
        self,
        *,
        quantize_from: int | Mapping[str, int] = 0,
        observe_until: int | None = None,
        freeze_batch_norms_from: int | None = None,
    ) -> Schedule:
        """Switches by step: call the schedule's ``step()`` after each ``optimizer.step()``.

        Parameters
        ----------
        quantize_from : int, or mapping of glob to int
            Quantizers are off before this step. Globs as in `enable`; the last match wins. What is off already stays off.
        observe_until : int, optional
            From this step on running ranges (``method="ema"``) rest.
        freeze_batch_norms_from : int, optional
            From this step on all BatchNorms use their running statistics.

        Returns
        -------
        Schedule
            With `state_dict` and `load_state_dict`.
        """
        return Schedule(self, quantize_from, observe_until, freeze_batch_norms_from)

    def watch(self) -> Watch:
        """``with sim.watch() as watch:`` finds where NaN and Inf begin; call ``watch.step()`` after each ``loss.backward()``.

        The first operation that makes NaN or Inf out of finite numbers, forward or backward, raises a NonFiniteError that names it,
        its module and the step. Each operation is followed by a look at its results, so that a step takes several times as long,
        and one wait for the device a step; outside the context nothing is different. Not under `torch.compile`.
        """
        return Watch(self.model)
