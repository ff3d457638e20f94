"""From the recorded tape: which layers alone read what a layer or a norm returns, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from qsim.equalization.edges import MIXING
from qsim.graph.record.containers import full_name
from qsim.graph.record.tape import Slot, Step, Tape
from qsim.graph.record.uses import Uses, computed_anew, mode, owner
from qsim.operations.functions import name_of
from qsim.operations.layers import DIMS, LAYERS
from qsim.operations.moves import JOINING

# f(s x) = s f(x) for every s > 0; whether channel by channel, numbers tell.
_HOMOGENEOUS = frozenset({"relu", "leaky_relu", "prelu", "abs", "neg", "mean", "sum", "interpolate", "mul", "rmul", "einsum"})
_HOMOGENEOUS |= {f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)} | JOINING


class Refused(Exception):
    """Carries the reason: one sentence that names the modules."""


@dataclass(frozen=True)
class Candidate:
    """A producer whose output channels are scaled back by its readers, if numbers agree (`qsim.equalization.probe`).

    Attributes
    ----------
    producer : str
        Path of a convolution, a linear layer or a norm.
    readers : tuple of str
        Paths of the layers that read it.
    between : frozenset of str
        Names of the functions on the way, other than those that move values.
    blocked : str
        What else reads it, as a sentence: then part of its channels at most can be scaled. Empty if nothing does.
    """

    producer: str
    readers: tuple[str, ...]
    between: frozenset[str]
    blocked: str = ""


def find_candidates(model: nn.Module, tape: Tape, uses: Uses) -> tuple[list[Candidate], dict[str, str]]:
    """All candidates in the order of the calls, and the reason for every other layer and norm that was called, by its path."""
    ends: dict[str, list[Step]] = {}
    for path, step in _ends(uses.modules, tape):
        ends.setdefault(path, []).append(step)
    found, refused = [], {}
    for path, steps in ends.items():
        try:
            found.append(_candidate(path, steps, tape, uses))
        except Refused as reason:
            refused[path] = str(reason)
    return found, refused


def is_norm(module: nn.Module) -> bool:
    """Whether a module may be one that ends with a multiplication by its weight, channel by channel; trial tells."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    return not isinstance(module, nn.PReLU) and weight is not None and weight.dim() == 1 and own.keys() <= {"weight", "bias"}


def _ends(modules: dict[str, nn.Module], tape: Tape) -> Iterator[tuple[str, Step]]:
    """The last step of each call of a layer or a norm, with its path."""
    wanted = {path for path, m in modules.items() if isinstance(m, LAYERS) or is_norm(m)}
    for call in tape.calls:
        if call.path in wanted and call.steps:
            yield call.path, call.steps[-1]
        for step in call.steps:
            if step.leaf in wanted and step.kind in ("mac", "norm", "batch_norm"):
                yield step.leaf, step


def _candidate(path: str, steps: list[Step], tape: Tape, uses: Uses) -> Candidate:
    module = uses.modules[path]
    if isinstance(module, LAYERS) and not any(name_of(step.func) in DIMS for step in steps):
        raise Refused(f"'{path}' ({type(module).__name__}) has a forward of its own, which uses weight and bias in other ways")
    if (why := uses.obstacle(path)) is not None:
        raise Refused(why)
    walk = _CandidateWalk(path, tape, uses)
    for step in steps:
        if name_of(step.func) in DIMS and (own := computed_anew(step)) is not None:
            raise Refused(f"the {own} of '{path}' is computed anew in each call (a parametrization, weight_norm or the like)")
        walk.follow(step)
    if not walk.readers or (walk.blocked and not walk.may_be_slices):
        raise Refused(walk.blocked or f"no layer reads '{path}'")
    return Candidate(path, tuple(walk.readers), frozenset(walk.between), walk.blocked)


class _CandidateWalk:
    """From what a producer returns to all the layers that read it."""

    def __init__(self, path: str, tape: Tape, uses: Uses) -> None:
        self.path, self.tape, self.uses = path, tape, uses
        self.readers: dict[str, None] = {}
        self.between: set[str] = set()
        self.blocked = ""
        self.sliced = True  # nothing reads the result as it is
        self._seen: set[Step] = set()
        self._blocking: tuple[set[str], set[str]] = set(), set()  # names of steps, in eval and in training

    @property
    def may_be_slices(self) -> bool:
        """Whether parts of the result may go separate ways, and runs in eval mode, which are tried, show all of them."""
        evaluating, training = self._blocking
        return self.sliced and training <= evaluating

    def follow(self, first: Step) -> None:
        left = [first]
        while left:
            step = left.pop()
            if step in self._seen:
                continue
            self._seen.add(step)
            kept = [name for name, origins in self.tape.written.items() if any(o.source is step for o in origins)]
            if kept:
                self.sliced = False  # the next call reads it, which no output of this one shows
                self.blocked = self.blocked or f"what it returns is kept in the buffer '{kept[0]}'"
            for reader in (r for i in step.results for r in self.tape.readers(step, i)):
                if step is first and reader.origin.direct:
                    self.sliced = False
                if (why := self._blocks(reader.step, reader.slot)) is not None:
                    self.blocked = self.blocked or why
                    if reader.step is not None:
                        self._blocking[reader.step.run].add(reader.step.name)
                elif reader.step is not None and self._is_input(reader.step, reader.slot):
                    self.readers[owner(reader.step)] = None
                elif reader.step is not None:
                    self.between.add(name_of(reader.step.func))
                    left.append(reader.step)

    def _is_input(self, step: Step, slot: Slot | None) -> bool:
        return name_of(step.func) in DIMS and slot in (0, "input")

    def _blocks(self, step: Step | None, slot: Slot | None) -> str | None:
        """Why a reader does not hand on the scale of what it reads; None if it does."""
        what = "what it returns"
        if step is None:
            return f"{what} is returned by the model, or read out as a mask or number"
        func, at = name_of(step.func), f"'{step.name}'{mode(step)}"
        if slot is None:
            return f"{what} is read by {at} as a mask or an index"
        if func in DIMS:
            module = self.uses.modules.get(owner(step))
            if not isinstance(module, LAYERS) or not self._is_input(step, slot):
                return f"{what} is read by {at}, a call of {func} with a weight that is no layer's"
            if (obstacle := self.uses.obstacle(owner(step))) is not None:
                return f"{what} is read by {at}: {obstacle}"
            own = computed_anew(step)
            return own and f"{what} is read by {at}, whose {own} is computed anew in each call (a parametrization, weight_norm or the like)"
        if step.kind == "mac" and func not in MIXING | _HOMOGENEOUS:
            return f"{what} is read by {at}, a product with what is no weight of a layer of torch.nn"
        if step.kind == "batch_norm":
            return f"{what} is read by BatchNorm {at}, which was not folded"
        if step.kind == "add":
            return f"{what} is also read by {at}, which adds to it what is not scaled"
        if func == "scaled_dot_product_attention":
            return None if slot in (2, "value") else f"{what} is read by {at} as query or key of a softmax"
        if func in MIXING | _HOMOGENEOUS or (func == "div" and slot == 0):
            return None
        if full_name(step.path, "weight") in self.tape.shapes and is_norm(self.uses.modules[step.path]):
            return f"{what} is also read by the norm '{step.path}'"
        return f"{what} is read by {at}: {func} of a scaled value is not the scaled {func} of it"
