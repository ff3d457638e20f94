"""Weights of experts that lie in one parameter, the first axis of which tells the experts apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from qsim.graph.record.tape import Origin, Slot, is_wrapper
from qsim.operations.functions import BIAS_POSITION, MATRIX_PRODUCTS


def stacks_read(
    name: str, parameters: Mapping[str, nn.Parameter], given: Mapping[Slot, Tensor], origins: Mapping[Slot, frozenset[Origin]]
) -> Iterator[tuple[Slot, bool]]:
    """The operands of a function that are members of a stack, or all of one, and whether they are turned, by slot: of a product of
    matrices, those that it multiplies."""
    for slot, t in given.items() if name in MATRIX_PRODUCTS else ():
        if slot == BIAS_POSITION.get(name):
            continue
        names = {o.source for o in origins[slot] if o.kind == "const"}
        parameter = parameters.get(next(iter(names))) if len(names) == len(origins[slot]) == 1 else None
        if parameter is not None and not is_wrapper(t) and (found := turned(parameter.detach(), t.detach())) is not None:
            yield slot, found


def turned(stack: Tensor, operand: Tensor) -> bool | None:
    """Whether an operand is a member of a stack of matrices, or several of them, with the axes of each swapped (True) or not (False); None
    if it is something else. Told by its numbers: what lies between may have copied them, in any order.

    Examples
    --------
    >>> stack = torch.arange(24.0).reshape(2, 3, 4)
    >>> turned(stack, stack[1]), turned(stack, stack[[1, 1, 0]].mT), turned(stack, 2 * stack[0])
    (False, True, None)
    """
    if stack.dim() != 3 or operand.dim() not in (2, 3) or stack.is_meta or operand.numel() == 0:
        return None
    member = operand if operand.dim() == 2 else operand[0]
    for is_turned, matrix in ((False, member), (True, member.T)):
        if matrix.shape == stack.shape[1:] and any(torch.equal(stack[i], matrix) for i in _first_rows(stack, matrix)):
            return is_turned
    return None


def _first_rows(stack: Tensor, matrix: Tensor) -> list[int]:
    """The members that begin with the row that a matrix begins with."""
    found: list[int] = (stack[:, 0] == matrix[0]).all(1).nonzero().flatten().tolist()
    return found
