"""A program as Python source, as its author would have written it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .interfaces import IMPORTS, INTERFACES, RETURNS
from .ir import (
    Apply,
    Block,
    Branch,
    Container,
    Helper,
    Hold,
    Invoke,
    Leave,
    Member,
    Program,
    Remember,
    Run,
    Statement,
    Take,
    Test,
    all_statements,
)
from .operations import TABLE, source_of

_HEAD = f"""\
import types
{IMPORTS}
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
"""
_HOOKS = {
    "observe": "register_forward_hook(lambda m, i, o: LOG.append((first(o) * first(o)).mean()))",
    "observe before": "register_forward_pre_hook(lambda m, i: LOG.append((first(i) * first(i)).mean()))",
    "change": "register_forward_hook(lambda m, i, o: o * 0.75)",
    "change before": "register_forward_pre_hook(lambda m, i: (i[0] + 0.25, *i[1:]))",
}
_FIRST = """

LOG = []


def first(value):
    return first(value[0]) if isinstance(value, tuple) else value
"""


def source(program: Program) -> str:
    """The file that defines `Model`, `arguments`, `hook_model` and `hook_simulation`."""
    interface = INTERFACES[program.interface]
    definitions = (TABLE[s.operation].definitions for s in all_statements(program) if isinstance(s, Apply))
    classes = dict.fromkeys((interface.classes, RETURNS[program.returns.removesuffix(" with loss")][1], *definitions))
    parts = [_HEAD, *(f"\n{text}" for text in classes if text)]
    parts += ["\n\n" + "\n".join(_function(helper, "")) + "\n" for helper in program.helpers]
    parts += ["\n\n" + "\n".join(_Writer(program, container).lines()) + "\n" for container in program.containers]
    parts.append(f"\n\ndef arguments(x, z, labels=None):\n    return {interface.pack}\n")
    parts.append(_FIRST if program.hooks else "")
    for name, late in (("hook_model", False), ("hook_simulation", True)):
        lines = [f"    model.get_submodule({hook.path!r}).{_HOOKS[hook.kind]}" for hook in program.hooks if hook.late == late]
        parts.append("\n\n" + "\n".join([f"def {name}(model):", *(lines or ["    pass"])]) + "\n")
    return "".join(parts)


def _leaving(result: str) -> list[str]:
    """How a forward ends."""
    return [result, "return"] if result.startswith("yield") else [f"return {result}"]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _function(helper: Helper, self_: str) -> list[str]:
    names = ", ".join(filter(None, (self_, *helper.parameters)))
    return [f"def {helper.name}({names}):", *_indented([*_block(helper.block), f"return {helper.result}"])]


def _block(block: Block, results: str = "") -> list[str]:
    return [line for statement in block for line in _statement(statement, results)]


def test_source(test: Test) -> str:
    return {
        "flag": test.name,
        "data": test.text.format(test.name),
        "training": "self.training",
        "compiling": "torch.compiler.is_compiling()",
    }[test.kind]


def _apply(s: Apply) -> str:
    return source_of(TABLE[s.operation], s.operands, s.attributes)


def _run(s: Run) -> str:
    call = s.use.format(*s.operands, m=s.module)
    if s.flags:
        call = f"{call[:-1]}, {', '.join(f'{flag}={flag}' for flag in s.flags)})"
    if s.checkpoint == "segments":
        return f"checkpoint_sequential({s.module}, 2, {s.operands[0]}, use_reentrant=False)"
    if s.checkpoint == "lambda":
        return f"checkpoint(lambda t: {s.use.format('t', m=s.module)}, {s.operands[0]}, use_reentrant=False)"
    if s.checkpoint:
        return f"checkpoint({s.module}, {', '.join(s.operands)}, use_reentrant={s.checkpoint == 'reentrant'})"
    return call


def _invoke(s: Invoke) -> str:
    if s.checkpoint:
        return f"checkpoint({s.helper}, {', '.join(s.operands)}, use_reentrant={s.checkpoint == 'reentrant'})"
    return f"{s.helper}({', '.join(s.operands)})"


_HOLD = {
    "list": "{0} = [{1}]",
    "dict": '{0} = {{"kept": {1}}}',
    "closure": "{0} = lambda kept={1}: kept",
    "attribute": "self.{0} = {1}",
    "object": "{0} = types.SimpleNamespace(kept={1})",
}
_TAKE = {"list": "{0}[0]", "dict": '{0}["kept"]', "closure": "{0}()", "attribute": "self.{0}", "object": "{0}.kept"}


def _statement(s: Statement, results: str) -> list[str]:
    if isinstance(s, Apply):
        return [f"{s.target} = {_apply(s)}" if s.target else _apply(s)]
    if isinstance(s, Run):
        return [f"{s.target} = {_run(s)}"]
    if isinstance(s, Invoke):
        return [f"{s.target} = {_invoke(s)}"]
    if isinstance(s, Hold):
        return [_HOLD[s.how].format(s.name, s.source)]
    if isinstance(s, Take):
        return [f"{s.target} = {_TAKE[s.how].format(s.name)}"]
    if isinstance(s, Remember):
        return [f"self.{s.buffer}.copy_({s.source}.detach().flatten()[:8])"]
    if isinstance(s, Leave):
        return [f"if {test_source(s.test)}:", *_indented(_leaving((results or "{}").format(s.result)))]
    if isinstance(s, Branch):
        arms = [[*_block(block), f"{s.target} = {result}"] for block, result in ((s.then, s.then_result), (s.other, s.other_result))]
        return [f"if {test_source(s.test)}:", *_indented(arms[0]), "else:", *_indented(arms[1])]
    head = f"for layer in {s.modules}:" if s.modules else f"for _ in range({s.times}):"
    return [f"{s.carried} = {s.start}", head, *_indented([*_block(s.body), f"{s.carried} = {s.result}"]), f"{s.target} = {s.carried}"]


def is_single(helper: Helper) -> bool:
    """Whether it fits into a lambda."""
    return len(helper.block) == 1 and isinstance(helper.block[0], Apply | Run) and helper.block[0].target == helper.result


class _Writer:
    """A class of the program."""

    def __init__(self, program: Program, container: Container) -> None:
        self.program, self.container = program, container
        self.is_root = container is program.root

    def lines(self) -> list[str]:
        c = self.container
        made = ["super().__init__()", *map(_member, c.members)]
        methods = [line for helper in c.helpers if helper.kind == "method" for line in ("", *_function(helper, "self"))]
        lines = ["def __init__(self):", *_indented(made), *methods, "", *self._forward()]
        return [f"class {c.name}(nn.Module):", *_indented(lines)]

    def _flags(self, names: Sequence[str]) -> str:
        defaults = {flag.name: flag.default for flag in self.program.flags}
        return ", ".join(f"{name}={defaults[name]!r}" for name in names)

    def _forward(self) -> list[str]:
        c, program = self.container, self.program
        inner = [line for helper in c.helpers if helper.kind in ("local", "lambda") for line in self._local(helper)]
        if not self.is_root:
            parameters = ", ".join(filter(None, ("self", *c.parameters, self._flags(c.flags))))
            body = [*inner, *_block(c.block), f"return {c.result}"]
            return [f"def forward({parameters}):", *_indented(body)]
        interface, flags = INTERFACES[program.interface], [flag.name for flag in program.flags]
        keywords = self._flags(flags)
        if "**" in interface.parameters:
            unpack = [interface.unpack, *(f"{f.name} = inputs.get({f.name!r}, {f.default!r})" for f in program.flags)]
            parameters = f"self, {interface.parameters}"
        else:
            star = "" if "*" in interface.parameters or not flags else "*"
            parameters = ", ".join(filter(None, ("self", interface.parameters, star, keywords)))
            unpack = [interface.unpack] if interface.unpack else []
        return [f"def forward({parameters}):", *_indented([*unpack, *inner, *_block(c.block, self._returned("{}")), *self._return()])]

    def _local(self, helper: Helper) -> list[str]:
        if helper.kind == "lambda" and is_single(helper):
            statement = helper.block[0]
            expression = _apply(statement) if isinstance(statement, Apply) else _run(statement)  # type: ignore[arg-type]
            return [f"{helper.name} = lambda {', '.join(helper.parameters)}: {expression}"]
        return _function(helper, "")

    def _returned(self, results: str) -> str:
        """The return value as a template or text, from the results."""
        template = RETURNS[self.program.returns.removesuffix(" with loss")][0]
        return template.format(results) if results != "{}" else template

    def _return(self) -> list[str]:
        p, out = self.program, self.container.result
        lines = []
        if p.extra and p.extra_flag:
            lines = [f"if {p.extra_flag}:", *_indented(_leaving(self._returned(f"{out}, {p.extra}")))]
        results = f"{out}, {p.extra}" if p.extra and not p.extra_flag else out
        if p.returns.endswith(" with loss"):
            scores = f"{out}.flatten(1)" if p.form != "seq" else f"{out}.flatten(0, 1)"
            lines += ["if labels is not None:", f"    return F.cross_entropy({scores}, labels), {self._returned(results)}"]
        return [*lines, *_leaving(self._returned(results))]


def _member(member: Member) -> str:
    if member.kind == "buffer":
        return f'self.register_buffer("{member.name}", {member.source})'
    return f"self.{member.name} = {member.source}"
