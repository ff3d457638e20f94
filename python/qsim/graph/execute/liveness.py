"""What a function does with a value that it hands to a call: where it has it from, and whether it may read that again.

Read from the bytecode, so that it holds on every path, whatever values decide between them. Where that cannot be told the answer is no.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType

# Functions through which a program reads variables that its bytecode does not name.
_INTROSPECTION = frozenset({"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "breakpoint"})
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP", "JUMP_NO_INTERRUPT")
_NOTHING = ("PRECALL", "KW_NAMES", "CACHE", "NOP", "RESUME")
# Instruction -> how many values it takes from the stack and puts on it.
_EFFECTS = {
    **dict.fromkeys(
        ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_CONST", "LOAD_DEREF", "PUSH_NULL", "LOAD_SMALL_INT"), (0, 1)
    ),
    **dict.fromkeys(("UNARY_NEGATIVE", "UNARY_INVERT", "UNARY_NOT"), (1, 1)),
    **dict.fromkeys(("BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP"), (2, 1)),
}


def is_given_away(code: CodeType, instruction: int, method_arguments: int | None = None) -> bool | None:
    """Whether the first argument of a call is read again by the function that makes it.

    Parameters
    ----------
    code : code
    instruction : int
        That of the call: `f_lasti` of a frame of the function.
    method_arguments : int, optional
        For a method: how many arguments it got. In ``y.add_(z)`` the first is none of those that the call names.

    Returns
    -------
    bool or None
        True: it is held by one local variable, which is not read again. False: it is held by none, as the result of another call or of
        an operator is.
        None: neither can be told.
    """
    if not _INTROSPECTION.isdisjoint(code.co_names):
        return None
    return _given_away(code, instruction, method_arguments)


@lru_cache(maxsize=4096)
def _given_away(code: CodeType, instruction: int, method_arguments: int | None) -> bool | None:
    source = _first_argument(code, _call(code, instruction), method_arguments)
    if source is None:
        return None
    if source.opname.startswith(("CALL", "BINARY_OP", "UNARY")):
        return False
    variable = source.opname.startswith("LOAD_FAST") and isinstance(source.argval, str)
    return True if variable and is_dead_after(code, instruction, source.argval) else None


def _first_argument(code: CodeType, call: int, method_arguments: int | None) -> dis.Instruction | None:
    """The instruction that puts the first argument of a call on the stack."""
    given = _instructions(code)[call]
    if given.opname not in ("CALL", "CALL_KW"):
        return None
    named, names = given.arg or 0, given.opname == "CALL_KW"  # of keywords the names are on the stack, too
    if method_arguments is None or method_arguments == named:
        return _putting(code, call, named - 1 + names) if named else None
    if method_arguments != named + 1:
        return None
    method = _putting(code, call, named + names)  # puts the object behind its method
    taken = method is not None and (method.opname == "LOAD_METHOD" or (method.opname == "LOAD_ATTR" and (method.arg or 0) & 1))
    return _putting(code, _index(code, method.offset), 0) if method is not None and taken else None


def _putting(code: CodeType, at: int, above: int) -> dis.Instruction | None:
    """The instruction before the one at `at` that puts on the stack what lies there under `above` values."""
    instructions, targets = _instructions(code), _targets(code)
    while at > 0:
        if at in targets:  # on another path something else may be on the stack
            return None
        at -= 1
        found = instructions[at]
        effect = _effect(found)
        if effect is None:
            return None
        taken, put = effect
        if put > above:
            return found
        above += taken - put
    return None


def _effect(found: dis.Instruction) -> tuple[int, int] | None:
    name, arg = found.opname, found.arg or 0
    if name in _NOTHING:
        return 0, 0
    if name in ("CALL", "CALL_KW"):
        return arg + 2 + (name == "CALL_KW"), 1
    if name == "LOAD_GLOBAL":
        return 0, 1 + (arg & 1)
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        total = dis.stack_effect(found.opcode, arg)
        return 1, 1 + total
    if name in ("BUILD_TUPLE", "BUILD_LIST"):
        return arg, 1
    return _EFFECTS.get(name)


@lru_cache(maxsize=4096)
def is_dead_after(code: CodeType, instruction: int, name: str) -> bool:
    """Whether no path from an instruction on reads a local variable before it is written again.

    Examples
    --------
    >>> def doubled(x):
    ...     y = abs(x)
    ...     return y + y
    >>> call = next(i.offset for i in dis.get_instructions(doubled) if i.opname == "CALL")
    >>> is_dead_after(doubled.__code__, call, "x")
    True
    """
    if name in code.co_cellvars or name in code.co_freevars or not _INTROSPECTION.isdisjoint(code.co_names):
        return False
    instructions = _instructions(code)
    start = _call(code, instruction)
    left, seen = _following(code, start), set[int]()
    while left:
        at = left.pop()
        if at in seen:
            continue
        seen.add(at)
        found = instructions[at]
        names = found.argval if isinstance(found.argval, tuple) else (found.argval,)
        if "FAST" in found.opname and name in names:
            if "LOAD" in found.opname:
                return False
            continue  # stored or deleted
        left += _following(code, at)
    return True


def is_entered(frame: FrameType) -> bool:
    """Whether what a call returns is entered as a context: ``with call():``."""
    code = frame.f_code
    following = [found.opname for found in _instructions(code)[_call(code, frame.f_lasti) + 1 :][:2]]
    return following[:1] in (["BEFORE_WITH"], ["SETUP_WITH"]) or following == ["COPY", "LOAD_SPECIAL"]


@lru_cache(maxsize=512)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


@lru_cache(maxsize=512)
def _offsets(code: CodeType) -> dict[int, int]:
    return {found.offset: index for index, found in enumerate(_instructions(code))}


def _index(code: CodeType, instruction: int) -> int:
    offsets = _offsets(code)
    while instruction not in offsets:  # inside the cache behind an instruction
        instruction -= 2
    return offsets[instruction]


def _call(code: CodeType, instruction: int) -> int:
    """The index of the call that a frame is in. Python 3.11 may make it in the instruction before."""
    at = _index(code, instruction)
    return at + (_instructions(code)[at].opname == "PRECALL")


def _following(code: CodeType, at: int) -> list[int]:
    """Where a program may go on behind an instruction, exceptions included."""
    found = _instructions(code)[at]
    caught = [_index(code, target) for start, end, target in _handlers(code) if start <= found.offset < end]
    jump = [_index(code, found.argval)] if _jumps(found) else []
    ends = found.opname in _ENDS or found.opname in _JUMPS
    return [*caught, *jump, *([] if ends else [at + 1])]


def _jumps(found: dis.Instruction) -> bool:
    return found.opcode in dis.hasjrel or found.opcode in dis.hasjabs


@lru_cache(maxsize=512)
def _targets(code: CodeType) -> frozenset[int]:
    jumps = {_index(code, found.argval) for found in _instructions(code) if _jumps(found)}
    return frozenset(jumps | {_index(code, target) for _, _, target in _handlers(code)})


@lru_cache(maxsize=512)
def _handlers(code: CodeType) -> tuple[tuple[int, int, int], ...]:
    """Ranges of offsets, and where an exception in them leads. Before 3.11 instructions that jump say so."""
    parse = getattr(dis, "_parse_exception_table", None)
    return tuple((entry.start, entry.end, entry.target) for entry in parse(code)) if parse else ()
