"""Makes a program that fails smaller, as long as the same oracle fails in the same way."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from .examine import examine
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
    all_statements,
    blocks_of,
    statements_in,
)

_LIMIT = 400  # programs tried


def shrink(program: Program, oracle: str) -> Program:
    """The smallest program found whose first failure by `oracle` has the same title."""
    title = _title(program, oracle)
    tried = 0
    while title is not None:
        for smaller in candidates(program):
            tried += 1
            if tried > _LIMIT:
                return program
            if _title(smaller, oracle) == title:
                program = smaller
                break
        else:
            return program
    return program


def _title(program: Program, oracle: str) -> str | None:
    try:
        failures = examine(program, [oracle]).failures
    except Exception:  # a program that makes no sense any more
        return None
    return failures[0].title if failures else None


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the most promising first."""
    for changes in ({"hooks": ()}, {"interface": "plain"}, {"extra": "", "extra_flag": ""}, {"extra_flag": ""}, {"big": False}):
        yield from _if_other(program, **changes)
    for returns in (program.returns.removesuffix(" with loss"), "tuple with loss" if program.returns.endswith(" with loss") else "tuple"):
        yield from _if_other(program, returns=returns)
    for statement in reversed(list(all_statements(program))):
        yield from (_pruned(found) for found in _without(program, statement))
    for flag in program.flags:
        if not _is_read(program, flag.name):
            fewer = tuple(f for f in program.flags if f != flag)
            containers = tuple(dataclasses.replace(c, flags=tuple(n for n in c.flags if n != flag.name)) for c in program.containers)
            fewer_flags = _map_statements(program, lambda s, name=flag.name: _without_flag(s, name))
            bodies = {c.name: c for c in fewer_flags.containers}
            containers = tuple(dataclasses.replace(bodies[c.name], flags=c.flags) for c in containers)
            yield dataclasses.replace(fewer_flags, flags=fewer, containers=containers)
    yield from _simpler_members(program)
    yield from _simpler_statements(program)


def _if_other(program: Program, **changes: object) -> Iterator[Program]:
    other = dataclasses.replace(program, **changes)  # type: ignore[arg-type]
    if other != program:
        yield _pruned(other)


def _without_flag(s: Statement, name: str) -> Statement:
    return dataclasses.replace(s, flags=tuple(n for n in s.flags if n != name)) if isinstance(s, Run) else s


def _is_read(program: Program, flag: str) -> bool:
    """Whether a branch or a loop asks for a flag."""
    asked = any(
        (getattr(s, "test", None) is not None and s.test.name == flag) or getattr(s, "times", "") == flag  # type: ignore[union-attr]
        for s in all_statements(program)
    )
    return asked or program.extra_flag == flag


# Statements.


def _map_statements(program: Program, change: Callable[[Statement], Statement]) -> Program:
    def block(found: Block) -> Block:
        return tuple(_inside(change(s), block) for s in found)

    return _map_bodies(program, block)


def _inside(s: Statement, change: Callable[[Block], Block]) -> Statement:
    if isinstance(s, Branch):
        return dataclasses.replace(s, then=change(s.then), other=change(s.other))
    return dataclasses.replace(s, body=change(s.body)) if isinstance(s, Repeat) else s


def _map_bodies(program: Program, change: Callable[[Block], Block]) -> Program:
    def helper(found: Helper) -> Helper:
        return dataclasses.replace(found, block=change(found.block))

    containers = tuple(dataclasses.replace(c, block=change(c.block), helpers=tuple(map(helper, c.helpers))) for c in program.containers)
    return dataclasses.replace(program, containers=containers, helpers=tuple(map(helper, program.helpers)))


def _without(program: Program, gone: Statement) -> Iterator[Program]:
    """The program without a statement: what it made is what it read, or what was inside it."""
    if isinstance(gone, Branch):
        for inner, result in ((gone.then, gone.then_result), (gone.other, gone.other_result)):
            yield _replaced(program, gone, inner, {gone.target: result})
        return
    if isinstance(gone, Repeat):
        yield _replaced(program, gone, (), {gone.target: gone.start})
        yield _replaced(program, gone, gone.body, {gone.target: gone.result, gone.carried: gone.start})
        return
    operands = {"operands": (), "source": None, **vars(gone)}
    sources = list(dict.fromkeys(filter(None, (*operands["operands"], operands["source"]))))
    if isinstance(gone, Take):
        held = [s.source for s in all_statements(program) if isinstance(s, Hold) and s.name == gone.name]
        sources = held[:1]
    target = getattr(gone, "target", "")
    if not target:
        yield _replaced(program, gone, (), {})
        return
    for source in sources:
        yield _replaced(program, gone, (), {target: source})


def _replaced(program: Program, gone: Statement, instead: Block, names: dict[str, str]) -> Program:
    def block(found: Block) -> Block:
        made: list[Statement] = []
        for s in found:
            made += instead if s.number == gone.number else (_inside(s, block),)
        return tuple(made)

    return _renamed(_map_bodies(program, block), names)


def _renamed(program: Program, names: dict[str, str]) -> Program:
    if not names:
        return program

    def name(old: str) -> str:
        while old in names and names[old] != old:
            old = names[old]
        return old

    def statement(s: Statement) -> Statement:
        changes: dict[str, object] = {}
        for field in ("source", "start", "result", "then_result", "other_result"):
            if isinstance(getattr(s, field, None), str):
                changes[field] = name(getattr(s, field))
        if isinstance(s, Apply | Run | Invoke):
            changes["operands"] = tuple(map(name, s.operands))
        if isinstance(s, Branch | Leave) and s.test.kind == "data":
            changes["test"] = dataclasses.replace(s.test, name=name(s.test.name))
        return dataclasses.replace(s, **changes)  # type: ignore[arg-type]

    def function(found: Helper | Container) -> Helper | Container:
        return dataclasses.replace(found, result=name(found.result))

    changed = _map_statements(program, statement)
    containers = tuple(
        dataclasses.replace(function(c), helpers=tuple(map(function, c.helpers)))  # type: ignore[arg-type, type-var]
        for c in changed.containers
    )
    return dataclasses.replace(
        changed,
        containers=containers,  # type: ignore[arg-type]
        helpers=tuple(map(function, changed.helpers)),  # type: ignore[arg-type]
        extra=name(changed.extra) if changed.extra else "",
    )


# What nobody uses.


def _pruned(program: Program) -> Program:
    """Without members, helpers and classes that nothing names."""
    while True:
        text = " ".join(_words(program))
        containers = []
        for c in program.containers:
            if c is not program.root and not any(
                m.container == c.name or c.name in m.source for k in program.containers for m in k.members
            ):
                continue
            own = " ".join(_words_of(c))
            ties = " ".join(f"self.{m.name} {m.source}" for m in c.members if m.kind == "tied")
            members = tuple(
                m
                for m in c.members
                if re.search(rf"self\.{m.name.partition('.')[0]}\b", own)
                or (m.kind != "tied" and re.search(rf"self\.{m.name}\b", ties))
                or re.search(rf"\b{m.name}\b", " ".join(hook.path for hook in program.hooks))
                or (m.kind == "buffer" and any(isinstance(s, Remember) and s.buffer == m.name for s in statements_in(c.block)))
            )
            helpers = tuple(h for h in c.helpers if re.search(rf"\b{h.name}\b", own))
            containers.append(dataclasses.replace(c, members=members, helpers=helpers))
        functions = tuple(h for h in program.helpers if re.search(rf"\b{h.name}\b", text))
        fewer = dataclasses.replace(program, containers=tuple(containers), helpers=functions)
        if fewer == program:
            return program
        program = fewer


def _words(program: Program) -> Iterator[str]:
    for block in blocks_of(program):
        yield from _names_in(block)


def _words_of(container: Container) -> Iterator[str]:
    yield from _names_in(container.block)
    for helper in container.helpers:
        yield from _names_in(helper.block)


def _names_in(block: Block) -> Iterator[str]:
    """Modules, parameters and helpers that a block names."""
    for s in statements_in(block):
        if isinstance(s, Apply):
            yield from s.attributes
        elif isinstance(s, Run):
            yield s.module
        elif isinstance(s, Invoke):
            yield s.helper
        elif isinstance(s, Repeat):
            yield s.modules


# Simpler ones.


def _simpler_members(program: Program) -> Iterator[Program]:
    simplest = "nn.Linear(8, 8)" if program.form != "img" else "nn.Conv2d(8, 8, 1)"
    for i, container in enumerate(program.containers):
        for j, member in enumerate(container.members):
            found = [simplest, "nn.Tanh()", "nn.Identity()"]
            if (
                member.source in found
                or member.kind != "module"
                or any(x in member.source for x in ("ModuleList", "ModuleDict", "LSTM", "GRU"))
            ):
                if not member.source.startswith("nn.ModuleList") or member.source.startswith(f"nn.ModuleList([{simplest}"):
                    continue
                found = [f"nn.ModuleList([{simplest} for _ in range(2)])"]
            if member.source.startswith("nn.Sequential("):
                found += _shorter(member.source)
            for source in found:
                members = (*container.members[:j], dataclasses.replace(member, source=source, container=""), *container.members[j + 1 :])
                changed = dataclasses.replace(container, members=members)
                yield _pruned(dataclasses.replace(program, containers=(*program.containers[:i], changed, *program.containers[i + 1 :])))


def _shorter(source: str) -> list[str]:
    parts = re.findall(r"(?:nn\.)?\w+\([^()]*\)", source.removeprefix("nn.Sequential("))
    return [f"nn.Sequential({', '.join(parts[:i] + parts[i + 1 :])})" for i in range(len(parts)) if len(parts) > 1]


def _simpler_statements(program: Program) -> Iterator[Program]:
    """Without checkpoints and aliases, and with plain operations in the places of rare ones."""
    for s in all_statements(program):
        if isinstance(s, Run | Invoke) and s.checkpoint:
            yield _replaced(program, s, (dataclasses.replace(s, checkpoint=""),), {})
        if isinstance(s, Apply) and s.target and s.operation not in ("relu F.relu({0})", "add"):
            plain = "relu F.relu({0})" if len(s.operands) == 1 else "add"
            yield _replaced(program, s, (dataclasses.replace(s, operation=plain, attributes=()),), {})
