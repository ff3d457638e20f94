"""Random functions: bodies of modules and helpers, with the layers and parameters that they need."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from .draw import drawn
from .ir import Block, Container, Flag, Helper, Member
from .layers import LAYERS, Layer
from .names import Numbers
from .scope import Scope
from .statements import Statements


@dataclass
class Module:
    """Something that can be called. `changes`, `returns`: positions of the arguments that it overwrites, or may return.

    `linear`: it is a Linear, whose weight others may read; `plain`: it is called as ``module(x)``."""

    reached: str
    use: str
    operands: int
    changes: frozenset[int] = frozenset()
    returns: frozenset[int] = frozenset()
    flags: tuple[str, ...] = ()
    linear: bool = False
    sequential: bool = False

    @property
    def plain(self) -> bool:
        return self.use == "{m}({0})" and not self.changes


@dataclass
class Callee:
    """A helper that can be called from here."""

    name: str
    operands: int
    changes: frozenset[int]
    returns: frozenset[int]


@dataclass
class Builder:
    """One function of the program while it is made, with what belongs to its module."""

    rng: random.Random
    form: str
    made: Numbers
    name: str
    kind: str  # function, method, local, lambda, container, root
    scope: Scope
    parameters: tuple[str, ...]
    flags: tuple[Flag, ...] = ()
    callees: list[Callee] = field(default_factory=list)
    classes: Sequence[Builder] = ()
    members: list[Member] = field(default_factory=list)
    modules: list[Module] = field(default_factory=list)
    helpers: list[Helper] = field(default_factory=list)
    block: Block = ()
    result: str = ""

    @classmethod
    def function(cls, rng: random.Random, form: str, made: Numbers) -> Builder:
        """A function of the Python module."""
        parameters = ("u", "v")[: rng.choice((1, 1, 2))]
        builder = cls(rng, form, made, made.name("helper"), "function", _scope(parameters), parameters)
        builder._fill(rng.randint(1, 3))
        return builder

    @classmethod
    def container(
        cls,
        rng: random.Random,
        form: str,
        made: Numbers,
        flags: tuple[Flag, ...],
        functions: Sequence[Builder],
        classes: Sequence[Builder],
        *,
        is_root: bool = False,
    ) -> Builder:
        """A module's class."""
        parameters = ("x", "z") if is_root or rng.random() < 0.2 else ("x",)
        closed = set(parameters) if is_root and rng.random() > 0.04 else set()
        given = flags if is_root else tuple(flag for flag in flags if rng.random() < 0.4)
        name = "Model" if is_root else made.name("Block")
        scope = _scope(parameters, closed)
        builder = cls(rng, form, made, name, "root" if is_root else "container", scope, parameters, given, classes=list(classes))
        builder.callees = [f.as_callee() for f in functions]
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            builder._add_helper()
        builder._fill(rng.randint(3, 8) if is_root else rng.randint(2, 5))
        return builder

    def _add_helper(self) -> None:
        kind = drawn(self.rng, {"method": 2, "local": 1, "lambda": 1})
        parameters = ("u", "v")[: self.rng.choice((1, 1, 2))]
        stem = {"method": "step", "local": "inner", "lambda": "brief"}[kind]
        helper = Builder(self.rng, self.form, self.made, self.made.name(stem), kind, _scope(parameters), parameters)
        seen = {"method": lambda name: name.startswith(("self.", "helper")), "local": bool, "lambda": lambda name: False}[kind]
        helper.callees = [callee for callee in self.callees if seen(callee.name)]
        helper.members, helper.modules = self.members, self.modules  # they are the module's
        helper._fill(1 if kind == "lambda" else self.rng.randint(1, 3))
        self.helpers.append(helper.as_helper())
        self.callees.append(helper.as_callee())

    def _fill(self, count: int) -> None:
        writer = Statements(self)
        self.block = writer.block(self.scope, count, top=True)
        self.result = writer.result_of(self.scope)

    def as_helper(self) -> Helper:
        return Helper(self.name, self.kind, self.parameters, self.block, self.result)

    def _positions(self, names: frozenset[str] | set[str]) -> frozenset[int]:
        return frozenset(i for i, name in enumerate(self.parameters) if name in names)

    def as_callee(self) -> Callee:
        name = f"self.{self.name}" if self.kind == "method" else self.name
        return Callee(name, len(self.parameters), self._positions(self.scope.changed), self._positions(self.scope.roots[self.result]))

    def finished(self) -> Container:
        flags = tuple(flag.name for flag in self.flags)
        return Container(self.name, self.parameters, flags, tuple(self.members), tuple(self.helpers), self.block, self.result)

    # Members.

    def _declare(self, stem: str, source: str, kind: str = "module", container: str = "") -> str:
        name = self.made.name(stem)
        self.members.append(Member(name, source, kind, container))
        return f"self.{name}"

    def new_module(self) -> Module:
        """Make a member that can be called."""
        draw = self.rng.random()
        if self.classes and draw < 0.35 and self.kind in ("container", "root"):
            return self._new_container()
        if draw < 0.43:
            return self._new_sequential()
        layer = self._layer()
        reached = self._declare("m", layer.source)
        changes = frozenset({0}) if layer.in_place else frozenset()
        returns = changes | (frozenset({0}) if layer.aliases else frozenset())
        module = Module(reached, layer.use, layer.operands, changes, returns, linear=layer.source.startswith("nn.Linear"))
        self.modules.append(module)
        return module

    def _layer(self, *, plain: bool = False) -> Layer:
        fitting = {x.name: x for x in LAYERS if self.form in x.forms and not (plain and (x.use != "{m}({0})" or x.aliases))}
        return fitting[drawn(self.rng, {name: x.weight for name, x in fitting.items()})]

    def _new_container(self) -> Module:
        made = self.rng.choice(list(self.classes))
        flags = tuple(flag.name for flag in made.flags if flag in self.flags)
        callee = made.as_callee()
        reached = self._declare("b", f"{made.name}()", container=made.name)
        use = "{m}({0}, {1})" if callee.operands == 2 else "{m}({0})"
        module = Module(reached, use, callee.operands, callee.changes, callee.returns, flags)
        self.modules.append(module)
        return module

    def _new_sequential(self) -> Module:
        sources = []
        for i in range(self.rng.randint(2, 4)):
            simple = [b for b in self.classes if len(b.parameters) == 1 and not b.as_callee().changes and not b.flags]
            if simple and self.rng.random() < 0.2:
                sources.append(f"{self.rng.choice(simple).name}()")
                continue
            layer = self._layer(plain=True)
            sources.append("nn.Linear(8, 8)" if layer.in_place and i == 0 and self.form != "img" else layer.source)
        if "inplace" in sources[0]:
            sources[0] = "nn.Conv2d(8, 8, 1)"
        reached = self._declare("s", f"nn.Sequential({', '.join(sources)})")
        module = Module(reached, "{m}({0})", 1, returns=frozenset({0}), sequential=True)
        self.modules.append(module)
        return module

    def new_list(self) -> str:
        """A ModuleList of layers that are called alike."""
        source = "nn.Linear(8, 8)" if self.form != "img" else "nn.Conv2d(8, 8, 3, padding=1)"
        simple = [b for b in self.classes if len(b.parameters) == 1 and not b.as_callee().changes and not b.flags]
        if simple and self.rng.random() < 0.3:
            source = f"{self.rng.choice(simple).name}()"
        return self._declare("layers", f"nn.ModuleList([{source} for _ in range({self.rng.choice((2, 3))})])")

    def new_dict(self) -> list[Module]:
        """A ModuleDict of two layers."""
        found = []
        sources = []
        for key in ("left", "right"):
            layer = self._layer(plain=True)
            source = "nn.Tanh()" if layer.in_place else layer.source
            sources.append(f'"{key}": {source}')
            found.append(key)
        reached = self._declare("towers", f"nn.ModuleDict({{{', '.join(sources)}}})")
        modules = [Module(f'{reached}["{key}"]', "{m}({0})", 1) for key in found]
        self.modules.extend(modules)
        return modules

    def attribute(self, wanted: str) -> str:
        """A parameter of the kind that an operation wants: of the module itself, or of one of its layers."""
        if wanted.startswith("layer "):
            linear = [m.reached for m in self.modules if m.linear and m.reached.startswith("self.m")]
            part = wanted.removeprefix("layer ")
            with_bias = [m for m in linear if any(f"self.{x.name}" == m and "bias=False" not in x.source for x in self.members)]
            reached = self.rng.choice(with_bias) if with_bias else self._declare("m", "nn.Linear(8, 8)")
            return f"{reached}.{part}"
        if wanted == "buffer":
            found = [m.name for m in self.members if m.kind == "buffer"]
            return f"self.{found[0]}" if found else self._declare("state", "torch.zeros(8)", "buffer")
        shape = "8, 8" if wanted == "matrix" else "8"
        source = f"nn.Parameter(torch.randn({shape}) * 0.4)"
        found = [m.name for m in self.members if m.kind == "parameter" and m.source == source]
        if found and self.rng.random() < 0.6:
            return f"self.{self.rng.choice(found)}"
        return self._declare("w", source, "parameter")

    def tie(self) -> None:
        """Let two layers have one weight."""
        linear = [m.reached.removeprefix("self.") for m in self.modules if m.linear and m.reached.startswith("self.m")]
        if len(linear) > 1:
            first, second = self.rng.sample(linear, 2)
            self.members.append(Member(f"{first}.weight", f"self.{second}.weight", "tied"))


def _scope(parameters: Sequence[str], closed: set[str] | None = None) -> Scope:
    scope = Scope(closed=closed or set())
    for name in parameters:
        scope.variables.append(name)
        scope.roots[name] = frozenset({name})
    return scope
