"""What `qsim.QuantSim` is made of: a model that was recorded, planned and attached to its quantizers, and its switches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qsim.batch_norm.fold import fold_and_record
from qsim.batch_norm.fold_report import FoldReport
from qsim.batch_norm.frozen import as_batch_norms
from qsim.batch_norm.recorded import Recording
from qsim.batch_norm.statistics import batch_norms, freeze
from qsim.config.config import Config
from qsim.config.named import config_of
from qsim.errors import NoEncodingError
from qsim.graph.execute.attach import attach, detach, fall_back, places
from qsim.graph.execute.liveness import is_entered
from qsim.graph.execute.methods import caller
from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.other_exporters import refuse_exporter
from qsim.graph.execute.switch import Switch
from qsim.graph.execute.traced import TracedMode
from qsim.graph.plan.actions import Decisions
from qsim.graph.plan.plan import plan
from qsim.graph.plan.savings import find_savings
from qsim.graph.record.containers import settle_forwards
from qsim.numbers.encoding import Encoding
from qsim.options import check_flag, check_function
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.arguments import Arguments, example_calls, refuse_numbers
from qsim.runs.batches import Forward
from qsim.runs.copies import Derived
from qsim.runs.example_calls import ExampleCalls
from qsim.runs.offloaded import own_copy, settle_offloaded
from qsim.runs.report_subject import subject_of
from qsim.runs.runnable import check_module
from qsim.runs.sharding import refuse_wrapped, sharded_modules
from qsim.runs.unfit import unfit_told
from qsim.simulation import warned_of
from qsim.simulation.as_the_model import AsTheModel
from qsim.simulation.bank import ByKey, QuantizerBank
from qsim.simulation.eval_mode import EvalMode
from qsim.simulation.folded_hooks import FoldedHooks
from qsim.simulation.restored_weights import RestoredWeights
from qsim.simulation.state_names import NamedAsTheModel
from qsim.simulation.summarize import summarize
from qsim.simulation.summary import Summary
from qsim.simulation.synchronize import rank_local
from qsim.warning import warn

if TYPE_CHECKING:
    from typing_extensions import Self


Evaluator = Callable[["Simulation", tuple[Any, ...], dict[str, Any]], Any]


class Simulation(NamedAsTheModel, AsTheModel, RestoredWeights):
    """Base of `qsim.QuantSim`, which documents it: construction, calls and switches.

    What other packages may use of it, besides its methods; none of it is theirs to change.

    Attributes
    ----------
    model : nn.Module
    config : Config
    quantization : QuantizerBank
    decisions : Decisions
        What was planned: quantizers, biases, operations, what stays in float.
    switch : Switch
        What all containers of the model share: whether they simulate.
    examples : list of Arguments
        The example calls with None in place of tensors.
    folds : tuple of (Fold, BatchNorm)
        The BatchNorms that were folded, for state dicts of the float model.
    frozen : set of str
        The BatchNorms that stay in eval mode.
    followed : dict of str to str
        The float formats that the containers follow, by operation.
    derived : dict
        What others made of this simulation and keep: emptied when it changes, and on copies.
    evaluator : callable, optional
        ``evaluator(sim, args, kwargs)`` computes calls in place of the model.
    read : frozenset of str or None
        Keys of the weights that a batch of a calibration read; None before the first.
    """

    quantization: QuantizerBank
    decisions: Decisions
    switch: Switch
    _calls: ExampleCalls
    examples: list[Arguments]
    frozen: set[str]
    followed: dict[str, str]
    derived: Derived
    notes: list[str]
    evaluator: Evaluator | None = None
    read: frozenset[str] | None = None

    def __init__(self, model: nn.Module, example_inputs: Any, config: Config | str | None = None, *, inplace: bool = False) -> None:
        """What `QuantSim` takes."""
        super().__init__()
        check_module(model, "QuantSim")
        check_flag("QuantSim", "inplace", inplace)
        if places(model):
            raise ValueError("QuantSim: the model is simulated already; give the original one")
        refuse_wrapped(model)
        vars(self)["config"] = config_of(config, "QuantSim")
        self.model = settle_offloaded(model) if inplace else own_copy(model)
        settle_forwards(detach(self.model))
        if any(module.training for module in self.model.modules()):
            warned_of.training(self.model)
            self.model.eval()
        as_batch_norms(self.model, lambda path: self.config.batch_norm_policy(path) == "fold")
        policies = {name: self.config.batch_norm_policy(name) for name in batch_norms(self.model)}
        warned_of.idle_policies(self.config.batch_norm, policies)
        kept = [name for name, policy in policies.items() if policy != "fold"]
        alone = set(policies).difference(kept) if self.config.has_lone_norms else set()
        folding, recording = fold_and_record(self.model, example_inputs, "QuantSim", kept, alone=alone)
        self.switch = Switch(LocalMode, TracedMode)
        self.frozen = {name for name, policy in policies.items() if policy == "freeze"}
        self.folds = folding.folds
        unfolded = {name: reason for name, reason in folding.kept.items() if policies.get(name, "fold") == "fold"}
        self.simulate(example_calls(example_inputs), recording, dataclasses.replace(folding, kept=unfolded), {})
        warned_of.made(self.model, self.notes, self.decisions, self.weights().values())
        self.eval()  # as the model is
        self.show_signature()
        self.register_load_state_dict_post_hook(_follow_state)  # type: ignore[no-untyped-call]

    def simulate(self, examples: Sequence[Arguments], recording: Recording, folding: FoldReport, known: Mapping[str, Quantizer]) -> None:
        """Plan, attach. `recording` is the model's as it is; `known` are quantizers to go on with."""
        self.derived, self.followed, self.eval_mode, self.folded_hooks = Derived(), {}, EvalMode(), FoldedHooks(self.model, self.folds)
        tape, notes = recording
        decided = plan(tape, self.config)
        if decided.mistyped and not known:
            raise ValueError(f"QuantSim: {'; '.join(decided.mistyped)}")
        self.decisions = decided.decisions
        warned_of.unseen_weights(decided.unseen)
        self.switch.note(tape)
        formats, restored = (self.quantization.formats, self.quantization.restored) if known else ({}, {})
        self.quantization = QuantizerBank(self.model, self.decisions, known)
        self.quantization.restored = restored
        # its broadcast of buffers before every forward would cost a sketch per activation, and overwrite what ranks observed
        self._ddp_params_and_buffers_to_ignore = [f"quantization.{name}" for name in rank_local(dict(self.quantization.items()))]
        notes = notes + attach(self.model, decided, find_savings(decided), self.quantization.by_key(), self.switch, self.folded_hooks.pairs)
        self.fall_back({name: format for name, format in formats.items() if name in self.decisions.operations})
        kept = [f"BatchNorm '{name}' is not folded: {reason}" for name, reason in folding.kept.items()]
        self.notes = list(dict.fromkeys([*kept, *folding.warnings, *decided.notes, *notes]))
        self._calls = ExampleCalls(examples, self.model)
        self.examples = tree_map_only(Tensor, lambda _: None, list(examples))

    @property
    def calls(self) -> list[Arguments]:
        """The example calls, each as positional and keyword arguments, where the model lies now and in the type that it computes in."""
        return self._calls.beside(self.model)

    def fall_back(self, formats: Mapping[str, str]) -> None:
        """From now on these operations, by name, compute in these float formats, all others as planned."""
        self.quantization.formats = formats
        self.derived.clear()
        if formats != self.followed:  # what was compiled for the same formats stays good
            fall_back(self.model, formats, self.quantizers())
            self.switch.released, self.followed = self.released(), dict(formats)

    def needed(self) -> set[str]:
        """The quantizers that quantize at some place: all but those that only operations which fall back have a use for."""
        return self.decisions.needed(self.quantization.formats)

    def released(self) -> dict[str, str]:
        """All other quantizers, with the format that they round to instead: "float32" where that is left to the readers."""
        return self.decisions.released(self.quantization.formats)

    def missing(self) -> list[str]:
        """The quantizers without an encoding that quantize. What only empty tensors reached needs none until values come."""
        return [key for key in self._lacking() if not self.is_idle(key)]

    def is_idle(self, key: str) -> bool:
        """Whether empty tensors alone reached a quantizer, in the examples and in calibration.

        >>> qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3)).is_idle("input")
        False
        """
        q = self.quantizers()[key]
        return key in self.decisions.empty and q.observer.met_empty and q.lacks_encoding and q.counts.elements == 0

    def _lacking(self) -> list[str]:
        needed = self.needed()
        return [key for key, q in self.quantizers().items() if q.enabled and q.lacks_encoding and key in needed]

    def unread(self) -> list[str]:
        """The weights that no batch of a calibration read: what is computed with them has not been seen. Empty before the first."""
        if self.read is None:
            return []
        known, quantizers = self.read | self.released().keys(), self.quantizers()
        return [key for key in self.decisions.awaited_weights if quantizers[key].enabled and key not in known]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, simulated. Raises NoEncodingError before calibration."""
        refuse_exporter(self.switch.on)
        self.eval_mode.look(self)
        self.folded_hooks.look()
        if self.evaluator is not None and self.switch.on:
            return self.evaluator(self, args, kwargs)
        try:
            return caller(self._modules["model"])(*args, **kwargs)  # Dynamo knows no __getattr__ but nn.Module's
        except (TypeError, ValueError):  # as plain models raise it
            refuse_numbers([*args, *kwargs.values()], "QuantSim", "an input")
            self.weights()  # an error where the model was changed
            raise
        except NoEncodingError as error:
            raise self.no_encoding() from error

    def model_method(self, method: types.MethodType) -> Any:
        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.evaluator is not None and self.switch.on:
                raise RuntimeError(
                    f"QuantSim: within sim.integer() only sim(...) itself is computed as the runtime does; sim.{method.__name__}() is a "
                    "method of the model, and would run the simulation in float. Call it outside"
                )
            try:
                return method(*args, **kwargs)
            except NoEncodingError as error:
                raise self.no_encoding() from error

        return called

    def no_encoding(self) -> NoEncodingError:
        missing = self._lacking()
        shown = ", ".join(f"'{key}'" for key in missing[:3]) + (", ..." if len(missing) > 3 else "")
        return NoEncodingError(
            f"QuantSim: {len(missing)} of {len(self.quantizers())} quantizers have no encoding ({shown}). Call sim.calibrate(data), "
            "load a calibrated state dict, or run the model unquantized: with sim.in_float()."
        )

    def check_calibrated(self) -> None:
        """NoEncodingError where an enabled quantizer has no encoding.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.randn(1, 3))
        >>> sim.calibrate([torch.randn(8, 3)], progress=False).problems
        []
        >>> sim.check_calibrated()
        """
        self.weights()
        if self.missing():
            raise self.no_encoding()

    @contextlib.contextmanager
    def calibrated(self) -> Iterator[None]:
        """Simulation on; NoEncodingError if it cannot be."""
        self.check_calibrated()
        with self.switch.turned(True):
            yield

    def called(self) -> nn.Module:
        """What runs on a batch: FSDP gathers parameters when its root is called."""
        return self if sharded_modules(self) else self.model

    def forward_batch(self, model: nn.Module, batch: Any) -> Any:
        args, kwargs = self.switch.arguments(model, batch, self.examples)
        with unfit_told((args, kwargs), lambda: self.calls, self.model):
            return model(*args, **kwargs)

    def runner(self, forward: Forward | None) -> Callable[[Any], Any]:
        """What runs this simulation on a batch: `forward_batch`, or `forward` on what `called` says; on the sim while another evaluates."""
        if forward is None:
            return lambda batch: self.forward_batch(self, batch)
        check_function("QuantSim", "forward", forward, "forward(model, batch)")
        return lambda batch: forward(self.called() if self.evaluator is None else self, self.switch.own(self.model, batch))

    def quantizers(self) -> dict[str, Quantizer]:
        """All quantizers, in the order in which the model meets them.

        Keys: ``layer1.0.conv1.weight``; ``layer1.0.conv1.output``, also where the activation behind it is what is quantized;
        ``layer1.0.add.output`` for an operation that is no module; ``input``, or ``input[0]`` ... and keywords where there are several.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
        >>> list(sim.quantizers())
        ['input', 'weight', 'linear.output']
        """
        return self.quantization.by_key()

    def encodings(self) -> dict[str, Encoding]:
        """The encodings in use: of every enabled quantizer that has one."""
        return ByKey({key: found for key, q in self.quantizers().items() if q.enabled and (found := q.encoding) is not None})

    def summary(self) -> Summary:
        """What is quantized and how, what stays in float, and why. ``print(sim.summary())``.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
        >>> [row.key for row in sim.summary().rows]
        ['input', 'weight', 'linear.output', 'bias']
        """
        self.weights()
        fallen = Counter(self.quantization.formats.values())
        notes = [*self.notes, *self.switch.noticed, *(f"{count} operations fall back to {format}" for format, count in fallen.items())]
        return summarize(self.model, self.decisions, self.quantizers(), self.released(), notes, subject_of(self.model, self.config))

    def unrecorded(self) -> dict[str, list[str]]:
        """Functions that ran where the examples did not show them, by the path of the container that called them."""
        found: dict[str, list[str]] = {}
        for path, function in self.switch.noticed.values():
            if function:
                found.setdefault(path, []).append(function)
        return found

    def weights(self) -> dict[str, Tensor]:
        """The parameters that have a quantizer, by its key."""
        return self.quantization.weights(self.model)

    def train(self, mode: bool = True) -> Self:
        """As of every module; frozen BatchNorms stay in eval mode."""
        super().train(mode)
        self.eval_mode.begin()
        if mode:
            warned_of.zero_weights(self.model, self.decisions.quantizers, self.quantizers())
        freeze({name: self.model.get_submodule(name) for name in self.frozen})
        return self

    def enable(self, *patterns: str) -> None:
        """Quantize with the quantizers that match any glob: a key (``*.weight``) or what comes before its last dot (``layer1.*``).

        A pattern that matches nothing is an error.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
        >>> sim.disable("*")
        >>> sim.enable("weight")
        >>> [key for key, quantizer in sim.quantizers().items() if quantizer.enabled]
        ['weight']
        """
        for quantizer in self.quantization.matching(patterns):
            quantizer.enabled = True

    def disable(self, *patterns: str) -> None:
        """Leave in float what the quantizers that match quantize, until `enable`. Patterns as there."""
        for quantizer in self.quantization.matching(patterns):
            quantizer.enabled = False

    def in_float(self) -> contextlib.AbstractContextManager[None]:
        """``with sim.in_float():`` runs the model without any simulation, bit for bit as in float; the calls of all other threads too."""
        self.tell_of_restored()
        return self.switch.turned(False)

    def float(self) -> Self:
        """Cast to float32, as of every module.

        ``with sim.float():`` is the old name of `in_float`, and goes with the next release.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2).double(), torch.zeros(1, 3).double())
        >>> sim.float().model.weight.dtype
        torch.float32
        """
        if is_entered(sys._getframe(1)):
            warn("QuantSim: `with sim.float():` is now `with sim.in_float():`; sim.float() casts", DeprecationWarning)
            return self.in_float()  # type: ignore[return-value]
        return super().float()

    @property
    def savings(self) -> bool:
        """Whether work is saved that changes no bit of a result, in all threads; True from the start. Set it to False to see for yourself.

        Quantized parameters are kept while no gradient is needed, outputs are quantized in the memory that they were computed in, and
        a ReLU is left to the quantizer behind it (docs/architecture.md). Kept parameters notice every change, also what is written
        through ``parameter.data``, NumPy or shared memory, and are forgotten in `train` and `eval`.
        """
        return self.switch.saves

    @savings.setter
    def savings(self, on: bool) -> None:
        self.switch.saves = on


def _follow_state(sim: Simulation, _: object) -> None:
    sim.eval_mode.begin()  # a state that was loaded is no training
    sim.fall_back(sim.quantization.formats)
