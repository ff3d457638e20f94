"""What an operation of the programs is: how it is written in Python, and what the hand-written simulation computes in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .dataflow import Kind, Name

ALL, FLAT = ("rows", "seq", "img"), ("rows", "seq")
Simulate = Callable[..., Name | None]  # of a machine, the operands, and the module's attributes that it reads


@dataclass(frozen=True)
class Operation:
    """`source`: an expression of ``{0}``, ``{1}`` and the module's attributes ``{a0}``, ``{a1}``.

    Attributes
    ----------
    simulate : callable or None
        None: the hand-written simulation has no rule for it.
    attributes : tuple of str
        What it wants of the module: "vector" (parameter of 8), "matrix" (8 x 8), "buffer" (of 8), "layer weight", "layer bias".
    in_place : bool
        Writes into its first operand. `statement`: is no expression (``y += z``).
    rough : bool
        Jumps: a small error may become a large one, so nothing is said of its 16 bits.
    aliases : bool
        The result may lie in the memory of an operand.
    definitions : str
        What its file needs at the top.
    rare : bool
        It stands in some programs only: where the hand-written simulation has no rule for it, it would say nothing of most programs.
    """

    name: str
    source: str
    simulate: Simulate | None
    operands: int = 1
    forms: tuple[str, ...] = ALL
    attributes: tuple[str, ...] = ()
    in_place: bool = False
    statement: bool = False
    rough: bool = False
    aliases: bool = False
    definitions: str = ""
    rare: bool = False
    weight: int = 2


def unary(kind: Kind, function: Callable[[Tensor], Tensor]) -> Simulate:
    return lambda m, x: m.compute(kind, function, x)


def binary(kind: Kind, function: Callable[[Tensor, Tensor], Tensor]) -> Simulate:
    return lambda m, x, y: m.compute(kind, function, x, y)


def moved(function: Callable[..., Tensor], *, fresh: bool = False) -> Simulate:
    return lambda m, *names: m.move(function, *names, fresh=fresh)
