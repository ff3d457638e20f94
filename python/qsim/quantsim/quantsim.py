"""`QuantSim`: a model as it will compute once quantized. Its methods lie in classes by topic, one for each module of this package; each
knows `Simulation` alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from qsim.call_fit import tells_arguments
from qsim.config.config import Config
from qsim.quantsim.export import Export
from qsim.quantsim.fallback import SelectiveFallback
from qsim.quantsim.files import Files
from qsim.quantsim.integer import IntegerEvaluation
from qsim.quantsim.ranges import RangeChoice
from qsim.quantsim.reports import Reports
from qsim.quantsim.restoration import Restoration
from qsim.quantsim.training import Training

_ELSEWHERE = (
    "What is quantized, and how, is the config: qsim.int8(target='tensorrt').override(bits=4); the device is the model's: model.to('cuda')"
)


class QuantSim(Reports, RangeChoice, SelectiveFallback, IntegerEvaluation, Restoration, Training, Files, Export):
    """A model as it will compute once quantized. It is called, trained and saved like the model.

    The model is run once to see its operations, whatever Python they come from. BatchNorms are folded into the layers before them,
    or stay and train (`Config.batch_norm`); weights, inputs and the results of operations get quantizers, one at the end of each chain that
    inference engines fuse.

    Attributes
    ----------
    model : nn.Module
        The simulated model, with the original names of modules and parameters.
    config : Config
        What was planned; beside that it has what the model's own ``config`` has, as Hugging Face's models have one.

    What else the model has is reached through the simulation, its methods simulated: ``sim.generate(...)``.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    >>> sim = QuantSim(model, torch.randn(1, 1, 8, 8))
    >>> list(sim.quantizers())
    ['input', '0.weight', '0.output', '4.weight', '4.output']
    >>> report = sim.calibrate([torch.randn(8, 1, 8, 8)], progress=False)
    >>> sim(torch.randn(2, 1, 8, 8)).shape, sim.train().training
    (torch.Size([2, 2]), True)
    >>> with sim.eval().in_float():
    ...     y = sim(torch.randn(2, 1, 8, 8))
    >>> sim.encodings()["0.weight"].scale.shape  # one for each output channel
    torch.Size([4])
    >>> [args[0].shape for args, kwargs in sim.calls]  # the example inputs, where the model lies now
    [torch.Size([1, 1, 8, 8])]
    >>> sim.savings = False  # every step computed anew: the same bits, slower
    """

    @tells_arguments("QuantSim", _ELSEWHERE)
    def __init__(self, model: nn.Module, example_inputs: Any, config: Config | str | None = None, *, inplace: bool = False) -> None:
        """Record `model` on `example_inputs`, fold its BatchNorms, and put quantizers where `config` has them.

        Parameters
        ----------
        model : nn.Module
            Left as it is, unless `inplace`. In training mode its copy is put in eval mode, with a warning if it has BatchNorm.
        example_inputs : Tensor, tuple, dict, or list of these
            One call: an input, positional or keyword arguments; a list: several calls, of which each is recorded. On the model's device.
        config : Config, optional
            What to quantize and how, or the name of a preset ("w4a8"); `qsim.int8` by default.
        inplace : bool
            Simulate on `model` itself instead of a copy.
        """
        super().__init__(model, example_inputs, config, inplace=inplace)
