"""Which way data decided branches, and the float model on that way: quantized data may decide in another way than float data."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

from .loaded import Loaded


def _asks_data(node: ast.If) -> bool:
    """``if x.mean() > 0:``; other branches ask flags, modes and whether there are labels."""
    return isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Gt)


def _parsed(loaded: Loaded) -> ast.Module:
    return ast.parse(Path(loaded.module.__file__).read_text())


def decisions_of(called: Callable[[], object], loaded: Loaded) -> list[bool]:
    """Run `called` until it ends or raises: which way each branch of the program went that data decide, in order."""
    first_lines = {node.lineno: node.body[0].lineno for node in ast.walk(_parsed(loaded)) if isinstance(node, ast.If) and _asks_data(node)}
    asked: dict[FrameType, int] = {}
    found: list[bool] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != loaded.module.__file__:
            return None
        if event == "line":
            if (line := asked.pop(frame, None)) is not None:
                found.append(frame.f_lineno == first_lines[line])
            if frame.f_lineno in first_lines:
                asked[frame] = frame.f_lineno
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(Exception):
            called()
    finally:
        sys.settrace(before)
    return found


class _Decided(ast.NodeTransformer):
    """Asks for the next decision where a branch asks data."""

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if _asks_data(node):
            node.test = ast.copy_location(ast.parse("next_decision()", mode="eval").body, node.test)
        return ast.fix_missing_locations(node)


@contextlib.contextmanager
def going(loaded: Loaded, decisions: list[bool]) -> Iterator[Loaded]:
    """The program whose branches that data decide go as is said; past the last they do not hold."""
    ahead = deque(decisions)
    module = ModuleType(loaded.module.__name__)
    module.__dict__.update(__file__=loaded.module.__file__, next_decision=lambda: bool(ahead) and ahead.popleft())
    with patch.dict(sys.modules, {module.__name__: module}):
        exec(compile(_Decided().visit(_parsed(loaded)), loaded.module.__file__, "exec"), module.__dict__)
        yield Loaded(loaded.program, module)
