"""The part of `qsim.QuantSim` that wins accuracy back without labels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from qsim.options import check_flag, check_number, check_whole, shown
from qsim.restoration.choice import LEARNED, Steps
from qsim.restoration.distill import DistillationLoss, Distilled, relative_error
from qsim.restoration.restore import distill, restore_layers
from qsim.restoration.restore_report import RestoreReport
from qsim.restoration.solvers import SOLVERS
from qsim.runs.batches import Forward
from qsim.simulation.simulation import Simulation


class Restoration(Simulation):
    """Base of `qsim.QuantSim`: weights that are solved for, biases corrected, ranges searched, and distillation."""

    def restore(
        self,
        data: Iterable[Any],
        forward: Forward | None = None,
        *,
        steps: int = 0,
        max_batches: int | None = None,
        memory: int | None = None,
        path: str | os.PathLike[str] | None = None,
        progress: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> RestoreReport:
        """Win accuracy back after `calibrate`, without labels: ranges, integers and biases of one layer after the other.

        Every weight that multiplies (linear, convolutions of any kind, products with a matrix) gets the scales and integers whose product
        with what the simulation reads there is closest to the float model's (GPTQ, Frantar et al. 2023, with the float model's own input
        on the other side, as in GPTAQ, Li et al. 2025), and its bias takes up the mean of what is left (Nagel et al. 2019, section 4.2).
        A quarter of the batches is held back: what gains nothing there is not done, layer by layer and in the end as a whole.

        The model's weights are replaced by ones on their grids. What `in_float` runs is then no longer the float model, so it can be
        done once: make a new simulation for another attempt. An error, Ctrl-C too, takes everything back. Frozen parameters
        (``requires_grad_(False)``) are solved for as others, and not trained with `steps`.

        Parameters
        ----------
        data, forward, max_batches
            As in `calibrate`; some hundreds of samples. All batches are under way at once.
        steps : int
            So many steps of `distill` after it, against the float model's results.
        memory : int, optional
            Bytes for batches under way, 4 GiB by default; batches beyond are not used, and the report says how many.
        path : str or PathLike, optional
            A folder in which what is found for each weight is kept at once. Called again with the same simulation and path, after the
            process was cut off, it goes on from there. What `steps` trains is not kept.
        progress : bool
            Show a progress bar where tqdm is installed.
        group : torch.distributed.ProcessGroup, optional
            Ranks that call this together, each with data of its own, and solve with what all of them have seen:
            ``torch.distributed.group.WORLD``. All get the same weights.

        Returns
        -------
        RestoreReport
            ``print`` shows SQNR before and after, for every weight and for the model's results, and what was left alone and why.

        Raises
        ------
        NoEncodingError
            Before calibration.
        CalibrationError
            There is no batch without NaN or Inf.
        ValueError
            It was restored already, or is sharded, or made under `torch.inference_mode` (to be called there it may be), or `path` is
            another simulation's.
        FileFormatError
            A file below `path` is not what was written there.

        Examples
        --------
        >>> from torch import nn
        >>> model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(256, 16)
        >>> sim = QuantSim(model, x[:1], qsim.w4a8())
        >>> calibration = sim.calibrate(x.split(32), progress=False)
        >>> report = sim.restore(x.split(32), progress=False)
        >>> report.after > report.before + 1
        True
        """
        options: dict[str, Any] = {"max_batches": max_batches, "memory": memory, "show": progress, "group": group, "path": path}
        return restore_layers(self, data, forward, Steps(), caller="QuantSim.restore", distilling=steps, **options)

    def solve_weights(
        self,
        data: Iterable[Any],
        method: str = "gptq",
        forward: Forward | None = None,
        *,
        damping: float = 0.01,
        follow_inputs: bool = True,
        max_batches: int | None = None,
        memory: int | None = None,
        path: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> RestoreReport:
        """The integers of each weight alone, as `restore` finds them: scales and biases stay.

        Parameters
        ----------
        data, forward, max_batches, memory, path, progress
            As in `restore`.
        method : "gptq", "gpfq" or "nearest"
            "gptq": column by column, errors handed on by the input's second moments (Frantar et al. 2023), and coordinate descent from
            there (Behdin et al. 2023) on up to 1,024 columns. "gpfq": column by column, each
            the best for the sum so far (Lybrand and Saab 2021). "nearest": each number of the best real weight rounded by itself.
        damping : float
            Part of the mean of the second moments' diagonal that is added to it: more keeps weights closer to the float model's.
        follow_inputs : bool
            Weights make up for what the simulation reads otherwise than the float model. False: as if it read the same (GPTQ as published).

        Returns
        -------
        RestoreReport

        Examples
        --------
        >>> from torch import nn
        >>> x = torch.randn(256, 4) @ torch.randn(4, 16)  # columns that depend on each other
        >>> sim = qsim.QuantSim(nn.Linear(16, 8), x[:1], qsim.w4a8())
        >>> calibration = sim.calibrate(x.split(32), progress=False)
        >>> report = sim.solve_weights(x.split(32), progress=False)
        >>> report.after > report.before
        True
        """
        if not isinstance(method, str) or method not in SOLVERS:
            raise ValueError(f"QuantSim.solve_weights: got method={shown(method)}; expected one of {', '.join(map(repr, SOLVERS))}")
        check_number("QuantSim.solve_weights", "damping", damping, least=0)
        check_flag("QuantSim.solve_weights", "follow_inputs", follow_inputs)
        if damping == 0 or math.isinf(damping):
            raise ValueError(f"QuantSim.solve_weights: got damping={damping}; expected a finite number above 0, such as 0.01")
        steps = Steps(method, ranges=False, biases=False, follows_inputs=follow_inputs, damping=damping)
        options: dict[str, Any] = {"max_batches": max_batches, "memory": memory, "show": progress, "path": path}
        return restore_layers(self, data, forward, steps, caller="QuantSim.solve_weights", **options)

    def learn_rounding(
        self,
        data: Iterable[Any],
        forward: Forward | None = None,
        *,
        steps: int = 500,
        max_batches: int | None = None,
        memory: int | None = None,
        path: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> RestoreReport:
        """As `restore`, with rounding learned in place of GPTQ: AdaRound (Nagel et al. 2020) on second moments instead of samples.

        Each number of a weight lies softly between its two neighbours, and is pressed to one of them as the steps go on. A row takes what
        GPTQ finds where that is better. It takes several times as long, and gains where grids are coarse.

        Parameters
        ----------
        data, forward, max_batches, memory, path, progress
            As in `restore`.
        steps : int
            Of Adam, for each weight.

        Returns
        -------
        RestoreReport

        Examples
        --------
        >>> from torch import nn
        >>> x = torch.randn(256, 16)
        >>> sim = qsim.QuantSim(nn.Linear(16, 8), x[:1], qsim.w4a8())
        >>> calibration = sim.calibrate(x.split(32), progress=False)
        >>> report = sim.learn_rounding(x.split(32), steps=50, progress=False)
        >>> report.after > report.before
        True
        """
        check_whole("QuantSim.learn_rounding", "steps", steps, least=1)
        options: dict[str, Any] = {"max_batches": max_batches, "memory": memory, "show": progress, "path": path}
        how = Steps(LEARNED, rounding_steps=steps)
        return restore_layers(self, data, forward, how, caller="QuantSim.learn_rounding", **options)

    def correct_biases(
        self,
        data: Iterable[Any],
        forward: Forward | None = None,
        *,
        max_batches: int | None = None,
        memory: int | None = None,
        progress: bool = True,
    ) -> RestoreReport:
        """Biases alone, so that the mean of each channel is the float model's: Nagel et al. 2019, "Data-Free Quantization", section 4.2.

        Parameters and results as of `restore`.

        Examples
        --------
        >>> from torch import nn
        >>> x = torch.rand(256, 16)  # not around zero: rounding weights moves the mean
        >>> sim = qsim.QuantSim(nn.Linear(16, 8), x[:1], qsim.w4a8())
        >>> calibration = sim.calibrate(x.split(32), progress=False)
        >>> report = sim.correct_biases(x.split(32), progress=False)
        >>> report.after > report.before
        True
        """
        steps = Steps(None, ranges=False)
        options: dict[str, Any] = {"max_batches": max_batches, "memory": memory, "show": progress}
        return restore_layers(self, data, forward, steps, caller="QuantSim.correct_biases", **options)

    def search_weight_ranges(
        self,
        data: Iterable[Any],
        forward: Forward | None = None,
        *,
        max_batches: int | None = None,
        memory: int | None = None,
        progress: bool = True,
    ) -> RestoreReport:
        """Scales of weights alone: those whose rounded weights cost the layer's results least, among 0.35 to 1.325 times the ones in use.

        Weights and biases stay, so `restore` and the others can follow, and `calibrate` and `set_method` choose scales anew. Parameters and
        results as of `restore`.

        Examples
        --------
        >>> from torch import nn
        >>> x = torch.randn(256, 16)
        >>> sim = qsim.QuantSim(nn.Linear(16, 8), x[:1], qsim.w4a8())
        >>> calibration = sim.calibrate(x.split(32), progress=False)
        >>> report = sim.search_weight_ranges(x.split(32), progress=False)
        >>> report.after >= report.before
        True
        """
        steps = Steps(None, biases=False)
        options: dict[str, Any] = {"max_batches": max_batches, "memory": memory, "show": progress}
        return restore_layers(self, data, forward, steps, caller="QuantSim.search_weight_ranges", **options)

    def distill(
        self,
        data: Iterable[Any],
        steps: int,
        forward: Forward | None = None,
        *,
        loss: DistillationLoss = relative_error,
        max_batches: int | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> Distilled:
        """Train weights, biases and scales against the float model's own results: no labels, and only what gains is kept.

        The simulation runs in eval mode, gradients pass straight through the rounding, and the parameters that were best on a quarter of
        the batches, which is held back, are kept: those from before where no step was better, or where it ends by an error or Ctrl-C.
        Frozen parameters (``requires_grad_(False)``) stay; flags and gradients are afterwards as they were. Once weights or biases were
        trained, what `in_float` runs is no longer the float model, and neither this nor `restore` can follow.

        Parameters
        ----------
        data, forward, max_batches, progress
            As in `restore`.
        steps : int
            Of Adam, one batch each; some hundreds.
        loss : callable
            ``loss(results, results_in_float) -> Tensor``; by default the relative squared error.
        seed : int
            Of the order of the batches.

        Returns
        -------
        Distilled

        Raises
        ------
        ValueError
            It was restored or trained already, or made under `torch.inference_mode`; all parameters are frozen, and no scale can be
            learned; the loss has no gradient.

        Examples
        --------
        >>> from torch import nn
        >>> model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(256, 16)
        >>> sim = QuantSim(model, x[:1], qsim.int4())
        >>> report = sim.calibrate(x.split(32), progress=False)
        >>> distilled = sim.distill(x.split(32), steps=100, progress=False)
        >>> distilled.levels[distilled.kept] > distilled.levels[0]
        True
        """
        return distill(self, data, steps, forward, loss=loss, max_batches=max_batches, seed=seed, show=progress)
