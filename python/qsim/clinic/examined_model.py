"""A copy of the model, prepared so that a visitor meets every operation of it by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qsim.batch_norm.fold import fold_and_record
from qsim.batch_norm.fold_report import FoldReport
from qsim.clinic.folding import candidates, unmoved
from qsim.graph.execute.attach import attach
from qsim.graph.execute.mode import LocalMode
from qsim.graph.execute.switch import Switch
from qsim.graph.execute.traced import TracedMode
from qsim.graph.plan.actions import QuantizationPlan, Regions
from qsim.graph.record.own_arguments import own_arguments
from qsim.graph.record.record import record
from qsim.graph.record.routes import Site, build_routes
from qsim.graph.record.tape import Tape
from qsim.operations.functions import Function
from qsim.runs.arguments import example_calls
from qsim.runs.batches import Forward, arguments_of, to_device
from qsim.runs.offloaded import own_copy
from qsim.runs.random_numbers import random_numbers_unchanged


class Visitor(Protocol):
    """What is called in place of every function of a model."""

    def operation(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that was recorded; `name` as `QuantSim` has it: "layer1.0.conv1", "layer1.0.add_2". Returns its result."""

    def passed(self, path: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other call in the container at `path`: one that only moves values, or that the recording does not have."""


class _VisitedSwitch(Switch):
    def __init__(self) -> None:
        super().__init__(_VisitedMode, TracedMode)
        self.on = False
        self.visitor: Visitor | None = None


class _VisitedMode(LocalMode):
    """Hands every call to the visitor."""

    skips = False

    @property
    def _visitor(self) -> Visitor:
        visitor: Visitor = self.place.switch.visitor  # type: ignore[attr-defined]
        return visitor

    def met(self, node: int, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._visitor.operation(self.place.sites[node][0], func, args, kwargs)

    def passed(self, name: str, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._visitor.passed(self.place.path, func, args, kwargs)


class ExaminedModel:
    """A model under examination: a copy in eval mode, BatchNorms folded as engines fold them, every operation open to a visitor.

    Attributes
    ----------
    original : nn.Module
        The model as it was given.
    model : nn.Module
        The copy.
    folding : FoldReport
    tape : Tape
    sites : dict of str to Site
        All operations by name, in the order in which they first ran.
    folded : frozenset of str
        Operations on constants alone: their results are constants of the model, made in float32 whatever it runs in.
    notes : list of str
        What the recording could not see.
    """

    def __init__(self, model: nn.Module, example_inputs: Any, *, fold: bool = True) -> None:
        self.original, self.model = model, own_copy(model).eval()
        calls = example_calls(example_inputs)
        self.tape: Tape
        self.folding, (self.tape, self.notes) = (
            fold_and_record(self.model, example_inputs, "doctor", empty=True) if fold else (FoldReport(), record(self.model, calls))
        )
        routes, site_of = build_routes(self.tape, lambda step: not (step.hook or step.moves))
        self.sites: dict[str, Site] = {site.name: site for site in site_of.values() if not site.moves}
        self._examples = tree_map_only(Tensor, lambda _: None, calls)
        self._switch = _VisitedSwitch()
        self.notes += attach(self.model, QuantizationPlan(routes, {}, {}, {}, [], [], Regions()), {}, {}, self._switch)
        self._attributes = [(vars(m), dict(vars(m))) for m in self.model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.folded = unmoved(candidates(self.tape, self.sites), self._run_visited, to_device(calls[0], self.model))

    def run(self, batch: Any, forward: Forward | None = None) -> Any:
        """What the model returns for a batch, as `QuantSim.calibrate` takes batches. It gets a copy, which it may write into."""
        with self._eager():
            return self.call(self.model, own_arguments(self.model, batch)[0], forward)

    def _run_visited(self, visitor: Visitor, arguments: Any) -> None:
        with self.visited(visitor), random_numbers_unchanged(), self._eager():
            args, kwargs = own_arguments(self.model, arguments)[0]
            self.model(*args, **kwargs)

    @contextmanager
    def _eager(self) -> Iterator[None]:
        """Without gradients, compiled parts as the Python they were made from. What a forward assigns to modules, such as tables that the
        first call makes, is undone: each call is to be what was recorded."""
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for attributes, before in self._attributes:
                attributes.clear()
                attributes.update(before)

    def call(self, model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
        """What another model of the same signature returns for a batch."""
        if forward is not None:
            return forward(model, batch)
        args, kwargs = to_device(arguments_of(batch, self._examples), model)
        return model(*args, **kwargs)

    @contextmanager
    def visited(self, visitor: Visitor) -> Iterator[None]:
        """Within the context the visitor is called in place of every function."""
        self._switch.visitor = visitor
        try:
            with self._switch.turned(True):
                yield
        finally:
            self._switch.visitor = None
