"""`QuantSim`: a model as it will compute once quantized.

`sim_*.py` by topic; here are those that report.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

from qsim.calibration import Forward
from qsim.comparison import Comparison, compare
from qsim.scores import ScoreFile
from qsim.sensitivity import Metric, Sensitivity, measure, measured, output_sqnr
from qsim.sim_export import Export
from qsim.sim_files import Files


class QuantSim(Export, Files):
    """A model as it will compute once quantized. It is called, trained and saved like the model.

    The model is run once to see its operations, whatever Python they come from. BatchNorms are folded into the layers before them,
    or stay and train (`Config.batch_norm`);
    weights, inputs and the results of operations get quantizers, one at the end of each chain that inference engines fuse.

    Parameters
    ----------
    model : nn.Module
        Left as it is, unless `inplace`. In training mode its copy is put in eval mode, with a warning if it has BatchNorm.
    example_inputs : Tensor, tuple or dict
        One input, positional or keyword arguments. On the model's device.
    config : Config, optional
        What to quantize and how; `qsim.int8` by default.
    inplace : bool
        Simulate on `model` itself instead of a copy.

    Attributes
    ----------
    model : nn.Module
        The simulated model, with the original names of modules and parameters.
    config : Config

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    >>> sim = QuantSim(model, torch.randn(1, 1, 8, 8))
    >>> list(sim.quantizers())
    ['input', '0.weight', '0.output', '4.weight', '4.output']
    >>> report = sim.calibrate([torch.randn(8, 1, 8, 8)], progress=False)
    >>> sim(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 2])
    """

    def compare(self, batch: Any, forward: Forward | None = None, *, memory: int = 1 << 30) -> Comparison:
        """How far every tensor is from its float counterpart: by its own quantizer, and with everything before it quantized.

        Runs the model in eval mode on one batch, in float and simulated, and compares as it goes; nothing of the model changes. No other
        thread may use the sim meanwhile.

        Parameters
        ----------
        batch, forward : as in `calibrate`
        memory : int
            Bytes of float tensors to hold at a time. A batch with more is run several times: see `qsim.comparison.compare`.

        Returns
        -------
        Comparison

        Raises
        ------
        NoEncodingError
            Before calibration.

        Examples
        --------
        >>> from torch import nn
        >>> sim = QuantSim(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4))
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> comparison = sim.compare(torch.randn(32, 4))
        >>> comparison["2.output"].accumulated.sqnr > 20
        True
        """
        run = self._forward_batch if forward is None else forward
        with self._calibrated():
            return compare(self, self._planned, lambda: run(self._called(), batch), memory)

    def sensitivity(
        self,
        data: Any,
        metric: Metric | None = None,
        *,
        higher_is_better: bool = True,
        groups: str = "quantizer",
        path: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> Sensitivity:
        """What each quantizer costs by itself: the metric with that one on and all others in float.

        Parameters
        ----------
        data : anything that can be read repeatedly
            Handed to `metric`. Without a metric, batches as `calibrate` takes them.
        metric : callable, optional
            ``metric(sim, data) -> float``; the sim is called like the model, in eval mode and without gradients. By default the SQNR in
            dB of what the model returns beside what it returns in float, which needs no targets.
        higher_is_better : bool
            False for a metric that is a loss.
        groups : "quantizer" or "operation"
            One quantizer at a time, or all of an operation: its weight and its output.
        path : path-like, optional
            Keep the scores in this JSON file, and go on from what it holds: after an interruption, call again with the same arguments.
        progress : bool
            Show a progress bar where tqdm is installed.

        Returns
        -------
        Sensitivity
            ``sensitivity.worst(3)`` are names for `Config.override`.

        Raises
        ------
        ValueError
            The file holds scores of another config, other weights or encodings, other groups or another metric.
        NoEncodingError
            Before calibration.
        """
        metric = output_sqnr if metric is None else metric
        with self._calibrated():
            file = ScoreFile(path, measured(self, metric, groups) if path is not None else {})
            return measure(self, data, metric, higher_is_better=higher_is_better, groups=groups, file=file, show=progress)
