"""Calls of torch's functions, each written as a line of Python, from torch's own list of them with samples of their arguments."""

from __future__ import annotations

import itertools
import linecache
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_functions.written import WRITTEN

# Methods too, which modes are shown as functions of the same name, and what the list has more than once with other options.
EVERY = "QSIM_EVERY_VARIANT" in os.environ
VARIANTS = ("op", "inplace_variant", "operator_variant", "inplace_operator_variant", "method_variant")[: 4 + EVERY]
SAMPLES, LARGEST = 24, 512  # so many samples are tried, of so many elements

OPERATORS = {operator.pow: "**", operator.truediv: "/", operator.floordiv: "//", operator.mod: "%", operator.matmul: "@"}
OPERATORS |= {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.eq: "==", operator.ne: "!="}
OPERATORS |= {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">="}
IN_PLACE = {operator.iadd: "+=", operator.isub: "-=", operator.imul: "*=", operator.itruediv: "/=", operator.ipow: "**="}
IN_PLACE |= {operator.ifloordiv: "//=", operator.imod: "%="}


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function.

    Attributes
    ----------
    function : str
        The function's name in torch's list.
    text : str
        The statement that calls it on ``x``, and on the tensors ``t[1]``, ``t[2]``, ...; the result becomes ``y``.
    tensors : tuple of Tensor
        The first becomes ``x``.
    scope : dict
        What else the text reads.
    moved : str
        The result that holds only values of ``x``, if one does: an operation whose result is quantized is put behind it.
    differentiable : bool
    """

    function: str
    text: str
    tensors: tuple[Tensor, ...]
    scope: dict[str, Any]
    moved: str = ""
    differentiable: bool = False

    @property
    def in_place(self) -> bool:
        return re.search(r"^x\b|[a-z0-9]_\(|\.__i|inplace=True", self.text) is not None

    def is_beside(self, other: Call) -> bool:
        """Whether it may read the same ``x``."""
        same = [(t.data_ptr(), t.shape) for t in self.tensors] == [(t.data_ptr(), t.shape) for t in other.tensors]
        return same and self.differentiable == other.differentiable


class Program:
    """A forward that makes calls one after the other.

    Attributes
    ----------
    inputs : list of Tensor
    wants_gradient : list of bool
        Of the inputs.
    forward : callable
    """

    def __init__(self, calls: list[Call]) -> None:
        self.inputs: list[Tensor] = []
        self.wants_gradient: list[bool] = []
        lines, scope, last, start = ["def forward(self, *t):", "    out = []"], {}, None, 0
        for call in calls:
            if last is None or not call.is_beside(last):
                last, start = call, len(self.inputs)
                self.inputs += call.tensors
                self.wants_gradient += [call.differentiable and t.is_floating_point() for t in call.tensors]
            operand = f"t[{start}] * 1.0" if call.in_place else f"t[{start}]"
            text = re.sub(r"\bt\[(\d+)\]", partial(_counted_from, start), call.text)
            lines += [f"    x = {operand}", f"    {text}", "    out += [y]", *([f"    out += [{call.moved} * 0.7]"] if call.moved else [])]
            scope |= call.scope
        self.forward = defined("\n".join([*lines, "    return out", ""]), scope)

    def run(self, model: Callable[..., Any]) -> list[Any]:
        """Outputs of a model that has this forward, and the gradients of its inputs."""
        given = [t.clone().requires_grad_(wanted) for t, wanted in zip(self.inputs, self.wants_gradient, strict=True)]
        out = tree_leaves(model(*given))
        squares = [(t * t.conj()).real.sum().double() for t in out if isinstance(t, Tensor) and t.requires_grad and is_dense(t)]
        if squares:
            torch.stack(squares).sum().backward()
        return [*out, *(t.grad for t in given)]


def _counted_from(start: int, found: re.Match[str]) -> str:
    return f"t[{start + int(found[1])}]"


def defined(text: str, scope: dict[str, Any]) -> Callable[..., Any]:
    file = f"<torch functions {next(_programs)}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # call sites are told apart by what is written there
    scope = {"torch": torch, "F": F, "math": math, **scope}
    exec(compile(text, file, "exec"), scope)
    return scope["forward"]


_programs, _constants = itertools.count(), itertools.count()


class Arguments:
    """Arguments as text: tensors become ``t[i]``, the first ``x``."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.scope: dict[str, Any] = {}

    def text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            self.tensors.append(value.detach())
            return "x" if len(self.tensors) == 1 else f"t[{len(self.tensors) - 1}]"
        if type(value) in (list, tuple, torch.Size):
            inside = ", ".join(map(self.text, value))
            return f"[{inside}]" if type(value) is list else f"({inside},)" if len(value) == 1 else f"({inside})"
        if value is None or type(value) in (bool, int, str, torch.dtype, EllipsisType) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if type(value) is slice:
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        name = f"k{next(_constants)}"
        self.scope[name] = value
        return name

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self.text, args), *(f"{name}={self.text(value)}" for name, value in kwargs.items())])


def written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: bool = False) -> tuple[str, Arguments]:
    """A call as a statement."""
    given = Arguments()
    name = getattr(function, "__name__", "")
    first = given.text(args[0])
    if function in IN_PLACE:
        return f"x {IN_PLACE[function]} {given.text(args[1])}; y = x", given
    if function in OPERATORS:
        return f"y = {first} {OPERATORS[function]} {given.text(args[1])}", given
    rest = given.call(args[1:], kwargs)
    if method:
        return f"y = {first}.{name}({rest})", given
    called = path_of(function)
    if called is None:
        called = f"k{next(_constants)}"
        given.scope[called] = function
    return f"y = {called}({first}{', ' * bool(rest)}{rest})", given


@cache
def path_of(function: Any) -> str | None:
    """Where a function is found in torch."""
    name = getattr(function, "__name__", "")
    for path, owner in PLACES.items():
        if any(getattr(owner, found, None) is function for found in (name, name.removeprefix(f"{path.split('.')[-1]}_"))):
            found = name if getattr(owner, name, None) is function else name.removeprefix(f"{path.split('.')[-1]}_")
            return f"{path}.{found}"
    return None


PLACES = {"torch": torch, "F": F, "torch.linalg": torch.linalg, "torch.fft": torch.fft, "torch.special": torch.special}


def from_list(missed: Counter[str]) -> Iterator[Call]:
    """Each function of torch's list in each of its variants: function, method, operator, in place. `missed`: reasons, counted."""
    from torch.testing._internal.common_methods_invocations import op_db  # as long as torch itself to import: not while collecting

    names = set()
    for op in op_db:
        if op.name in names and not EVERY:
            continue
        names.add(op.name)
        if torch.float32 not in op.dtypes:
            missed["takes no float32"] += 1
            continue
        if "wrapper_set_seed" in getattr(getattr(op.op, "__code__", None), "co_names", ()) or "empty" in op.name:
            missed["random, or not initialized"] += 1
            continue
        torch.manual_seed(0)
        samples = list(itertools.islice(op.sample_inputs_func(op, "cpu", torch.float32, False), SAMPLES))
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        seen = set()
        for called in (op, *op.aliases):
            for kind in VARIANTS if called is op else VARIANTS[: 5 * EVERY or 1]:
                function = getattr(called, kind, None)
                if function is None or function in seen:
                    continue
                seen.add(function)
                is_method = kind in ("inplace_variant", "method_variant") or name.startswith("__")
                found = first_that_runs(name, function, samples, method=is_method)
                if isinstance(found, str):
                    missed[found] += 1
                else:
                    yield found


def first_that_runs(name: str, function: Any, samples: list[Any], *, method: bool) -> Call | str:
    """A call with the first sample that fits; or a reason why there is none."""
    reason = "no sample fits"
    for sample in samples:
        args = (sample.input, *sample.args)
        if not fits(args):
            continue
        text, given = written(function, args, sample.kwargs, method=method)
        found = examined(name, text, given)
        if isinstance(found, Call):
            return found
        reason = found
    return reason


def fits(args: tuple[Any, ...]) -> bool:
    found = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    if not found or not all(t.layout is torch.strided and t.numel() <= LARGEST for t in found):
        return False
    return found[0].dtype is torch.float32 and found[0].numel() > 1 and tree_leaves(args)[0] is found[0]


def examined(name: str, text: str, given: Arguments) -> Call | str:
    """The call, with what is known of its results once it has run; or a reason why it is not to be compared."""
    call = Call(name, text, tuple(given.tensors), given.scope)
    before = torch.get_rng_state()
    try:
        program = Program([call])
        y = program.forward(None, *(t.clone() for t in program.inputs))[0]
    except Exception:
        return "does not run"
    if not torch.equal(torch.get_rng_state(), before):
        return "random"
    results = {"y": y} if isinstance(y, Tensor) else {f"y[{i}]": t for i, t in enumerate(y)} if isinstance(y, (tuple, list)) else {}
    found = {name: t for name, t in results.items() if isinstance(t, Tensor) and is_dense(t)}
    if not any(t.numel() and (t == t).any() for t in found.values()):
        return "returns no numbers"
    floats = {name: t for name, t in found.items() if t.is_floating_point() and t.numel()}
    values = call.tensors[0].contiguous()
    moved = next((name for name, t in floats.items() if torch.isin(t.float().contiguous(), values).all()), "")
    call = replace(call, moved=moved)
    try:
        differentiable = replace(call, differentiable=True)
        Program([differentiable]).run(partial(Program([differentiable]).forward, None))
    except Exception:
        return call
    return differentiable


def is_dense(t: Tensor) -> bool:
    return t.layout is torch.strided


def from_text() -> Iterator[Call]:
    """The calls that are written out."""
    torch.manual_seed(0)
    for shapes, text in WRITTEN.items():
        tensors = [torch.rand(shape) + 0.1 for shape in shapes]
        tensors[0] = tensors[0] * 2 - 1.1
        for line in filter(None, map(str.strip, text.splitlines())):
            for statement in [line] if line.endswith("y = x") else [f"y = {call}" for call in line.split("; ")]:
                given = Arguments()
                given.tensors = tensors[: 1 + max(map(int, re.findall(r"\bt\[(\d+)\]", statement)), default=0)]
                found = examined(statement.removeprefix("y = "), statement, given)
                if isinstance(found, str):
                    raise ValueError(f"'{statement}' {found}")
                yield found
