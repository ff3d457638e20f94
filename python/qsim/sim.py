from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from operator import attrgetter
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from qsim.batch_norm import FoldReport, fold_batch_norms
from qsim.bias import BiasQuantizer
from qsim.calibration import CalibrationReport, Forward, arguments_of, failure, iterate, observe, report_of, to_device
from qsim.comparison import Comparison, compare
from qsim.config import Config
from qsim.distributed import merge, rank_local
from qsim.encoding import Encoding
from qsim.errors import CalibrationError, NoEncodingError
from qsim.graph.batch_norm import Fold
from qsim.graph.execute import Switch, attach, detach, places
from qsim.graph.plan import PlannedBias, PlannedQuantizer, plan
from qsim.graph.record import call_arguments, record
from qsim.graph.savings import find_savings
from qsim.memory import MemoryWatch
from qsim.observer import encoding_of_range, with_method
from qsim.param_groups import param_groups
from qsim.presets import int8
from qsim.quantizer import Quantizer
from qsim.running_statistics import batch_norms, degenerate, reestimate
from qsim.schedule import Schedule
from qsim.scores import ScoreFile
from qsim.sensitivity import Metric, Sensitivity, measure, measured, output_sqnr
from qsim.sharding import refuse_wrapped, sharded_around, sharded_modules, whole
from qsim.state_names import NamedAsTheModel
from qsim.summary import Summary, summarize
from qsim.trained_fold import fold_trained
from qsim.watch import Watch
from qsim.weights import encode_weights

Real = float  # inside QuantSim, `float` is a method


class QuantSim(NamedAsTheModel):
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

    quantization: QuantizerBank

    def __init__(self, model: nn.Module, example_inputs: Any, config: Config | None = None, *, inplace: bool = False) -> None:
        super().__init__()
        if places(model):
            raise ValueError("QuantSim: the model is simulated already; give the original one")
        refuse_wrapped(model)
        self.config = int8() if config is None else config
        self.model = model if inplace else copy.deepcopy(model)
        if any(module.training for module in self.model.modules()):
            _warn_of_training(self.model)
            self.model.eval()
        policies = {name: self.config.batch_norm_policy(name) for name in batch_norms(self.model)}
        kept = [name for name, policy in policies.items() if policy != "fold"]
        folding = fold_batch_norms(self.model, example_inputs, keep=kept)
        self._switch = Switch()
        self._frozen: set[str] = set()
        self._folds = folding.folds
        unfolded = {name: reason for name, reason in folding.kept.items() if policies.get(name, "fold") == "fold"}
        self._simulate(*call_arguments(example_inputs), dataclasses.replace(folding, kept=unfolded), {})
        self.freeze_batch_norms(*(name for name, policy in policies.items() if policy == "freeze"))
        if useless := degenerate(self.model):
            remedy = "Load other statistics, or call sim.reestimate_batch_norms(data)"
            warnings.warn(f"QuantSim: {'; '.join(useless.values())}. {remedy}", stacklevel=2)
        self.eval()  # as the model is

    def _simulate(self, args: tuple[Any, ...], kwargs: dict[str, Any], folding: FoldReport, known: Mapping[str, Quantizer]) -> None:
        """Record, plan, attach. `known` are quantizers to go on with."""
        tape, notes = record(self.model, args, kwargs)
        decided = plan(tape, self.config)
        self._planned, self._biases, self._left = decided.quantizers, decided.biases, decided.left
        self.quantization = QuantizerBank(self.model, self._planned, known)
        # its broadcast of buffers before every forward would cost a sketch per activation, and overwrite what ranks observed
        self._ddp_params_and_buffers_to_ignore = [f"quantization.{name}" for name in rank_local(dict(self.quantization.items()))]
        notes += attach(self.model, decided, find_savings(tape, decided), self.quantization.by_key(), self._switch)
        kept = [f"BatchNorm '{name}' is not folded: {reason}" for name, reason in folding.kept.items()]
        self._notes = list(dict.fromkeys([*kept, *folding.warnings, *decided.notes, *notes]))
        # What is left may be folded later, which takes another look at the model.
        self._inputs = (args, kwargs) if batch_norms(self.model) else None
        self._example = tree_map_only(Tensor, lambda _: None, (args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, simulated. Raises NoEncodingError before calibration."""
        try:
            return self.model(*args, **kwargs)
        except NoEncodingError as error:
            raise self._no_encoding() from error

    def _no_encoding(self) -> NoEncodingError:
        missing = [key for key, quantizer in self.quantizers().items() if quantizer.enabled and quantizer.encoding is None]
        shown = ", ".join(f"'{key}'" for key in missing[:3]) + (", ..." if len(missing) > 3 else "")
        return NoEncodingError(
            f"QuantSim: {len(missing)} of {len(self.quantizers())} quantizers have no encoding ({shown}). Call sim.calibrate(data), "
            "load a calibrated state dict, or run the model unquantized: with sim.float()."
        )

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
            ``forward(model, batch)`` for batches that need more than that. `model` is `self.model`, and the simulation itself where
            FSDP shards it.
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
        memory = MemoryWatch(quantizer.scale.device for quantizer in quantizers.values())
        watched = [key for key, planned in self._planned.items() if planned.parameter is None]
        run = self._forward_batch if forward is None else forward
        called = self._called()
        with self._switch.turned(True), sharded_around(self):
            noted = observe(self.model, quantizers, watched, iterate(data, max_batches, progress), lambda batch: run(called, batch))
        if noted.batches == 0:
            raise CalibrationError("QuantSim: calibrate got no batch. Is the iterator used up, or the data set empty?")
        started = time.perf_counter()
        problems = self._choose_encodings()
        noted.seconds["search"] = time.perf_counter() - started
        return report_of(noted, quantizers, problems, memory.peaks(), self.summary)

    def _called(self) -> nn.Module:
        """What runs on a batch: FSDP gathers parameters when its root is called."""
        return self if sharded_modules(self) else self.model

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

    def synchronize(self, group: dist.ProcessGroup | None = None) -> None:
        """Merge what the ranks of `torch.distributed` observed, and choose all encodings from that. To be called on every rank.

        After each rank has called `calibrate` on its share of the data, counts, ranges, sketches and encodings are on all ranks those
        of one process that saw everything, bit for bit. A running range (``method="ema"``) depends on the order of batches; it becomes
        the mean of the ranges of those ranks that have one: the running range of the mean batch, if all saw equally many. Repeated
        calls count no value twice; a state dict that was loaded counts as observed by the rank that loaded it.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            The default group if None. Its backend has to serve the device of the quantizers.

        Raises
        ------
        RuntimeError
            There is no process group, or this rank is not in it.
        ValueError
            The simulations differ: the message names a rank and a quantizer.
        CalibrationError
            As `calibrate`: no rank has a range for some quantizers. On a single rank calibrate may raise that for what its share does
            not reach; what was observed is kept, so catch it there and synchronize.
        """
        merge(self.quantizers(), self._weights(), group)
        self._choose_encodings()

    def _weights(self) -> dict[str, Tensor]:
        """The parameters that have a quantizer, by its key."""
        return {key: attrgetter(p.parameter)(self.model) for key, p in self._planned.items() if p.parameter is not None}

    def _choose_encodings(self, method: str | None = None, *, percentile: Real | None = None, gamma: Real | None = None) -> list[str]:
        """Give every quantizer its encoding. Returns a sentence for each that had to be changed afterwards."""
        quantizers = self.quantizers()
        problems: dict[str, CalibrationError] = {}
        parameters = {key: whole(weight) for key, weight in self._weights().items()}
        of_weights = [quantizers[key] for key in parameters]
        specs = [with_method(s, None if s.is_running else method, percentile=percentile, gamma=gamma) for s in (q.spec for q in of_weights)]
        for key, found in zip(parameters, encode_weights(of_weights, list(parameters.values()), specs), strict=True):
            if isinstance(found, CalibrationError):
                problems[key] = found
        for key, quantizer in quantizers.items():
            if key in parameters or self._planned[key].range is not None:
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
        return self._fit_biases(self._biases)

    def _fit_biases(self, biases: Iterable[PlannedBias]) -> list[str]:
        """Raise weight scales where a bias would not fit into int32. Returns a sentence for each weight."""
        quantizers = self.quantizers()
        raised = {
            b: BiasQuantizer(quantizers[b.input], quantizers[b.weight]).fit(whole(attrgetter(b.parameter)(self.model))) for b in biases
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

    # BatchNorm.

    def reestimate_batch_norms(
        self, data: Iterable[Any], forward: Forward | None = None, *, max_batches: int | None = None, progress: bool = True
    ) -> dict[str, int]:
        """Set the running statistics of all BatchNorms to what the simulated model gives them: the average over batches.

        Weights and activations are quantized as the switches say (``with sim.float():`` for none). A batch with NaN or Inf where a
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
            return reestimate(self.model, iterate(data, max_batches, progress), lambda batch: run(called, batch))

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
        if self._inputs is None:
            return FoldReport()
        if sharded_modules(self):
            raise ValueError(
                "QuantSim.fold_batch_norms: fully_shard holds the weights; load the state into one that is not sharded"
            )
        args, kwargs = to_device(self._inputs, self.model)
        quantizers = self.quantizers()
        of_parameter = {planned.parameter: quantizers[key] for key, planned in self._planned.items()}
        detach(self.model)
        norms = batch_norms(self.model)
        report = fold_trained(self.model, args, kwargs, of_parameter)
        self._folds += tuple((Fold(path, layer, before=False), norms[path]) for path, layer in report.folded.items())
        self._simulate(args, kwargs, report, quantizers)
        self._frozen &= set(batch_norms(self.model))
        raised = self._fit_biases([bias for bias in self._biases if bias.parameter.rpartition(".")[0] in report.folded.values()])
        return dataclasses.replace(report, warnings=(*report.warnings, *raised))

    # Training.

    def param_groups(
        self, lr: Real | None = None, *, scale_lr: Real | None = None, weight_decay: Real | None = None, bias_decay: Real | None = None
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
        >>> sim = QuantSim(nn.Linear(3, 2), torch.zeros(1, 3))
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

    # Switches.

    def train(self, mode: bool = True) -> QuantSim:
        """As of every module; frozen BatchNorms stay in eval mode."""
        super().train(mode)
        for name in self._frozen:
            self.model.get_submodule(name).eval()
        return self

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
        return summarize(self.model, self._planned, self._biases, self.quantizers(), self._left, [*self._notes, *notes])

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

    @contextlib.contextmanager
    def _calibrated(self) -> Iterator[None]:
        """Simulation on; NoEncodingError if it cannot be."""
        if any(quantizer.enabled and quantizer.encoding is None for quantizer in self.quantizers().values()):
            raise self._no_encoding()
        with self._switch.turned(True):
            yield

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

    def __init__(self, model: nn.Module, planned: Mapping[str, PlannedQuantizer], known: Mapping[str, Quantizer]) -> None:
        super().__init__()
        self._keys = list(planned)
        first: Tensor | None = next(chain(model.parameters(), model.buffers()), None)
        for key, decided in planned.items():
            parameter: Tensor | None = attrgetter(decided.parameter)(model) if decided.parameter else None
            quantizer = known.get(key) or Quantizer(decided.spec, None if parameter is None else parameter.shape, key)
            beside = first if parameter is None else parameter
            if decided.range is not None:
                low, high = map(torch.tensor, decided.range)
                quantizer.set_encoding(encoding_of_range(low, high, decided.spec))
            # nn.Module allows no dots in names; "/" keeps them readable in state dicts
            self._modules[key.replace(".", "/")] = quantizer if beside is None else quantizer.to(beside.device)

    def items(self) -> Iterable[tuple[str, Quantizer]]:
        """The quantizers by their names as modules."""
        return self._modules.items()  # type: ignore[return-value]

    def by_key(self) -> dict[str, Quantizer]:
        return dict(zip(self._keys, self._modules.values(), strict=True))  # type: ignore[arg-type]
