"""Who uses a module's parameters: what rewrites a module has to know that nobody else does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from qsim.graph.record.containers import full_name
from qsim.graph.record.tape import Call, Origin, Step, Tape
from qsim.operations.functions import BIAS_POSITION, WEIGHT, name_of
from qsim.operations.layers import DIMS
from qsim.runs.offloaded import has_hooks


class Uses:
    """The modules and tensors of a recorded model with the steps that use them.

    Attributes
    ----------
    modules : dict of str to Module
    products : list of Step
        What modules compute with their parameters: a layer may pad before that.
    """

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        self.modules = dict(model.named_modules())
        self.products = [step for step in tape.steps if step.kind == "batch_norm" or name_of(step.func) in DIMS]
        calls = [*self.products, *(step for call in tape.calls for step in _first_reads(call))]
        self._calls = Counter((owner(step), step.run, step.example) for step in calls)
        self._names: dict[int, list[str]] = defaultdict(list)  # of the parameters and buffers at a memory address
        for path, module in self.modules.items():
            for own, t in _tensors(module):
                if t.layout is torch.strided:  # others have no address
                    self._names[t.data_ptr()].append(full_name(path, own))
        self._users: dict[str, list[Step | None]] = defaultdict(list)  # of a parameter or buffer; None: the model returns it
        for step in tape.steps:
            for name in _constants(o for found in (*step.operands.values(), step.side) for o in found):
                self._users[name].append(step)
        for name in _constants(tape.results):
            self._users[name].append(None)

    def obstacle(self, name: str) -> str | None:
        """Why a module may not be rewritten, as a sentence; None if it is called once, unobserved, with parameters nobody else uses."""
        module = self.modules[name]
        counts = {(run, example): count for (path, run, example), count in self._calls.items() if path == name}
        if not any(run == 0 for run, _ in counts):
            return f"'{name}' is not called in eval mode with these example inputs"
        if (calls := max(counts.values())) > 1:
            return f"'{name}' is called {calls} times in one forward"
        if has_hooks(module):
            return f"'{name}' has hooks, which would see other tensors"
        for own, t in _tensors(module):
            full = full_name(name, own)
            others = [n for n in self._names[t.data_ptr()] if n != full and t.data_ptr()]
            if others:
                return f"the {own} of '{name}' is shared with '{others[0]}'"
            for user in self._users[full]:
                if user is None or owner(user) != name:
                    return f"the {own} of '{name}' is also {reading(user)}"
        return None


def owner(step: Step) -> str:
    """Path of the module that the step belongs to."""
    return step.leaf or step.path


def computed_anew(step: Step) -> str | None:
    """Which of weight and bias a convolution or linear layer does not read as its parameter, but computed from it; None if neither."""
    func = name_of(step.func)
    for own, slot in (("weight", WEIGHT[func][0]), ("bias", BIAS_POSITION[func])):
        read = own in step.operands or slot in step.operands
        if read and full_name(owner(step), own) not in (step.constants.get(own), step.constants.get(slot)):
            return own
    return None


def mode(step: Step) -> str:
    return " in training mode" if step.run else ""


def reading(user: Step | None) -> str:
    return f"read by '{user.name}'{mode(user)}" if user else "returned by the model or read out as a mask or number"


def _first_reads(call: Call) -> Iterator[Step]:
    """What reads the weight of its module in a call and is none of `Uses.products`; once for a container that reads it again."""
    seen = False
    for step in call.steps:
        product = step.kind == "batch_norm" or name_of(step.func) in DIMS
        if not product and full_name(owner(step), "weight") in step.constants.values() and (step.leaf or not seen):
            seen = seen or not step.leaf
            yield step


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The module's own parameters and buffers."""
    return [*module.named_parameters(recurse=False, remove_duplicate=False), *module.named_buffers(recurse=False, remove_duplicate=False)]


def _constants(origins: Iterable[Origin]) -> set[str]:
    return {o.source for o in origins if o.kind == "const" and o.source is not None}
