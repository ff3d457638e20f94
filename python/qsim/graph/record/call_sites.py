"""Where in a program a function is called: what tells one operation of a model from another, in eager mode and while Dynamo traces.

A function mode learns which function was called, not where. Two branches of a forward may call the same functions in the same order, so
that names alone take one for the other. Python knows: every frame on the stack has the position of the expression that it evaluates,
with line and column. Dynamo runs no frames, but its translators, one for each function that it goes through, know the same positions.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from qsim.folders import QSIM, TORCH
from qsim.graph.record.applied import is_applied
from qsim.graph.record.consumers import without_consumers
from qsim.graph.record.containers import is_leaf
from qsim.operations import recurrent
from qsim.operations.functions import OPENED

_MODULES, _FUNCTIONAL = os.path.join(TORCH, "nn", "modules", ""), os.path.abspath(F.__file__)
_MODULE_CALL = os.path.join(_MODULES, "module.py")
_COMPILED = {(os.path.join(TORCH, "_dynamo", "eval_frame.py"), function) for function in ("compile_wrapper", "_fn")}
_CHECKPOINT = os.path.join(TORCH, "utils", "checkpoint.py")
_PARAMETRIZE = os.path.join(TORCH, "nn", "utils", "parametrize.py")
# What calls the function under a checkpoint, and holds what computes it again: from torch 2.14 on no longer `checkpoint` itself.
_CHECKPOINTING = "_checkpoint_impl" if hasattr(torch.utils.checkpoint, "_checkpoint_impl") else "checkpoint"
_WRITTEN_OUT = os.path.abspath(recurrent.__file__)  # operations of the model, in our words
# What runs the forward of a container, or a part of it, under a mode.
_ALONE, _BEFORE_LAYER = ("layers_alone.py", "run_alone"), ("layers_alone.py", "forward")
BASES = frozenset(
    {("simulated.py", "forward"), ("recorder.py", "forward"), ("resume.py", "__call__"), ("resume.py", "driven"), ("methods.py", "_alone")}
) | {_ALONE}
SIMULATED = os.path.join(QSIM, "graph", "execute", "simulated.py"), "forward"
_CALLING = frozenset({"_wrapped_call_impl", "_call_impl", "inner", "_slow_forward"})

# Python functions that Dynamo puts into its graph whole, without a word to function modes.
_HIDING = {f.__code__ for f in (F.tanh, F.sigmoid, F.hardsigmoid, F.hardswish, F.upsample, F.upsample_nearest, F.upsample_bilinear)}
_HIDING_FILES = tuple(os.path.join(TORCH, *path) for path in (("masked", "_ops.py"), ("nn", "grad.py")))  # all that is in them
_HIDING |= {F.lp_pool3d.__code__}  # this one it goes through, where eager modes get the whole

LEAF = "_qsim_leaf"  # in a leaf's __dict__, where copies keep it (torch.export makes some): its path in the model

Kind = Literal["kept", "dropped", "base", "module call", "layer", "hiding", "checkpoint", "compiled"]


class Spot(NamedTuple):
    """An expression in a file. The columns are None where Python does not tell them (before 3.11)."""

    file: str
    function: str
    line: int
    end_line: int | None
    column: int | None
    end_column: int | None


@dataclass
class CallSite:
    """Where a function was called.

    Attributes
    ----------
    spots : tuple of Spot
        The expressions that were being evaluated, innermost first, up to the forward of the container whose mode is active. What lies
        between them in torch and here is left out, but for the modules of `torch.nn`.
    leaf : nn.Module or None
        The module of `torch.nn` that made the call, if any did.
    hidden : bool
        Inside a function that Dynamo does not show to modes: compiled, the mode will not be asked.
    hook : bool
        In a hook of a module, or in a backward: not of the model.
    parametrizing : bool
        In what `torch.nn.utils.parametrize` has compute a parameter.
    checkpoints : list of frame and int
        The calls of `torch.utils.checkpoint` that the function runs in, innermost first, each with how many of the spots lie inside it.
    asks : bool
        Whether one of the functions asks if it is being compiled.
    asking : set of str
        The functions that ask for the class of something.
    compiled : bool
        In a function that `torch.compile` made, and that the container's forward calls.
    container : nn.Module or None
        The container whose forward it is, where it simulates.
    applied : bool
        Inside the forward of an `autograd.Function`, whose backward is its own. Checkpoints, which are such functions too, do not count.
    alone : bool
        In a leaf that was called by itself, outside of all that is simulated.
    """

    spots: tuple[Spot, ...] = ()
    leaf: nn.Module | None = None
    hidden: bool = False
    hook: bool = False
    parametrizing: bool = False
    checkpoints: list[tuple[FrameType, int]] = field(default_factory=list)
    asks: bool = False
    asking: set[str] = field(default_factory=set)
    compiled: bool = False
    container: nn.Module | None = None
    applied: bool = False
    alone: bool = False

    @property
    def leaf_path(self) -> str:
        """The path of the leaf in its model, "" where there is none."""
        path: str = "" if self.leaf is None else vars(self.leaf).get(LEAF, "")
        return path

    @property
    def is_method_abs(self) -> bool:
        """Whether the innermost expression is ``x.abs()``, which Dynamo shows to modes; not so ``abs(x)``, which is the same in eager."""
        spot = self.spots[0]
        text = linecache.getline(spot.file, spot.end_line or spot.line).encode()
        return re.search(rb"\.\s*(abs|absolute)\s*\(\s*\)\s*$", text[: spot.end_column]) is not None

    @property
    def line(self) -> str:
        """The innermost line outside torch, to be shown: "model.py:12"; "" if there is none."""
        spot = next((spot for spot in self.spots if not spot.file.startswith((TORCH, QSIM))), None)
        return "" if spot is None else f"{os.path.basename(spot.file)}:{spot.line}"


_CLASS = {"type", "__class__"}
_Position = tuple[int, int | None, int | None, int | None]


class _Level(NamedTuple):
    """A function under way: one frame, or one translator of Dynamo's."""

    code: CodeType
    spot: Spot
    line: int
    owner: Any  # its `self`
    frame: FrameType | None
    backward: bool = False  # of an `autograd.Function`, which Dynamo traces beside the forward


def call_site(frame: FrameType | None) -> CallSite:
    """Where `frame` and its callers stand. In eager mode; `traced_call_site` while Dynamo traces."""
    return _read(_frames(frame))


def sites_above(frame: FrameType | None) -> Iterator[CallSite]:
    """Where the containers are called that a frame is in, innermost first. In eager mode."""
    while frame is not None:
        if kind_of_code(frame.f_code) == "base":
            yield call_site(frame.f_back)
        frame = frame.f_back


def traced_call_site() -> CallSite:
    """Where the program stands that Dynamo traces. For functions that Dynamo runs while it traces (`_dynamo_marked_constant`)."""
    return _read(_translators())


def _read(levels: Iterator[_Level]) -> CallSite:
    site, spots, codes = CallSite(), [], []
    inner: _Level | None = None
    for level in levels:
        kind = kind_of_code(level.code)
        site.hook = site.hook or level.backward
        site.parametrizing = site.parametrizing or level.code.co_filename == _PARAMETRIZE
        site.applied = site.applied or (kind != "checkpoint" and is_applied(level.code))
        if kind == "kept":
            spots.append(level.spot)
            codes.append(level.code)
            if not _CLASS.isdisjoint(level.code.co_names) and not level.code.co_filename.startswith(TORCH):
                site.asking.add(f"{level.code.co_name} in {os.path.basename(level.code.co_filename)}")
            site.asks = site.asks or any("compiling" in name for name in (*level.code.co_names, *level.code.co_freevars))
            if site.leaf is None and level.code.co_filename.startswith(_MODULES) and _is_leaf(level.owner):
                site.leaf = level.owner
        elif kind == "hiding":
            site.hidden = True
        elif kind == "module call":
            is_callee = inner is not None and kind_of_code(inner.code) != "module call"
            site.hook = site.hook or (is_callee and level.line not in _forward_lines())
        elif kind == "checkpoint":
            inside = [number for _, number in site.checkpoints]
            if level.frame is not None and len(spots) not in inside:  # a reentrant one is two functions, of which the inner one counts
                site.checkpoints.append((level.frame, len(spots)))
        elif kind == "compiled":
            site.compiled = True
        elif kind == "base":
            site.container, site.alone = level.owner, level.code.co_name == _ALONE[1]
            break
        inner = level
    site.spots = tuple(spots) if site.checkpoints else without_consumers(spots, codes)
    return site


def _frames(frame: FrameType | None) -> Iterator[_Level]:
    while frame is not None:
        code, above = frame.f_code, frame.f_back
        owner = None
        if code.co_name == "forward" and code.co_filename.startswith(_MODULES) and not _runs_container(above):
            owner = frame.f_locals.get("self")  # not of containers: their variables would be kept from dying
        elif _source(code) == SIMULATED:
            owner = frame.f_locals.get("self")
        yield _Level(code, spot_of(code, frame.f_lasti), frame.f_lineno or 0, owner, frame)
        frame = frame.f_back


def _is_leaf(owner: Any) -> bool:
    """Whether a module is an operation of a container, however its forward is called; not so one whose class only derives from such."""
    return isinstance(owner, nn.Module) and LEAF in vars(owner)


def layer_in(frame: FrameType) -> nn.Module | None:
    """The leaf whose function a frame runs, or the module of torch.nn that took the place of one; None for anything else."""
    owner = frame.f_locals.get("self") if frame.f_code.co_filename.startswith(_MODULES) else None
    return owner if _may_be_leaf(owner) else None


def _may_be_leaf(owner: Any) -> bool:
    """Whether it is a leaf, or a module of torch.nn that took the place of one."""
    return _is_leaf(owner) or (isinstance(owner, nn.Module) and is_leaf(owner))


def _runs_container(above: FrameType | None) -> bool:
    """Whether a function runs the forward of a container, or is not known."""
    return above is None or (kind_of_code(above.f_code) == "base" and above.f_code.co_name == "forward")


def traced_caller() -> CodeType | None:
    """The innermost function that Dynamo traces outside of this package. For functions that Dynamo runs while it traces."""
    translator = translator_now()
    while translator is not None and translator.f_code.co_filename.startswith(QSIM):
        translator = getattr(translator, "parent", None)
    return None if translator is None else translator.f_code


def translator_now() -> Any:
    """What traces the innermost function for Dynamo now; None outside of that."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(found := frame.f_locals.get("self"), InstructionTranslatorBase):
        frame = frame.f_back
    return None if frame is None else found


def _translators() -> Iterator[_Level]:
    translator = translator_now()
    while translator is not None:
        code, instruction = translator.f_code, translator.current_instruction
        at = getattr(instruction, "positions", None)
        line = translator.lineno
        position: _Position = (line, None, None, None) if at is None else (at.lineno, at.end_lineno, at.col_offset, at.end_col_offset)
        owner = translator.symbolic_locals.get("self") if code.co_name == "forward" else None
        realize = getattr(owner, "realize", None)
        variable = owner if realize is None else realize()
        owner = getattr(variable, "value", None)
        if _may_be_leaf(owner):
            _guard_path(translator, variable)
        spot = _spot(code, position)._replace(file=_source(_defining(translator))[0])
        yield _Level(code, spot, line, owner, None, _is_backward(translator))
        translator = getattr(translator, "parent", None)


def _guard_path(translator: Any, leaf: Any) -> None:
    """Have Dynamo guard what a leaf is called in its model, or that it is not of the model: another of its class may take its place."""
    from torch._dynamo.variables import ConstantVariable, VariableTracker

    path = [ConstantVariable.create(LEAF), ConstantVariable.create("")]
    VariableTracker.build(translator, getattr).call_function(translator, [leaf, *path], {}).as_python_constant()


def _defining(translator: Any) -> CodeType:
    """The code of the function that a function stands in, where that is under way, or its own: of functions inside of others that are
    equal but for their file, in copies of a module, Dynamo takes one for all."""
    above, code = translator, translator.f_code
    while above is not None and code.co_flags & inspect.CO_NESTED:
        if above.f_globals is translator.f_globals and not above.f_code.co_flags & inspect.CO_NESTED:
            return above.f_code  # type: ignore[no-any-return]
        above = getattr(above, "parent", None)
    return code  # type: ignore[no-any-return]


def _is_backward(translator: Any) -> bool:
    """Whether Dynamo traces the backward of an `autograd.Function` there."""
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable

    code = translator.f_code
    first = [translator.symbolic_locals.get(name) for name in code.co_varnames[:1]]
    return code.co_name in ("backward", "vjp") and any(isinstance(variable, AutogradFunctionContextVariable) for variable in first)


@cache
def _forward_lines() -> frozenset[int]:
    """The lines on which `nn.Module.__call__` calls the forward, and no hook."""
    with open(_MODULE_CALL, encoding="utf-8") as source:
        return frozenset(number for number, line in enumerate(source, 1) if any(f"{call}(" in line for call in _FORWARDS))


_FORWARDS = "forward_call", "self.forward", "self._compiled_call_impl"
_known: dict[int, tuple[CodeType, Kind]] = {}  # by id, which a code keeps while it is in here: its hash would be slow
_spots: dict[tuple[int, int], Spot] = {}


def kind_of_code(code: CodeType) -> Kind:
    """What a function means for the place of a call that goes through it."""
    known = _known.get(id(code))
    if known is None:
        known = _known[id(code)] = code, _kind(code)
    return known[1]


def _kind(code: CodeType) -> Kind:
    file, function = _source(code)
    if file.startswith(QSIM):
        name = os.path.basename(file), function
        return "base" if name in BASES else "layer" if name == _BEFORE_LAYER else "kept" if file == _WRITTEN_OUT else "dropped"
    if not file.startswith(TORCH):
        return "kept"
    if file == _MODULE_CALL:
        return "module call" if function in _CALLING else "dropped"
    if file == _CHECKPOINT:
        runs = function == _CHECKPOINTING or (function == "forward" and code.co_varnames[:1] == ("ctx",))  # CheckpointFunction's
        return "checkpoint" if runs else "dropped"
    if (file, function) in _COMPILED:
        return "compiled"
    if code in _HIDING or file in _HIDING_FILES:
        return "hiding"
    if "handle_torch_function" in code.co_names and not code.co_name.endswith(OPENED):
        return "dropped"  # asks the mode itself in eager mode; Dynamo asks without running it
    return "kept" if file.startswith(_MODULES) or file == _FUNCTIONAL else "dropped"


def spot_of(code: CodeType, instruction: int) -> Spot:
    """The expression that an instruction belongs to."""
    key = id(code), instruction
    spot = _spots.get(key)
    if spot is None:
        kind_of_code(code)  # keeps the id
        spot = _spots[key] = _spot(code, _position(code, instruction))
    return spot


def _spot(code: CodeType, position: _Position) -> Spot:
    file, function = _source(code)
    return Spot(file, function, *position)


def _position(code: CodeType, instruction: int) -> _Position:
    if sys.version_info >= (3, 11):
        at = list(code.co_positions())[instruction // 2] if instruction >= 0 else (None, None, None, None)
        return (at[0] or code.co_firstlineno, *at[1:])
    import dis

    line = code.co_firstlineno
    for start, number in dis.findlinestarts(code):
        if start > instruction:
            break
        line = number
    return line, None, None, None


def is_written_out(spot: Spot) -> bool:
    """Whether an expression belongs to what we write in place of a composite function of torch's."""
    return spot.file == _WRITTEN_OUT


def spot_in(spot: Spot, code: CodeType) -> bool:
    """Whether an expression is one of a function."""
    return (spot.file, spot.function) == _source(code) and spot.line >= code.co_firstlineno


def _source(code: CodeType) -> tuple[str, str]:
    """File and name of a function, whichever copy of generated code it is."""
    file = code.co_filename
    return "<eval_with_key>" if file.startswith("<eval_with_key>") else file, code.co_name  # torch.fx numbers them
