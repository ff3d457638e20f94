"""What a plan holds: the quantizers, where they stand, and what stays in float."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from qsim.graph.plan.reasons import NOT_REACHED
from qsim.graph.record.routes import Route, Site
from qsim.graph.record.tape import InputSlot, Slot, Step
from qsim.numbers.spec import TensorSpec
from qsim.operations.half import NUMBERS_ARE_OPERANDS, Half


@dataclass(frozen=True)
class PlannedQuantizer:
    """One quantizer of the plan.

    Attributes
    ----------
    key : str
        Its name in `QuantSim.quantizers`.
    role : str
        "weight" (a constant operand of a multiply-accumulate), "constant" (of anything else), "activation", "gate" (inside one that is a
        product with its gate) or "input".
    spec : TensorSpec
        With the axis that this tensor has.
    op : str
        The operation whose result or operand is quantized, with what is fused to it: "conv2d + relu".
    parameter : str, optional
        The parameter or buffer that is quantized: its data decide the range. None: the range is observed while the model runs.
    range : (float, float), optional
        The range, where it is known without data.
    reader : str, optional
        Of a parameter: the operation that reads it.
    attribute : str, optional
        Of a weight that a layer computes and no example reaches: where the layer has it.
    cache : str, optional
        "keys" or "values", of what attention reads from a cache.
    """

    key: str
    role: str
    spec: TensorSpec
    op: str
    parameter: str | None = None
    range: tuple[float, float] | None = None
    reader: str | None = None
    attribute: str | None = None
    cache: str | None = None

    @property
    def operation(self) -> str:
        """Name of the operation, as overrides match it: "layer1.0.conv1", "head.linear", "input"."""
        return self.reader or (self.key if self.role == "input" else self.key.rpartition(".")[0])


class Use(NamedTuple):
    """A quantizer at an operand. `observes` is False where another reader of the same tensor observes it already."""

    key: str
    observes: bool = True


WEIGHTS_LEFT = "leaves weights of"  # what the reason of a target for that says


class LeftFloat(NamedTuple):
    """Something that stays in float: an operation or operand, and why."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True)
class PlannedBias:
    """A bias that is held as int32: its operand's slot, its parameter, and the quantizers whose scales make its scale."""

    slot: Slot
    parameter: str
    op: str
    input: str
    weight: str


@dataclass
class Actions:
    """What happens at one site: quantizers of operands by slot, of outputs by index, of its gate (`qsim.operations.gates`); the bias. And
    what it reads of stacks of weights, which are quantized in the modules that have them."""

    operands: dict[Slot, Use] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    gate: str | None = None
    bias: PlannedBias | None = None
    stacks: dict[Slot, str] = field(default_factory=dict)

    def standing(self) -> Iterator[str]:
        """Keys of the quantizers of operands and results."""
        yield from (use.key for use in self.operands.values())
        yield from self.outputs.values()


@dataclass(frozen=True)
class Elsewhere:
    """What a layer does where no example called it: the function that it calls, and what is quantized there: its weight wherever it is
    read, what it reads with dynamic scales, its result where the plan has one quantizer for that."""

    function: str
    actions: Actions


class Post(NamedTuple):
    """A place where a quantizer stands: at an operand or result of `operation` ("input": at an input of the model).

    It quantizes to integers as long as one of `deciders`, names of operations, runs in integers. `neighbours` make or read the tensor.
    """

    key: str
    operation: str
    deciders: tuple[str, ...]
    neighbours: tuple[str, ...]

    def is_integer(self, formats: Container[str]) -> bool:
        """Whether it does while the operations in `formats` fall back."""
        return any(name not in formats for name in self.deciders)


@dataclass(frozen=True)
class Operation:
    """What runs as one, and falls back as one: a chain, or an operation by itself.

    Attributes
    ----------
    name : str
        Of its first member, as in the keys of quantizers.
    op : str
        "conv2d + relu".
    members : tuple of str
        Names of its operations, as overrides match them.
    quantized : bool
        Whether the plan has it run in integers.
    hidden : tuple of str
        Members that no function mode meets.
    """

    name: str
    op: str
    members: tuple[str, ...]
    quantized: bool
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Neighbours:
    """What a fallback has to know of a site: its floating-point operands, those that it writes into, its number of results; where
    quantizers of operands and results stand; the operations whose results are quantized only where this one reads them; the quantizers
    whose grids hold results that have none of their own; that of its gate; and whether what it changes in place is written to again, and
    not read by what it returns alone."""

    operation: str
    operands: tuple[Slot, ...]
    changed: frozenset[Slot]
    outputs: int
    reads: dict[Slot, Post]
    makers: dict[Slot, tuple[str, ...]]
    results: dict[int, Post]
    joined: dict[int, Post]
    gate: Post | None = None
    stacks: tuple[Post, ...] = ()
    changed_through: bool = False

    def is_concerned(self, formats: Container[str]) -> bool:
        """Whether something else stands here than the plan says while the operations in `formats` fall back."""
        makers = {maker for found in self.makers.values() for maker in found}
        beside = any(not post.is_integer(formats) for post in self.results.values())
        return self.operation in formats or beside or any(maker in formats for maker in makers)


class Unplanned(NamedTuple):
    """An operand that no grid holds, of an operation that the plan has run in integers; `names`: by which a `LeftFloat` may tell why."""

    operation: str
    names: tuple[str, ...]


class Readers(NamedTuple):
    """Those that read a tensor in the examples, by name; whether the model returns it there; the key of what quantizes it where others
    read it, "" if that stays in float; and whether that does the same to a part of it."""

    names: frozenset[str]
    returned: bool
    key: str = ""
    in_parts: bool = False


@dataclass(frozen=True)
class Regions:
    """What falls back, and what a fallback asks: operations by name, the neighbours of each site, the posts of inputs; operands of
    operations in integers that are in float; the sites whose results are in float because of those that read them, and those that change
    in place what others know by an older name; and where constants that a forward makes, of no parameter or buffer, are quantized, with the
    keys of the quantizers."""

    operations: dict[str, Operation] = field(default_factory=dict)
    neighbours: dict[Site, Neighbours] = field(default_factory=dict)
    inputs: dict[InputSlot, Post] = field(default_factory=dict)
    unplanned: list[Unplanned] = field(default_factory=list)
    left_to_readers: dict[Site, Readers] = field(default_factory=dict)
    older_names: dict[Site, Readers] = field(default_factory=dict)
    made: dict[Site, dict[Slot, str]] = field(default_factory=dict)

    @property
    def posts(self) -> list[Post]:
        """All places where quantizers stand, or will if operations fall back."""
        found = [each for around in self.neighbours.values() for each in (around.reads, around.results, around.joined)]
        gates = [around.gate for around in self.neighbours.values() if around.gate is not None]
        stacks = [post for around in self.neighbours.values() for post in around.stacks]
        return [*self.inputs.values(), *(post for posts in found for post in posts.values()), *gates, *stacks]


@dataclass(frozen=True)
class Decisions:
    """What of a plan outlives its being attached: quantizers by key, biases, what stays in float; of its regions the operations by name,
    the places where quantizers stand, and the operands in float of operations in integers; and keys of activations that do the same in the
    passes of a loop or the members of a list, and of those that empty tensors alone reached in the examples; and by key where the tensors
    lay."""

    quantizers: dict[str, PlannedQuantizer]
    biases: list[PlannedBias]
    left: list[LeftFloat]
    operations: dict[str, Operation]
    posts: list[Post]
    unplanned: list[Unplanned]
    alike: list[tuple[str, ...]] = field(default_factory=list)
    empty: frozenset[str] = frozenset()
    devices: dict[str, torch.device] = field(default_factory=dict)
    rounds_numbers: bool = False  # whether half precision rounds numbers that are put in, without any quantizer

    @property
    def weight_keys(self) -> list[str]:
        """The quantizers of parameters, and of weights that layers compute which no example reached."""
        return [key for key, planned in self.quantizers.items() if planned.parameter is not None or planned.attribute is not None]

    @property
    def awaited_weights(self) -> list[str]:
        """Those of `weight_keys` that some call may be expected to read. No layer is expected to run that no example called, if something
        else reads its weight as data, as a table of positions: that has a quantizer where it is read."""
        awaited = {post.key for post in self.posts}
        unreached = {name for name, _, reason in self.left if reason == NOT_REACHED}
        return [key for key in self.weight_keys if key in awaited or f"{self.quantizers[key].reader}.output" in unreached]

    def needed(self, formats: Container[str]) -> set[str]:
        """The quantizers that quantize at some place while the operations in `formats` fall back."""
        return {post.key for post in self.posts if post.is_integer(formats)}

    def released(self, formats: Mapping[str, str]) -> dict[str, str]:
        """All others, with the format that they round to instead: "float32" where that is left to the readers."""
        needed = self.needed(formats)
        found: dict[str, set[str]] = {}
        for post in self.posts:
            if post.key not in needed:
                there = {"float32"} if post.operation == "input" else {formats[name] for name in post.deciders}
                found.setdefault(post.key, set()).update(there)
        return {key: there.pop() if len(there) == 1 else "float32" for key, there in found.items()}


@dataclass
class QuantizationPlan:
    """What `plan` decides.

    Attributes
    ----------
    routes : dict of str to Route
        Of all containers, by path.
    actions : dict of Site to Actions
    quantizers : dict of str to PlannedQuantizer
    inputs : dict of InputSlot to str
        Keys of the quantizers of the model's inputs.
    left : list of LeftFloat
    notes : list of str
        What is odd about the config or the model.
    regions : Regions
    elsewhere : dict of str to Elsewhere
        What leaves do where no example called them, by path.
    fused : dict of Site to Site
        The operation behind each of a chain that runs as one, but for the last.
    halves : dict of Site to Half
        What runs in half precision.
    after : dict of (Site, Slot) to frozenset of Site
        Where a tensor is quantized where it is read: the operations that make it.
    memory : dict of (Site, Slot) to frozenset of Site
        Of these places those that read the very memory which such operations returned.
    through : dict of (Site, Slot) to frozenset of Site
        What Dynamo hides of what makes such tensors.
    again : dict of (Site, Slot) to (Site, Slot)
        Operands that are the same tensor as another one before them, with which they share a quantizer for that alone.
    unseen : list of str
        The weights that are in float because Dynamo hides what reads them.
    mistyped : list of str
        What of the config must be mistyped.
    alike : list of tuple of str
        Activations that do the same in the passes of a loop or the members of a list.
    """

    routes: dict[str, Route]
    actions: dict[Site, Actions]
    quantizers: dict[str, PlannedQuantizer]
    inputs: dict[InputSlot, str]
    left: list[LeftFloat]
    notes: list[str]
    regions: Regions = field(default_factory=Regions)
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)
    fused: dict[Site, Site] = field(default_factory=dict)
    halves: dict[Site, Half] = field(default_factory=dict)
    after: dict[tuple[Site, Slot], frozenset[Site]] = field(default_factory=dict)
    memory: dict[tuple[Site, Slot], frozenset[Site]] = field(default_factory=dict)
    through: dict[tuple[Site, Slot], frozenset[Site]] = field(default_factory=dict)
    again: dict[tuple[Site, Slot], tuple[Site, Slot]] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    alike: list[tuple[str, ...]] = field(default_factory=list)

    @cached_property
    def hidden(self) -> frozenset[Site]:
        """What Dynamo hides, of that after which a tensor is quantized where it is read. What hooks compute nobody looks for."""
        return frozenset(site for found in self.through.values() for site in found if not any(step.hook for step in site.steps))

    @cached_property
    def renamed(self) -> frozenset[Step]:
        """The steps that change a tensor in place which something reads by its older name: what they return was told from that by it."""
        steps = (step for route in self.routes.values() for site in route.sites for step in site.steps)
        read = (origin for step in steps for found in step.operands.values() for origin in found)
        sources = (origin.source for origin in read if origin.kind == "stale" and isinstance(origin.source, Step))
        return frozenset(step for step in sources if step.changed and step.replaceable)  # others return no name of their own

    @cached_property
    def weights(self) -> dict[str, str]:
        """The keys of the quantizers of weights, by the names of the parameters."""
        return {planned.parameter: key for key, planned in self.quantizers.items() if planned.parameter and planned.role == "weight"}

    @cached_property
    def rounded(self) -> dict[str, str]:
        """The keys of what rounds other parameters, biases, to a float format, by the names of the parameters."""
        others = {p.parameter: key for key, p in self.quantizers.items() if p.parameter and not p.spec.has_scale}
        return {parameter: key for parameter, key in others.items() if parameter not in self.weights}

    @cached_property
    def stacks(self) -> dict[str, list[Post]]:
        """The stacks of weights that are quantized, by the names of the parameters, with what reads them."""
        found: dict[str, list[Post]] = {}
        for around in self.regions.neighbours.values():
            for post in around.stacks:
                found.setdefault(post.key, []).append(post)
        return found

    @cached_property
    def runs_as_one(self) -> dict[Site, list[Site]]:
        """What follows others in a chain that runs as one, with these: where nothing else is handed to it, and modes meet these."""
        before: dict[Site, list[Site]] = {}
        for site, following in self.fused.items():
            before.setdefault(following, []).append(site)
        return {following: first for following, first in before.items() if _follows_these_alone(following, first)}

    @property
    def decisions(self) -> Decisions:
        biases = [actions.bias for actions in self.actions.values() if actions.bias is not None]
        values, devices, regions = Counter[str](), dict[str, torch.device](), self.regions
        for key, shape, device in self._met():
            values[key] += shape.numel()
            devices.setdefault(key, device)
        empty = frozenset(key for key, count in values.items() if count == 0)
        rounds = any(half.op in NUMBERS_ARE_OPERANDS for half in self.halves.values())
        return Decisions(
            self.quantizers, biases, self.left, regions.operations, regions.posts, regions.unplanned, self.alike, empty, devices, rounds
        )

    def _met(self) -> Iterator[tuple[str, torch.Size, torch.device]]:
        """What came to the quantizers at operands, results and inputs in the examples, by key."""
        for site, found in self.actions.items():
            for step in site.steps:
                operands = {slot: (shape, step.devices[slot]) for slot, shape in step.shapes.items()}
                yield from ((use.key, *operands[slot]) for slot, use in found.operands.items() if slot in operands)
                yield from ((key, step.results[i], step.devices[None]) for i, key in found.outputs.items() if i in step.results)
                read = [(origin, slot) for slot, origins in step.operands.items() for origin in origins if origin.kind == "input"]
                yield from ((self.inputs[origin.source], *operands[slot]) for origin, slot in read if origin.source in self.inputs)


def _follows_these_alone(following: Site, first: list[Site]) -> bool:
    """Whether all that the examples hand to an operation comes from these, and a mode meets them: it does not in hooks."""
    taken = {origin.source for slot, origins in following.operands().items() if slot in (0, "input") for origin in origins}
    return taken <= {step for site in first for step in site.steps} and all(site.visible for site in first)
