"""What a random program is made of.

Statements read and write variables. Every variable is a tensor of the program's form (see `FORMS`), so that any statement can read
any variable. A statement keeps its `number` when others are dropped: it is the place in the program that it stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

CHANNELS = 8
# form -> (axis of the channels, shape after the batch)
FORMS: dict[str, tuple[int, tuple[int, ...]]] = {"rows": (-1, (8,)), "seq": (-1, (6, 8)), "img": (1, (8, 5, 5))}


@dataclass(frozen=True)
class Test:
    """What a branch asks.

    ========= ==========================================================
    kind      condition
    ========= ==========================================================
    flag      the flag `name`
    data      something of the variable `name`: `text` is the expression
    training  `self.training`
    compiling `torch.compiler.is_compiling()`
    ========= ==========================================================
    """

    kind: str
    name: str = ""
    text: str = ""


@dataclass(frozen=True)
class Apply:
    """An operation of the table in `operations`: ``target = F.relu(y)``. Without `target` the result is dropped."""

    number: int
    target: str
    operation: str
    operands: tuple[str, ...]
    attributes: tuple[str, ...] = ()  # of the module: parameters, or the weights of layers


@dataclass(frozen=True)
class Run:
    """A call of a module: ``target = self.block(y, flag=flag)``. `use` is the expression, `module` how it is reached."""

    number: int
    target: str
    module: str
    use: str
    operands: tuple[str, ...]
    flags: tuple[str, ...] = ()
    checkpoint: str = ""  # "reentrant", "not reentrant", "segments"


@dataclass(frozen=True)
class Invoke:
    """A call of a helper function or method, or of a lambda."""

    number: int
    target: str
    helper: str
    operands: tuple[str, ...]
    checkpoint: str = ""


@dataclass(frozen=True)
class Branch:
    """``if test: ... else: ...``; both arms give `target` a value."""

    number: int
    target: str
    test: Test
    then: tuple[Statement, ...]
    then_result: str
    other: tuple[Statement, ...]
    other_result: str


@dataclass(frozen=True)
class Repeat:
    """A loop that carries one variable: `times` is a number or a flag; with `modules` it runs over a ModuleList, as `layer`."""

    number: int
    target: str
    start: str
    carried: str
    times: str
    modules: str
    body: tuple[Statement, ...]
    result: str


@dataclass(frozen=True)
class Hold:
    """Keep a tensor for later, in a list, a dict, a closure or an attribute."""

    number: int
    name: str
    source: str
    how: str


@dataclass(frozen=True)
class Take:
    """``target`` is what was held as `name`."""

    number: int
    target: str
    name: str
    how: str


@dataclass(frozen=True)
class Leave:
    """``if test: return result``."""

    number: int
    test: Test
    result: str


@dataclass(frozen=True)
class Remember:
    """The forward writes a buffer: ``self.state.copy_(y.mean(0))``."""

    number: int
    buffer: str
    source: str


Statement = Apply | Run | Invoke | Branch | Repeat | Hold | Take | Leave | Remember
Block = tuple[Statement, ...]


@dataclass(frozen=True)
class Helper:
    """`kind`: function (of the Python module), method, local (defined inside the forward) or lambda (one expression)."""

    name: str
    kind: str
    parameters: tuple[str, ...]
    block: Block
    result: str


@dataclass(frozen=True)
class Member:
    """What a module's constructor makes: ``self.name = source``. `kind`: module, parameter, buffer or tied (a parameter of two layers)."""

    name: str
    source: str
    kind: str = "module"
    container: str = ""  # class of the program that it is an instance of


@dataclass(frozen=True)
class Container:
    """A class of the program."""

    name: str
    parameters: tuple[str, ...]
    flags: tuple[str, ...]
    members: tuple[Member, ...]
    helpers: tuple[Helper, ...]
    block: Block
    result: str


@dataclass(frozen=True)
class Hook:
    """`path`: of the module. `kind`: observe, observe before, change, change before. `late`: put on the simulation, not on the model."""

    path: str
    kind: str
    late: bool


@dataclass(frozen=True)
class Flag:
    """A keyword of the forward, with its default, which the example has, and the other values."""

    name: str
    default: bool | int
    others: tuple[bool | int, ...]


@dataclass(frozen=True)
class Program:
    """`containers`: those inside others first, the model last. `interface`, `returns`: see `interfaces`."""

    seed: int
    form: str
    big: bool
    containers: tuple[Container, ...]
    helpers: tuple[Helper, ...]
    interface: str
    returns: str
    extra: str  # a variable that the model returns too, if the flag of `extra_flag` is set ("": always)
    extra_flag: str
    flags: tuple[Flag, ...]
    hooks: tuple[Hook, ...]

    @property
    def root(self) -> Container:
        return self.containers[-1]


def blocks_of(program: Program) -> Iterator[Block]:
    """Every block that is the body of a function."""
    for container in program.containers:
        yield container.block
        yield from (helper.block for helper in container.helpers)
    yield from (helper.block for helper in program.helpers)


def inner_blocks(statement: Statement) -> tuple[Block, ...]:
    if isinstance(statement, Branch):
        return statement.then, statement.other
    return (statement.body,) if isinstance(statement, Repeat) else ()


def statements_in(block: Block) -> Iterator[Statement]:
    for statement in block:
        yield statement
        for inner in inner_blocks(statement):
            yield from statements_in(inner)


def all_statements(program: Program) -> Iterator[Statement]:
    for block in blocks_of(program):
        yield from statements_in(block)


def map_blocks(program: Program, change: Callable[[Block, tuple[str, ...]], Block]) -> Program:
    """The program with every function's body changed; `change` gets the variables that the body has from outside."""

    def helper(found: Helper) -> Helper:
        return dataclasses.replace(found, block=change(found.block, found.parameters))

    containers = tuple(
        dataclasses.replace(c, block=change(c.block, c.parameters), helpers=tuple(map(helper, c.helpers))) for c in program.containers
    )
    return dataclasses.replace(program, containers=containers, helpers=tuple(map(helper, program.helpers)))
