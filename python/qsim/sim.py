from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from qsim.batch_norm import fold_batch_norms
from qsim.bias import BiasQuantizer
from qsim.calibration import CalibrationReport, Forward, arguments_of, failure, iterate, observe, report_of, to_device
from qsim.config import Config
from qsim.encoding import Encoding
from qsim.errors import CalibrationError, NoEncodingError
from qsim.graph.execute import Switch, attach, places
from qsim.graph.plan import PlannedQuantizer, plan
from qsim.graph.record import call_arguments, record
from qsim.graph.savings import find_savings
from qsim.observer import with_method
from qsim.presets import int8
from qsim.quantizer import Quantizer
from qsim.summary import Summary, summarize
from qsim.weights import encode_weights

Real = float  # inside QuantSim, `float` is a method


class QuantSim(nn.Module):
    """A model as it will compute once quantized. It is called, trained and saved like the model.

    The model is run once to see its operations, whatever Python they come from. BatchNorms are folded into the layers before them;
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

    def __init__(self, model: nn.Module, example_inputs: Any, config: Config | None = None, *, inplace: bool = False) -> None:
        super().__init__()
        if places(model):
            raise ValueError("QuantSim: the model is simulated already; give the original one")
        self.config = int8() if config is None else config
        self.model = model if inplace else copy.deepcopy(model)
        if any(module.training for module in self.model.modules()):
            _warn_of_training(self.model)
            self.model.eval()
        args, kwargs = call_arguments(example_inputs)
        folding = fold_batch_norms(self.model, example_inputs)
        tape, notes = record(self.model, args, kwargs)
        decided = plan(tape, self.config)
        self._example = tree_map_only(Tensor, lambda _: None, (args, kwargs))
        self._planned, self._biases, self._left = decided.quantizers, decided.biases, decided.left
        self._switch = Switch()
        self.quantization = QuantizerBank(self.model, self._planned)
        notes += attach(self.model, decided, find_savings(tape, decided), self.quantization.by_key(), self._switch)
        kept = [f"BatchNorm '{name}' is not folded: {reason}" for name, reason in folding.kept.items()]
        self._notes = list(dict.fromkeys([*kept, *folding.warnings, *decided.notes, *notes]))
        self.eval()  # as the model is

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, simulated. Raises NoEncodingError before calibration."""
        try:
            return self.model(*args, **kwargs)
        except NoEncodingError as error:
            missing = [key for key, quantizer in self.quantizers().items() if quantizer.enabled and quantizer.encoding is None]
            shown = ", ".join(f"'{key}'" for key in missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise NoEncodingError(
                f"QuantSim: {len(missing)} of {len(self.quantizers())} quantizers have no encoding ({shown}). Call sim.calibrate(data), "
                "load a calibrated state dict, or run the model unquantized: with sim.float()."
            ) from error

    # Ranges.

    def calibrate(
        self, data: Iterable[Any], forward: Forward | None = None, *, max_batches: int | None = None, progress: bool = True
    ) -> CalibrationReport:
        """Observe data and choose all encodings. Repeated calls add up.

        The model computes in float, in eval mode and without gradients; its parameters, buffers (BatchNorm statistics among them),
        training flags and the random number generators are afterwards as they were. NaN and Inf never reach a range: they are
        counted and reported.

        Parameters
        ----------
        data : iterable of batches
            Tensor, tuple, list or dict each. A batch fills as many arguments as `example_inputs` had; what is left (targets) is ignored.
        forward : callable, optional
            ``forward(model, batch)`` for batches that need more than that.
        max_batches : int, optional
            Stop after so many.
        progress : bool
            Show a progress bar where tqdm is installed.

        Returns
        -------
        CalibrationReport

        Raises
        ------
        CalibrationError
            There was no batch, or quantizers have no range: the message lists them, and why. What was observed is kept.
        """
        quantizers = self.quantizers()
        watched = [key for key, planned in self._planned.items() if planned.parameter is None]
        run = self._forward_batch if forward is None else forward
        with self._switch.turned(True):
            noted = observe(self.model, quantizers, watched, iterate(data, max_batches, progress), lambda batch: run(self.model, batch))
        if noted.batches == 0:
            raise CalibrationError("QuantSim: calibrate got no batch. Is the iterator used up, or the data set empty?")
        started = time.perf_counter()
        problems = self._choose_encodings()
        noted.seconds["encodings"] = time.perf_counter() - started
        return report_of(noted, quantizers, problems)

    def _forward_batch(self, model: nn.Module, batch: Any) -> Any:
        args, kwargs = to_device(arguments_of(batch, self._example), model)
        return model(*args, **kwargs)

    def set_method(self, method: str, *, percentile: Real | None = None, gamma: Real | None = None) -> None:
        """Choose all encodings anew with another method, from what was observed and from the weights. No data needed.

        Parameters
        ----------
        method : str
            "minmax", "percentile", "mse", "tf_enhanced" or "entropy". Weights that the model computes from parameters keep their
            observed minimum and maximum per channel, and running ranges (``method="ema"`` in the config) stay running.
        percentile, gamma : float, optional
            As in `TensorSpec`.

        Raises
        ------
        CalibrationError
            As `calibrate`: nothing was observed yet, or nothing finite.
        """
        self._choose_encodings(method, percentile=percentile, gamma=gamma)

    def _choose_encodings(self, method: str | None = None, *, percentile: Real | None = None, gamma: Real | None = None) -> list[str]:
        """Give every quantizer its encoding. Returns a sentence for each that had to be changed afterwards."""
        quantizers = self.quantizers()
        problems: dict[str, CalibrationError] = {}
        parameters = {key: planned.parameter for key, planned in self._planned.items() if planned.parameter is not None}
        weights = [attrgetter(parameter)(self.model) for parameter in parameters.values()]
        given = [quantizers[key].spec for key in parameters]
        specs = [with_method(s, None if s.is_running else method, percentile=percentile, gamma=gamma) for s in given]
        for key, found in zip(parameters, encode_weights([quantizers[key] for key in parameters], weights, specs), strict=True):
            if isinstance(found, CalibrationError):
                problems[key] = found
        for key, quantizer in quantizers.items():
            if key in parameters:
                continue
            spec = quantizer.spec
            chosen = None if spec.is_running or spec.axis is not None else method
            try:
                quantizer.compute_encoding(chosen, percentile=percentile, gamma=gamma)
            except CalibrationError as error:
                problems[key] = error
        unmet = [str(problems[key]) for key, quantizer in quantizers.items() if key in problems and quantizer.enabled]
        if unmet:
            raise failure(unmet)
        raised = {
            b: BiasQuantizer(quantizers[b.input], quantizers[b.weight]).fit(attrgetter(b.parameter)(self.model)) for b in self._biases
        }
        return [f"'{b.weight}': {n} scales raised so that the bias '{b.parameter}' fits into int32" for b, n in raised.items() if n]

    def quantizers(self) -> dict[str, Quantizer]:
        """All quantizers, in the order in which the model meets them.

        Keys: ``layer1.0.conv1.weight``; ``layer1.0.conv1.output``, also where the activation behind it is what is quantized;
        ``layer1.0.add.output`` for an operation that is no module; ``input``, or ``input[0]`` ... and keywords where there are several.
        """
        return self.quantization.by_key()

    def encodings(self) -> dict[str, Encoding]:
        """The encodings in use: of every enabled quantizer that has one."""
        found = {key: quantizer.encoding for key, quantizer in self.quantizers().items() if quantizer.enabled}
        return {key: encoding for key, encoding in found.items() if encoding is not None}

    # Switches.

    def enable(self, *patterns: str) -> None:
        """Quantize with the quantizers that match any glob: a key (``*.weight``) or what comes before its last dot (``layer1.*``).

        A pattern that matches nothing is an error.
        """
        for quantizer in self._matching(patterns):
            quantizer.enabled = True

    def disable(self, *patterns: str) -> None:
        """Leave in float what the quantizers that match quantize, until `enable`. Patterns as there."""
        for quantizer in self._matching(patterns):
            quantizer.enabled = False

    def _matching(self, patterns: tuple[str, ...]) -> list[Quantizer]:
        found = {}
        quantizers = self.quantizers()
        for pattern in patterns:
            keys = [key for key in quantizers if key == pattern or any(fnmatchcase(n, pattern) for n in (key, key.rpartition(".")[0]))]
            if not keys:
                close = ", ".join(map(repr, get_close_matches(pattern, quantizers, cutoff=0.4))) or "see sim.quantizers()"
                raise ValueError(f"QuantSim: no quantizer matches {pattern!r}; close to it: {close}")
            found.update({key: quantizers[key] for key in keys})
        return list(found.values())

    def summary(self) -> Summary:
        """What is quantized and how, what stays in float, and why. ``print(sim.summary())``."""
        notes = [
            f"{', '.join(place.unexpected())} in '{place.path}' ran where the example inputs did not show it: in float"
            for place in places(self.model)
            if place.unexpected()
        ]
        return summarize(self._planned, self._biases, self.quantizers(), self._left, [*self._notes, *notes])

    def float(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """``with sim.float():`` runs the model without any simulation, bit for bit as it computes in float; in all threads."""
        return self._switch.turned(False)

    @property
    def savings(self) -> bool:
        """Whether work is saved that changes no bit of a result, in all threads; True from the start. Set it to False to see for yourself.

        Quantized parameters are kept while no gradient is needed, outputs are quantized in the memory that they were computed in, and
        a ReLU is left to the quantizer behind it (docs/architecture.md). Kept parameters notice every change that PyTorch counts, and are
        forgotten in `train` and `eval`; what is written through ``parameter.data`` or NumPy in between is not noticed.
        """
        return self._switch.saves

    @savings.setter
    def savings(self, on: bool) -> None:
        self._switch.saves = on


def _warn_of_training(model: nn.Module) -> None:
    names = [name or "the model itself" for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        warnings.warn(
            f"QuantSim: the model was in training mode; it is simulated in eval mode, with the running statistics of BatchNorm ({shown}). "
            "Call sim.train() to train.",
            stacklevel=3,
        )


class QuantizerBank(nn.Module):
    """All quantizers of a simulation, flat: containers refer to them without owning them."""

    def __init__(self, model: nn.Module, planned: Mapping[str, PlannedQuantizer]) -> None:
        super().__init__()
        self._keys = list(planned)
        first: Tensor | None = next(chain(model.parameters(), model.buffers()), None)
        for key, decided in planned.items():
            parameter: Tensor | None = attrgetter(decided.parameter)(model) if decided.parameter else None
            quantizer = Quantizer(decided.spec, None if parameter is None else parameter.shape, key)
            beside = first if parameter is None else parameter
            # nn.Module allows no dots in names; "/" keeps them readable in state dicts
            self._modules[key.replace(".", "/")] = quantizer if beside is None else quantizer.to(beside.device)

    def by_key(self) -> dict[str, Quantizer]:
        return dict(zip(self._keys, self._modules.values(), strict=True))  # type: ignore[arg-type]
