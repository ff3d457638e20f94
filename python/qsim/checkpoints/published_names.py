"""What published files call the tensors of a model of transformers 5, which has experts in one parameter: there each has a weight.

The names are transformers': its table of conversions, turned round, is asked with numbers that say where they come from. Source:
github.com/huggingface/transformers, conversion_mapping and core_model_loading (``revert_weight_conversion``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STACK = 3  # dimensions of several weights in one parameter: experts, output channels, input channels
_MODULES = ("transformers.modeling_utils", "transformers.core_model_loading")
_UNKNOWN = "what files call the parts of such a parameter is known of transformers' models alone"


class ExpertPart(NamedTuple):
    """A weight of a file: rows of one expert of a parameter.

    Attributes
    ----------
    stack : str
        The parameter.
    expert, start, stop : int
        Which expert, and which of its rows.
    columns : int
        Of the parameter's last axis.
    """

    stack: str
    expert: int
    start: int
    stop: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.stop - self.start, self.columns


@dataclass(frozen=True)
class FileLayout:
    """How files have the tensors of a model.

    Attributes
    ----------
    parts : mapping of str to ExpertPart
        By the names of files, expert by expert.
    names : mapping of str to str
        What files call other tensors, by the model's names.
    problems : mapping of str to str
        Parameters of three dimensions that are not split, and why.
    """

    parts: Mapping[str, ExpertPart] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def stacks(self) -> dict[str, dict[str, ExpertPart]]:
        """The parts of each parameter that files have in parts."""
        found: dict[str, dict[str, ExpertPart]] = {}
        for name, part in self.parts.items():
            found.setdefault(part.stack, {})[name] = part
        return found

    def called(self, name: str) -> list[str]:
        """What files call a tensor of the model, or the weights that it has in parts."""
        return [*self.stacks[name]] if name in self.stacks else [self.names.get(name, name)]


def published(model: nn.Module, more: Iterable[str] = ()) -> FileLayout:
    """The layout of a model's files; without parts where they are as the model. `more`: names in it besides those of its state."""
    tensors = model.state_dict(keep_vars=True)
    shapes = {name: t.shape for name, t in tensors.items() if isinstance(t, nn.Parameter) and t.dim() == STACK and t.numel()}
    if not shapes:
        return FileLayout()
    models, library = map(sys.modules.get, _MODULES)
    if models is None or library is None or not isinstance(model, models.PreTrainedModel):
        return FileLayout(problems=dict.fromkeys(shapes, _UNKNOWN))
    names = [*tensors, *more]
    found = _asked(library, model, names, shapes)  # as it was loaded, which tells of prefixes
    if not found.parts:
        found = _asked(library, _NotLoaded(model), names, shapes)  # as its family is published
    return found if found.parts else FileLayout(problems=found.problems)


class _NotLoaded:
    """A model, as if it had not come out of a file."""

    def __init__(self, model: Any) -> None:
        self.config, self.base_model_prefix, self.named_modules = model.config, model.base_model_prefix, model.named_modules


def _asked(library: Any, model: Any, names: Iterable[str], shapes: Mapping[str, torch.Size]) -> FileLayout:
    first, probes, stacks = 0, {}, []
    for name in names:
        if name not in shapes:
            probes[name] = torch.empty(0, dtype=torch.bool)
            continue
        experts, rows, _ = shapes[name]
        probes[name] = torch.arange(first, first + experts * rows).reshape(experts, rows, 1)
        stacks.append((first, name))
        first += experts * rows
    try:
        turned = library.revert_weight_conversion(model, dict(probes))
    except Exception as error:  # whatever another's code says of a model that it cannot turn round
        return FileLayout(problems=dict.fromkeys(shapes, f"transformers cannot turn its conversion of files round: {error}"))
    own = {id(t): name for name, t in probes.items()}
    renamed = {own[id(t)]: name for name, t in turned.items() if id(t) in own}
    if mixed := [name for name, t in turned.items() if id(t) not in own and t.dtype == torch.bool]:
        return FileLayout(problems=dict.fromkeys(shapes, f"transformers makes {mixed[0]!r} of files from other tensors than experts, too"))
    every = {name: _part(name, t, stacks, shapes) for name, t in turned.items() if id(t) not in own}
    split = {name: part for name, part in every.items() if part is not None}
    problems = {}
    for name, (experts, rows, _) in shapes.items():
        covered = sum(part.stop - part.start for part in split.values() if part.stack == name)
        if name in renamed:
            problems[name] = "transformers' table of conversions has no weights of single experts for it"
        elif covered != experts * rows:
            problems[name] = "published files have its experts turned, or other than in rows that follow each other"
    return FileLayout({name: part for name, part in split.items() if part.stack not in problems}, renamed, problems)


def _part(name: str, rows: Tensor, stacks: list[tuple[int, str]], shapes: Mapping[str, torch.Size]) -> ExpertPart | None:
    """Where the rows of a weight come from, if they follow each other in one expert."""
    if rows.dim() != STACK - 1 or rows.shape[1] != 1 or not name.endswith(".weight"):
        return None
    begin = int(rows[0, 0])
    first, stack = max(pair for pair in stacks if pair[0] <= begin)
    expert, start = divmod(begin - first, shapes[stack][1])
    stop = start + len(rows)
    _, count, columns = shapes[stack]
    if stop > count or not torch.equal(rows[:, 0], torch.arange(begin, begin + len(rows))):
        return None
    return ExpertPart(stack, expert, start, stop, columns)
