"""Runs a program on the hand-written simulation, statement by statement, with the parameters of a real model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dataflow import Kind, Name, NotUnderstood
from .interfaces import INTERFACES
from .ir import (
    Apply,
    Block,
    Branch,
    Container,
    Helper,
    Hold,
    Invoke,
    Leave,
    Program,
    Remember,
    Repeat,
    Run,
    Statement,
    Take,
    Test,
    statements_in,
)
from .layers import run_layer
from .machine import Machine
from .operations import QUESTIONS, TABLE

_LOSS = Kind("loss", "loss")


class _Left(Exception):
    """``return`` in the middle of a forward."""

    def __init__(self, result: str) -> None:
        self.result = result


class _Scope:
    """One call of a function: its variables, what it held, its module and its flags."""

    def __init__(self, module: nn.Module | None, flags: Mapping[str, Any], helpers: Mapping[str, Helper]) -> None:
        self.names: dict[str, Name] = {}
        self.held: dict[str, Name] = {}
        self.module, self.flags, self.helpers = module, flags, helpers
        self.layer: nn.Module | None = None

    def reached(self, expression: str) -> Any:
        return eval(expression, {"self": self.module, "layer": self.layer})  # of our own making


class Interpreter:
    """Parameters
    ----------
    machine : Machine
    program : Program
    model : nn.Module
        Made from the program's source, with the program's classes (or subclasses of the same names).
    """

    def __init__(self, machine: Machine, program: Program, model: nn.Module) -> None:
        if any(hook.kind.startswith("change") for hook in program.hooks):
            raise NotUnderstood("a hook that changes what the model computes")
        self.m, self.program, self.model = machine, program, model
        self.classes = {container.name: container for container in program.containers}
        self.defaults = {flag.name: flag.default for flag in program.flags}
        self.kept: dict[tuple[int, str], Name] = {}  # what modules hold when the call is over, by module and attribute
        self.written: set[tuple[int, str]] = set()  # buffers that this call wrote
        self.checkpoints = 0  # around what runs

    def run(self, tensors: Mapping[str, Tensor | None], flags: Mapping[str, Any]) -> list[Tensor]:
        """The results of one call of the model, in the order in which it returns them."""
        results = self._run(tensors, flags)
        for name in self.kept.values():
            self.m.ask(lambda t: True, name)  # who looks at the module afterwards, no recording sees
        return results

    def _run(self, tensors: Mapping[str, Tensor | None], flags: Mapping[str, Any]) -> list[Tensor]:
        m, p = self.m, self.program
        self.kept, self.written = {}, set()
        given = {name: self._given(name, tensors[name]) for name in ("x", "z")}
        scope = _Scope(self.model, {**self.defaults, **flags}, self._helpers(p.root))
        m.training = self.model.training
        with m.call(self.model):
            scope.names.update(given)
            try:
                self._block(p.root.block, scope)
            except _Left as left:
                return [m.output(scope.names[left.result])]
            if p.extra and (not p.extra_flag or scope.flags[p.extra_flag]):
                results = [scope.names[p.root.result], scope.names[p.extra]]
            else:
                results = [scope.names[p.root.result]]
            losses = []
            is_short = bool(p.extra and p.extra_flag and scope.flags[p.extra_flag])  # returns before the loss
            if p.returns.endswith(" with loss") and tensors["labels"] is not None and not is_short:
                losses = [self._loss(results[0], tensors["labels"])]
            return [m.output(name) for name in (*losses, *results)]

    def _given(self, name: str, tensor: Tensor | None) -> Name:
        assert tensor is not None
        return self.m.input(name, tensor) if INTERFACES[self.program.interface].known else self.m.unknown(name, tensor)

    def _loss(self, out: Name, labels: Tensor) -> Name:
        scores = self.m.move(lambda t: t.flatten(0, 1) if self.program.form == "seq" else t.flatten(1), out)
        return self.m.compute(_LOSS, lambda t: F.cross_entropy(t, labels), scores)

    def _helpers(self, container: Container) -> dict[str, Helper]:
        own = {f"self.{h.name}" if h.kind == "method" else h.name: h for h in container.helpers}
        return {**{h.name: h for h in self.program.helpers}, **own}

    # Modules.

    def _call(self, module: nn.Module, use: str, names: list[Name], flags: Mapping[str, Any]) -> Name:
        if isinstance(module, nn.Sequential):
            with self.m.call(module):
                return self._in_turn(module, *names)
        container = self.classes.get(type(module).__name__)
        if container is None:
            return run_layer(self.m, module, use, names)
        scope = _Scope(module, {**self.defaults, **flags}, self._helpers(container))
        scope.names.update(zip(container.parameters, names, strict=True))
        with self.m.call(module):
            try:
                self._block(container.block, scope)
            except _Left as left:
                return scope.names[left.result]
            return scope.names[container.result]

    def _in_turn(self, layers: Iterable[nn.Module], x: Name) -> Name:
        for i, layer in enumerate(layers):
            with self.m.at(i):
                x = self._call(layer, "{m}({0})", [x], {})
        return x

    # Statements.

    def _block(self, block: Block, scope: _Scope) -> None:
        for statement in block:
            with self.m.at(statement.number):
                self._statement(statement, scope)

    def _statement(self, s: Statement, scope: _Scope) -> None:
        how: str = getattr(s, "checkpoint", "")
        inside = bool(how)
        if how == "reentrant" and torch.is_grad_enabled():
            assert isinstance(s, (Run, Invoke))
            if not any(scope.names[name].value.tensor.requires_grad for name in s.operands):
                raise NotUnderstood("a reentrant checkpoint of what needs no gradient: torch computes none")
        self.checkpoints += inside
        try:
            self._carry_out(s, scope)
        finally:
            self.checkpoints -= inside

    def _carry_out(self, s: Statement, scope: _Scope) -> None:
        names = scope.names
        if isinstance(s, Apply):
            result = self._apply(s, scope)
            if s.target:
                assert result is not None
            if result is not None and (s.target or TABLE[s.operation].statement):
                names[s.target or s.operands[0]] = result  # `y += z` gives its name to the result
        elif isinstance(s, Run):
            module = scope.reached(s.module)
            flags = {flag: scope.flags[flag] for flag in s.flags}
            operands = [names[name] for name in s.operands]
            if s.checkpoint == "segments":  # called from here, layer by layer: the module's own forward knows nothing of it
                names[s.target] = self._in_turn(module, *operands)
            else:
                names[s.target] = self._call(module, s.use, operands, flags)
        elif isinstance(s, Invoke):
            names[s.target] = self._invoke(scope.helpers[s.helper], [names[name] for name in s.operands], scope)
        elif isinstance(s, Hold):
            scope.held[s.name] = names[s.source]
            if s.how == "attribute":
                self.kept[id(scope.module), s.name] = names[s.source]
        elif isinstance(s, Take):
            names[s.target] = scope.held[s.name]
        elif isinstance(s, Branch):
            taken = self._holds(s.test, scope)
            self._block(s.then if taken else s.other, scope)
            names[s.target] = names[s.then_result if taken else s.other_result]
        elif isinstance(s, Repeat):
            self._repeat(s, scope)
        elif isinstance(s, Leave):
            if self._holds(s.test, scope):
                raise _Left(s.result)
        else:
            assert isinstance(s, Remember)
            self._remember(s, scope)

    def _apply(self, s: Apply, scope: _Scope) -> Name | None:
        op = TABLE[s.operation]
        if op.simulate is None:
            raise NotUnderstood(f"{op.name} has no hand-written simulation")
        attributes = [self._attribute(a, scope) for a in s.attributes]
        return op.simulate(self.m, *(scope.names[name] for name in s.operands), *attributes)

    def _attribute(self, expression: str, scope: _Scope) -> Name:
        tensor, name = scope.reached(expression), expression.removeprefix("self.")
        if name not in self._states(scope.module):
            return self.m.constant(tensor, weight=name.endswith(".weight"))
        if (id(scope.module), name) in self.written:
            raise NotUnderstood("a buffer that is read behind where it is written")
        if self.checkpoints:
            raise NotUnderstood("a buffer that is written, under a checkpoint: what runs again reads what it wrote")
        return self.m.state((id(scope.module), name), tensor)

    def states(self) -> list[Tensor]:
        """The buffers that forwards write."""
        return [module.get_buffer(name) for module in self.model.modules() for name in self._states(module)]

    def _states(self, module: nn.Module | None) -> set[str]:
        container = self.program.root if module is self.model else self.classes.get(type(module).__name__)
        return {s.buffer for s in statements_in(container.block) if isinstance(s, Remember)} if container else set()

    def _remember(self, s: Remember, scope: _Scope) -> None:
        key = (id(scope.module), s.buffer)
        if key in self.written:
            raise NotUnderstood("a buffer that is written twice")
        if self.checkpoints:
            raise NotUnderstood("a buffer that is written under a checkpoint")
        self.written.add(key)
        self.m.remember(key, scope.names[s.source])
        with torch.no_grad():
            scope.reached(f"self.{s.buffer}").copy_(scope.names[s.source].read().tensor.detach().flatten()[:8])

    def _invoke(self, helper: Helper, operands: list[Name], scope: _Scope) -> Name:
        inner = _Scope(scope.module, scope.flags, scope.helpers)
        inner.names.update(zip(helper.parameters, operands, strict=True))
        self._block(helper.block, inner)
        return inner.names[helper.result]

    def _holds(self, test: Test, scope: _Scope) -> bool:
        if test.kind == "flag":
            return bool(scope.flags[test.name])
        if test.kind == "data":
            return QUESTIONS[test.text](self.m, scope.names[test.name])
        raise NotUnderstood(f"a branch by {test.kind}")

    def _repeat(self, s: Repeat, scope: _Scope) -> None:
        names = scope.names
        names[s.carried] = names[s.start]
        count = scope.flags[s.times] if s.times in scope.flags else int(s.times or 0)
        outer = scope.layer
        for layer in scope.reached(s.modules) if s.modules else [None] * count:
            scope.layer = layer
            self._block(s.body, scope)
            names[s.carried] = names[s.result]
        scope.layer = outer
        names[s.target] = names[s.carried]
