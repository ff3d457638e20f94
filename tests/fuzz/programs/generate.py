"""A program from a seed."""

from __future__ import annotations

import dataclasses
import random

from .blocks import Builder
from .draw import drawn
from .interfaces import INTERFACES, RETURNS
from .ir import Container, Flag, Hook, Member, Program
from .names import Numbers

_FORMS = {"rows": 3, "seq": 5, "img": 3}
_SHARE_WITH_RARER = 0.35
_FLAGS = (Flag("big", False, (True,)), Flag("skip", False, (True,)), Flag("wide", True, (False,)), Flag("steps", 2, (3, 1)))


def generate(seed: int, *, has_rarer: bool | None = None) -> Program:
    """The program of a seed: always the same. `has_rarer`: of the rarer operations too; None: of some seeds."""
    rng = random.Random(seed)
    form = drawn(rng, _FORMS)
    flags = tuple(flag for flag in _FLAGS if rng.random() < 0.3)
    drawn_rarer = random.Random(f"rarer {seed}").random() < _SHARE_WITH_RARER
    made = Numbers(has_rarer=drawn_rarer if has_rarer is None else has_rarer)
    functions = [Builder.function(rng, form, made) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    containers: list[Builder] = []
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        builder = Builder.container(rng, form, made, flags, functions, containers)
        containers.append(builder)
    root = Builder.container(rng, form, made, flags, functions, containers, is_root=True)
    extra, extra_flag = "", ""
    if rng.random() < 0.35:
        extra = rng.choice(root.scope.variables)
        extra_flag = rng.choice([flag.name for flag in flags if isinstance(flag.default, bool)] + ["", ""])
    interface = drawn(rng, dict.fromkeys(INTERFACES, 1)) if rng.random() < 0.6 else "plain"
    returns = drawn(rng, dict.fromkeys(RETURNS, 1))
    if INTERFACES[interface].labels and rng.random() < 0.15 and returns != "generator":
        returns += " with loss"
    # Steps in time are run one by one: there are few of them.
    recurrent = any(name in m.source for b in (*containers, root) for m in b.members for name in ("LSTM", "GRU", "RNN"))
    program = Program(
        seed,
        form,
        rng.random() < 0.15 and not recurrent,
        tuple(builder.finished() for builder in (*containers, root)),
        tuple(builder.as_helper() for builder in functions),
        interface,
        returns,
        extra,
        extra_flag,
        flags,
        (),
    )
    return dataclasses.replace(program, hooks=_hooks(rng, program))


def _hooks(rng: random.Random, program: Program) -> tuple[Hook, ...]:
    if rng.random() > 0.12:
        return ()
    paths = _paths(program, program.root)
    if not paths:
        return ()
    kinds = {"observe": 3, "observe before": 1, "change": 1, "change before": 1}
    return tuple(Hook(rng.choice(paths), drawn(rng, kinds), rng.random() < 0.6) for _ in range(rng.choice((1, 1, 2))))


def _paths(program: Program, container: Container) -> list[str]:
    """Modules whose one argument and one result are tensors."""
    classes = {c.name: c for c in program.containers}
    found = []
    for member in container.members:
        if member.kind != "module" or _is_odd(member):
            continue
        found.append(member.name)
        if member.container:
            found += [f"{member.name}.{path}" for path in _paths(program, classes[member.container])]
    return found


def _is_odd(member: Member) -> bool:
    return any(name in member.source for name in ("LSTM", "GRU", "RNN", "Attention", "Bilinear", "ModuleList", "ModuleDict"))
