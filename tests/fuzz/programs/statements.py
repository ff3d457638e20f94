"""Random statements, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .draw import drawn
from .ir import Apply, Block, Branch, Hold, Invoke, Leave, Remember, Repeat, Run, Statement, Take, Test
from .operations import QUESTIONS, TABLE, Operation
from .scope import Scope

if TYPE_CHECKING:
    from .blocks import Builder, Module

_RECENT = (1, 1, 2, 4, 9)  # how often a variable is drawn, the newest last
_IN_MODULES = frozenset({"run", "loop over modules", "tower", "remember", "checkpoint"})


class Statements:
    """Writes statements for one function."""

    def __init__(self, builder: Builder) -> None:
        self.builder, self.rng, self.made = builder, builder.rng, builder.made
        self.has_module = builder.kind != "function"

    def block(self, scope: Scope, count: int, *, top: bool = False) -> Block:
        found: list[Statement] = []
        while len(found) < count:
            found += self._statement(scope, top=top)
        return tuple(found)

    def result_of(self, scope: Scope) -> str:
        return scope.variables[-1]

    # Choices.

    def _variable(self, scope: Scope) -> str:
        unread = [name for name in scope.variables if name not in scope.read]
        recent = scope.variables[-len(_RECENT) :]
        name = self.rng.choice(unread) if unread and self.rng.random() < 0.3 else self.rng.choices(recent, _RECENT[-len(recent) :])[0]
        scope.read.add(name)
        return name

    def _own(self, scope: Scope) -> str | None:
        """A variable that may be changed in place."""
        found = [name for name in scope.variables[-5:] if scope.may_change(name)]
        chosen = self.rng.choice(found) if found else None
        scope.read |= {chosen} if chosen else set()
        return chosen

    def _new(self, scope: Scope, *aliases: str) -> str:
        return scope.add(self.made.name("y"), *aliases)

    def _test(self, scope: Scope) -> Test:
        """Of a branch. Flags are those of the function; only containers have some."""
        draw = self.rng.random()
        flags = [flag.name for flag in self.builder.flags if isinstance(flag.default, bool)]
        if flags and draw < 0.75:
            return Test("flag", self.rng.choice(flags))
        mean, large = QUESTIONS
        if self.builder.kind == "root" and draw < 0.9:
            return Test("data", "x", mean)
        if self.has_module and draw > 0.97:
            return Test("training")
        return Test("data", self._variable(scope), large)

    def _statement(self, scope: Scope, *, top: bool) -> list[Statement]:
        kinds: dict[str, tuple[float, Callable[[Scope], list[Statement]]]] = {
            "apply": (34, self._apply),
            "run": (34, self._run),
            "in place": (9, self._in_place),
            "branch": (6, self._branch),
            "invoke": (7 if self.builder.callees else 0, self._invoke),
            "hold": (4, self._hold),
            "take": (6 if scope.held else 0, self._take),
            "loop": (2.5, self._loop),
            "loop over modules": (2, self._loop_over_modules),
            "tower": (1, self._tower),
            "checkpoint": (2.5, self._checkpoint),
            "remember": (0.5 if self.builder.form != "img" else 0, self._remember),
            "compiling": (0.15, self._compiling),
            "leave": (3 if top and self.builder.kind in ("container", "root") else 0, self._leave),
        }
        if self.builder.kind == "lambda":
            kinds = {name: kinds[name] for name in ("apply", "run")}
        if not self.has_module:
            kinds = {name: kind for name, kind in kinds.items() if name not in _IN_MODULES}
        return kinds[drawn(self.rng, {name: weight for name, (weight, _) in kinds.items()})][1](scope)

    # Statements.

    def _operation(self, *, in_place: bool) -> Operation:
        form, b = self.builder.form, self.builder
        allowed = {
            name: op.weight
            for name, op in TABLE.items()
            if form in op.forms
            and (self.made.has_rarer or not op.rare)
            and op.in_place == in_place
            and (self.has_module or not (op.attributes or "self." in op.source))
            and not (b.kind == "lambda" and op.statement)
        }
        return TABLE[drawn(self.rng, allowed)]

    def _apply(self, scope: Scope) -> list[Statement]:
        op = self._operation(in_place=False)
        attributes = tuple(self.builder.attribute(wanted) for wanted in op.attributes)
        operands = tuple(self._variable(scope) for _ in range(op.operands))
        target = self._new(scope, *(operands if op.aliases else ()))
        return [Apply(self.made.number(), target, op.name, operands, attributes)]

    def _in_place(self, scope: Scope) -> list[Statement]:
        own = self._own(scope)
        if own is None:
            return self._apply(scope)
        op = self._operation(in_place=True)
        operands = (own, *(self._variable(scope) for _ in range(op.operands - 1)))
        scope.change(own)
        target = "" if op.statement or self.rng.random() < 0.45 else self._new(scope, own)
        return [Apply(self.made.number(), target, op.name, operands)]

    def _module(self) -> Module:
        modules = self.builder.modules
        if modules and self.rng.random() < 0.3:
            return self.rng.choice(modules)
        return self.builder.new_module()

    def _run(self, scope: Scope) -> list[Statement]:
        if self.rng.random() < 0.04:
            self.builder.tie()
        return [self._call(scope, self._module())]

    def _call(self, scope: Scope, module: Module, checkpoint: str = "") -> Statement:
        operands = []
        for position in range(module.operands):
            name = self._own(scope) if position in module.changes else self._variable(scope)
            if name is None:  # nothing may be overwritten here
                return self._apply(scope)[0]
            operands.append(name)
        for position in module.changes:
            scope.change(operands[position])
        target = self._new(scope, *(operands[i] for i in module.returns))
        return Run(self.made.number(), target, module.reached, module.use, tuple(operands), module.flags, checkpoint)

    def _checkpoint(self, scope: Scope) -> list[Statement]:
        helpers = [c for c in self.builder.callees if not c.changes]
        if helpers and self.rng.random() < 0.35:
            return self._invoke(scope, drawn(self.rng, {"reentrant": 1, "not reentrant": 1}), self.rng.choice(helpers))
        module = self._module()
        if not module.plain or module.flags:
            return [self._call(scope, module)]
        ways = {"reentrant": 1, "not reentrant": 2, "lambda": 1, "segments": 2 if module.sequential else 0}
        return [self._call(scope, module, drawn(self.rng, ways))]

    def _invoke(self, scope: Scope, checkpoint: str = "", callee: object = None) -> list[Statement]:
        chosen = callee or self.rng.choice(self.builder.callees)
        operands = []
        for position in range(chosen.operands):
            name = self._own(scope) if position in chosen.changes else self._variable(scope)
            if name is None:
                return self._apply(scope)
            operands.append(name)
        for position in chosen.changes:
            scope.change(operands[position])
        target = self._new(scope, *(operands[i] for i in chosen.returns))
        return [Invoke(self.made.number(), target, chosen.name, tuple(operands), checkpoint)]

    def _branch(self, scope: Scope) -> list[Statement]:
        test = self._test(scope)
        arms, results, roots = [], [], []
        for count in (self.rng.randint(1, 2), self.rng.choice((0, 0, 1, 2))):
            inner = scope.inner()
            arms.append(self.block(inner, count))
            results.append(self.result_of(inner) if arms[-1] else self._variable(scope))
            roots.append(inner.roots[results[-1]])
        if self.rng.random() < 0.3:
            arms.reverse(), results.reverse()
        target = self._new(scope)
        scope.roots[target] = roots[0] | roots[1]
        return [Branch(self.made.number(), target, test, arms[0], results[0], arms[1], results[1])]

    def _compiling(self, scope: Scope) -> list[Statement]:
        """What computes the same in another way, under compilation alone."""
        name, inner = self._variable(scope), scope.inner()
        arms = []
        for operation in ("twice", "doubled"):
            arms.append(Apply(self.made.number(), self._new(inner), operation, (name,)))
        target = self._new(scope)
        return [Branch(self.made.number(), target, Test("compiling"), (arms[0],), arms[0].target, (arms[1],), arms[1].target)]

    def _repeat(self, scope: Scope, times: str, modules: str) -> list[Statement]:
        start, carried, inner = self._variable(scope), self.made.name("t"), scope.inner()
        inner.add(carried, start)
        inner.roots[carried] |= frozenset(inner.closed)  # what the body returns may be anything
        body: list[Statement] = []
        if modules:
            target = self._new(inner, carried)
            body.append(Run(self.made.number(), target, "layer", "{m}({0})", (carried,)))
        body += self.block(inner, self.rng.randint(0 if modules else 1, 2))
        result = self.result_of(inner)
        target = self._new(scope, start)
        scope.roots[target] |= inner.roots[result]
        return [Repeat(self.made.number(), target, start, carried, times, modules, tuple(body), result)]

    def _loop(self, scope: Scope) -> list[Statement]:
        steps = [flag.name for flag in self.builder.flags if not isinstance(flag.default, bool)]
        return self._repeat(scope, self.rng.choice([*steps, *steps, "2", "3"]), "")

    def _loop_over_modules(self, scope: Scope) -> list[Statement]:
        return self._repeat(scope, "", self.builder.new_list())

    def _tower(self, scope: Scope) -> list[Statement]:
        return [self._call(scope, module) for module in self.builder.new_dict()]

    def _hold(self, scope: Scope) -> list[Statement]:
        source, name = self._variable(scope), self.made.name("kept")
        in_module = self.builder.kind in ("container", "root")
        how = drawn(self.rng, {"list": 2, "dict": 1, "closure": 1, "object": 1, "attribute": 1 if in_module else 0})
        scope.held.append((name, how, source))
        return [Hold(self.made.number(), name, source, how)]

    def _take(self, scope: Scope) -> list[Statement]:
        name, how, source = self.rng.choice(scope.held)
        return [Take(self.made.number(), self._new(scope, source), name, how)]

    def _leave(self, scope: Scope) -> list[Statement]:
        return [Leave(self.made.number(), self._test(scope), self._variable(scope))]

    def _remember(self, scope: Scope) -> list[Statement]:
        buffer = self.builder.attribute("buffer")
        found: list[Statement] = []
        if self.rng.random() < 0.7:
            op = TABLE[drawn(self.rng, {"plus state": 1, "plus product of state": 1})]
            attributes = tuple(self.builder.attribute(wanted) for wanted in op.attributes)
            found.append(Apply(self.made.number(), "", op.name, (self._variable(scope),), attributes))
            found[-1] = Apply(found[-1].number, self._new(scope), op.name, found[-1].operands, attributes)
        return [*found, Remember(self.made.number(), buffer.removeprefix("self."), self._variable(scope))]
