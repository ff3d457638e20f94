"""The hand-written simulation: the operations of a program one by one, with a quantizer wherever the documents say that one stands.

It runs a program three times over: `record` on the example notes who reads what; `observe` on the calibration data, in float, notes
ranges; `simulate` quantizes. It knows nothing of qsim but `qsim.reference`. An operation is found again by where it stands in the
program. One that the example did not reach has no quantizer for its result; weights are quantized wherever they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from .dataflow import ASKED, REMEMBERED, Kind, Name, NotUnderstood, Origin, Site, Value, part_of
from .frames import Frames
from .grids import Grid, Seen, Widths, int32_bias
from .placement import chains, is_read_by_older_names_alone, is_read_by_operations, quantized_results

_LOWEST = -1e9  # what is as low, and has nothing as high beside it, is taken for a mask


class Machine(Frames):
    """Runs operations of a program with grids of some widths."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self.widths, self.mode = widths, "record"
        self.training = False
        self.sites: dict[tuple[Any, ...], Site] = {}
        self.seen: dict[Any, Seen] = {}
        self.before: dict[Site, set[Site]] = {}  # in chains that run as one
        self.states: dict[object, bool] = {}  # buffers that the example reads or writes; whether it writes them
        self.rounded: set[Any] = set()  # sites, names of inputs, and (site, slot) of unknown operands, that have a quantizer
        self.inputs: dict[str, set[tuple[Site | None, int, Origin]]] = {}
        self.weights: set[tuple[int, int]] = set()  # parameters that were multiplied with, by id, with the axis
        self.parts: set[tuple[int, bool]] = set()  # their memory, and whether part of it was read
        self.biases: dict[Site, Any] = {}  # whose input's quantizer decides on the scale of the bias
        self.missed: list[str] = []  # operations that ran where the example did not
        self.closest = 0.5  # how near to a rounding edge any value came, in steps
        self.recorded: dict[object, Site] = {}  # calls of the example
        self.hidden: dict[object, Site] = {}  # calls that no function mode meets, on the calibration data
        self.read: set[object] = set()  # those of them whose result something reads
        self._grids: dict[Any, Grid] = {}

    def _elsewhere(self, kind: Kind) -> Site | None:
        """Where the layer that runs ran in the example, if that is one place: its result has a quantizer, wherever it is called."""
        own = [site for site in self.sites.values() if self.leaf is not None and site.leaf == self.leaf]
        return own[0] if len(own) == 1 and own[0].kind == kind and not (kind.hidden or own[0].is_constant) else None

    def _site(self, kind: Kind) -> Site | None:
        key = self.key()
        if self.mode == "record":
            site = self.sites.setdefault(key, Site(key, kind))
            if site.kind != kind:
                raise NotUnderstood("two operations at one place")
            site.leaf = self.leaf
            return site
        found = self.sites.get(key)
        if found is None or found.kind != kind:
            if kind.family != "loss":  # no quantizer is missed there
                self.missed.append(kind.type)
            return None
        return found

    # What comes in and goes out.

    def input(self, name: str, tensor: Tensor) -> Name:
        """An argument of the model."""
        if self.mode == "record":
            self.inputs.setdefault(name, set())
        return Name(Value(self._round(name, tensor), frozenset([Origin("input", name)])))

    def unknown(self, name: str, tensor: Tensor) -> Name:
        """A tensor that comes in past the arguments, or is made of Python numbers."""
        return Name(Value(tensor, frozenset([Origin("unknown", name)])))

    def constant(self, tensor: Tensor, *, weight: bool = False) -> Name:
        """A parameter or buffer. `weight`: of a layer that multiplies."""
        return Name(Value(tensor, frozenset([Origin("weight" if weight else "const")])))

    def state(self, key: object, tensor: Tensor) -> Name:
        """A buffer that the forward writes: an activation, quantized where it is read."""
        if self.mode == "record":
            self.states.setdefault(key, False)
        elif not self.states.get(key):
            raise NotUnderstood("a buffer that the example does not read and write")
        return self.unknown(f"state {key}", tensor.clone())

    def remember(self, key: object, name: Name) -> None:
        """`name` goes into a buffer."""
        value = self._read(name)
        if value.kinds <= {"const", "weight", "random"} or any(
            o.stale or (o.kind == "site" and o.source.kind.hidden) for o in value.origins
        ):
            raise NotUnderstood("a constant, or what is quantized where it is read, goes into a buffer")
        if self.mode == "record":
            self.states[key] = True
        self._note(None, REMEMBERED, value)

    def zeros(self, tensor: Tensor) -> Name:
        """A state that begins at zero, which every grid holds."""
        return Name(Value(tensor, frozenset([Origin("zero")])))

    def random(self, tensor: Tensor) -> Name:
        return Name(Value(tensor, frozenset([Origin("random")])))

    def output(self, name: Name) -> Tensor:
        """A result of the model."""
        value = self._read(name)
        self._note(None, -1, value)
        return self._leaving(value)

    def through_python(self, name: Name, factor: float) -> Name:
        """A tensor that Python makes of the numbers of another one, which leaves the model if something reads this one."""
        value = self._read(name)
        self._note(None, ASKED, value)
        return Name(Value(self._leaving(value).detach() * factor, frozenset([Origin("unknown", "python")]), made_of=value))

    def _leaving(self, value: Value) -> Tensor:
        if any(o.kind == "site" and o.source.kind.hidden for o in value.origins):
            raise NotUnderstood("the model returns what no function mode meets")
        if any(o.stale for o in value.origins):
            raise NotUnderstood("the model returns by its older name what was changed in place")
        if self.mode == "simulate" and any(o.kind == "site" and is_read_by_older_names_alone(o.source) for o in value.origins):
            raise NotUnderstood("what is quantized where older names read it, returned where the example did not")
        return value.tensor

    def ask(self, question: Callable[..., Any], *names: Name) -> bool:
        """What Python reads out of tensors: none of them is quantized for that."""
        values = [name.read() for name in names]
        for value in values:
            self._note(None, ASKED, value)
        return bool(question(*(value.tensor for value in values)))

    # What runs.

    def compute(self, kind: Kind, function: Callable[..., Tensor], *names: Name) -> Name:
        """An operation with a result of its own."""
        return Name(self._computed(kind, function, names, changes=False))

    def change(self, kind: Kind, function: Callable[..., Tensor], target: Name, *names: Name) -> Name:
        """An operation that works in place on all of `target`. `function` computes its result without doing so."""
        if target.is_view or any(o.stale for o in target.read().origins):
            raise NotUnderstood("in place on a view, or again by an older name")
        if target.value.kinds & {"input", "unknown"}:
            raise NotUnderstood("the model writes into its arguments")
        for origin in target.read().origins:
            if origin.kind == "site" and origin.source.changes:
                origin.source.changed_again = True
        result = self._computed(kind, function, (target, *names), changes=True)
        memory = target.memory
        memory.version, memory.latest = memory.version + 1, result
        return Name(result, memory, memory.version, returned=True)

    def move(self, function: Callable[..., Tensor], *names: Name, fresh: bool = False, numbers: bool = False) -> Name:
        """A function that only moves values. `fresh`: into memory of its own. `numbers`: some that are on no grid are put in beside."""
        values = [self._read(name) for name in names]
        known = [value for value in values if not value.kinds <= {"const", "weight"}] or values
        if any("unknown" in value.kinds for value in known) and len(known) > 1:
            raise NotUnderstood("a tensor of unknown origin put together with others")
        origins = frozenset(o for value in known for o in value.moved())
        if numbers or len(known) < len(values):  # constants
            origins = frozenset(o if o.kind in ("const", "weight") else replace(o, mixed=True) for o in origins)
        result = Value(function(*(value.tensor for value in values)), origins)
        if fresh:
            return Name(result)
        return Name(result, names[0].memory, names[0].memory.version, is_view=True)

    def insert(self, function: Callable[..., Tensor], target: Name, *names: Name, numbers: bool = False) -> None:
        """A function that writes values into part of `target`. `function` returns what is there afterwards."""
        if target.is_view or target.returned or any(o.stale for o in target.read().origins):
            raise NotUnderstood("values put into a view, or by an older name")
        if target.value.kinds & {"input", "unknown"}:
            raise NotUnderstood("the model writes into its arguments")
        if any(o.kind == "site" and o.source.kind.hidden for o in target.read().origins):
            raise NotUnderstood("values put into what is quantized where it is read")
        moved = self.move(function, target, *names, fresh=True, numbers=numbers).value
        target.memory.version, target.memory.latest = target.memory.version + 1, None
        target.value, target.version = moved, target.memory.version

    def _computed(self, kind: Kind, function: Callable[..., Tensor], names: tuple[Name, ...], *, changes: bool) -> Value:
        site, values = self._site(kind), [self._read(name) for name in names]
        constant = all(value.kinds <= {"const", "weight", "random"} for value in values)
        if self.mode == "record":
            self._record(site, values, constant, changes)
        tensors = (
            [self._operand(site, kind, slot, value) for slot, value in enumerate(values)] if not constant else [v.tensor for v in values]
        )
        if site is not None and self.mode == "simulate" and kind.bias is not None and kind.bias < len(values):
            tensors[kind.bias] = self._bias(site, kind, values)
        result = function(*tensors)
        if result.numel() == 0 or bool((result.detach() <= _LOWEST).any()):
            raise NotUnderstood("an empty result, or a mask")
        if constant:
            kinds = {"random"} if any("random" in value.kinds for value in values) else {"const"}
            return Value(result, frozenset(Origin(k, direct=False) for k in kinds))
        origin = Origin("site", site, call=self._call(site)) if site is not None else Origin("unplanned")
        at = site or self._elsewhere(kind)
        before = self.before.get(site, set()) if site is not None and self.mode == "simulate" else set()
        if before and not any(o.direct and o.source in before for o in values[0].origins):
            at = None  # a chain ends whose beginning did not run: its grid is of something else
        return Value(self._round(at, result) if at is not None else result, frozenset([origin]))

    def _call(self, site: Site) -> object:
        """What stands for a call: of the example, and of those that no function mode meets on the calibration data too."""
        if self.mode != "record" and not (site.kind.hidden and self.mode == "observe"):
            return None
        call = object()
        (self.recorded if self.mode == "record" else self.hidden)[call] = site
        return call

    def _read(self, name: Name) -> Value:
        """What a function reads."""
        value = name.read()
        self.read |= {o.call for o in value.origins}
        if value.made_of is not None:
            self._note(None, -1, value.made_of)
        return value

    # Recording and planning.

    def _record(self, site: Site | None, values: list[Value], constant: bool, changes: bool) -> None:
        assert site is not None
        if site.is_constant not in (None, constant) or (constant and site.kind.family == "product"):
            raise NotUnderstood("constants in some calls only, or a product of constants")
        site.is_constant, site.changes = constant, site.changes or changes
        for slot, value in enumerate(values):
            site.operands.setdefault(slot, set()).update(value.origins)
            if site.kind.family == "product" and slot != site.kind.bias and (len(value.origins) > 1 or any(o.mixed for o in value.origins)):
                site.pieced.setdefault(slot, []).append(value.origins)
            axis = site.kind.weight_axis(slot)
            if axis is not None and value.kinds <= {"const", "weight"}:
                self.weights.add((id(value.tensor), axis))
                self.parts.add(part_of(value.tensor))
            self._note(site, slot, value)

    def _note(self, reader: Site | None, slot: int, value: Value) -> None:
        if self.mode != "record":
            return
        for origin in value.origins:
            if origin.kind == "site":
                origin.source.readers.add((reader, slot, origin))
            elif origin.kind == "input":
                self.inputs[origin.source].add((reader, slot, origin))

    def plan(self) -> None:
        """Decide where quantizers stand, once the example was recorded."""
        dropped = {site for call, site in self.recorded.items() if call not in self.read}
        for chain in chains(list(self.sites.values())):
            if any(site in dropped for site in chain[:-1]):
                raise NotUnderstood("a result that some calls hand on in a chain, and others drop")
            for site, after in pairwise(chain):
                self.before.setdefault(after, set()).add(site)
        for after in list(self.before):
            if not {origin.source for origin in after.operands[0]} <= self.before[after]:
                del self.before[after]  # the example shows that it follows something else too
        self.rounded = set(quantized_results(list(self.sites.values())))
        self.rounded |= {name for name, readers in self.inputs.items() if is_read_by_operations(readers)}
        for site in self.sites.values():
            if site.changed_again and any(origin.stale for _, _, origin in site.readers):
                raise NotUnderstood("changed in place again, and read by an older name")
            if any(origin.stale and not origin.direct for _, _, origin in site.readers):
                raise NotUnderstood("changed in place, and read in parts by its older name: the range is that of what is read")
            if not site.is_constant and site.kind.family != "loss":
                self._plan_operands(site)
        self.seen = {at: Seen() for at in self.rounded}
        self.mode = "observe"

    def _plan_operands(self, site: Site) -> None:
        for slot, origins in site.operands.items():
            kinds = {o.kind for o in origins}
            makers = {o.source for o in origins}
            if len(makers) > 1 and any(o.stale and not o.source.kind.hidden for o in origins):
                raise NotUnderstood("changed in place in some of its calls")
            if site.changes and slot == 0 and any(o.kind == "site" and o.source.kind.hidden for o in origins):
                raise NotUnderstood("what no function mode meets, changed in place")
            if site.kind.hidden and any(o.kind == "site" and (o.stale or o.source.kind.hidden) for o in origins):
                raise NotUnderstood("what is quantized where it is read, read by what no function mode meets")
            if "unknown" in kinds and site.kind.hidden:
                raise NotUnderstood("a tensor of unknown origin read by what no function mode meets")
            if "unknown" in kinds:
                if len(kinds) > 1 or not all(o.direct for o in origins) or site.kind.family == "norm":
                    raise NotUnderstood("part of a tensor of unknown origin, or a normalization of one")
                self.rounded.add((site, slot))
            elif any(self._lies_on_no_grid(found) for found in site.pieced.get(slot, ())):
                if site.kind.hidden or any(o.stale or (o.kind == "site" and o.source.kind.hidden) for o in origins):
                    raise NotUnderstood("parts on several grids, some quantized where they are read")
                self.rounded.add((site, slot))
            elif kinds & {"const", "weight"} and not kinds <= {"const", "weight"}:
                raise NotUnderstood("an operand that is constant in some calls only")
        bias, weights = site.kind.bias, [slot for slot, _ in site.kind.weights]
        if not self.widths.bias or bias not in site.operands:
            return
        if {o.kind for o in site.operands[bias]} != {"const"} or not all(o.direct for o in site.operands[bias]):
            return
        (weight,) = weights
        (data,) = [slot for slot in site.operands if slot not in (bias, weight)]
        if {o.kind for o in site.operands[data]} == {"zero"}:
            raise NotUnderstood("the bias of a product with zeros")
        sources = {(site, data)} if (site, data) in self.rounded else {o.source for o in site.operands[data]}
        if any(o.stale or (o.kind == "site" and o.source.kind.hidden) for o in site.operands[data]):
            raise NotUnderstood("the bias behind what is quantized where it is read")
        if (
            len(sources) == 1
            and (source := sources.pop()) in self.rounded
            and {o.kind for o in site.operands[weight]} <= {"const", "weight"}
        ):
            self.biases[site] = (source, weight)

    def _lies_on_no_grid(self, origins: frozenset[Origin]) -> bool:
        """Whether what was put together comes from several grids, or from one and numbers beside."""
        grids = {o.source for o in origins} & self.rounded
        return len(grids) > 1 or (bool(grids) and any(o.mixed for o in origins))

    def calibrated(self) -> None:
        """Choose the grids, once the calibration data was observed."""
        if any(seen.is_empty for seen in self.seen.values()):
            raise NotUnderstood("a quantizer that calibration did not reach")
        if {self.hidden[call] for call in self.hidden.keys() & self.read} & {self.hidden[call] for call in self.hidden.keys() - self.read}:
            raise NotUnderstood("what no function mode meets, read in some of its calls: the range is that of what is read")
        self._grids = {at: self.widths.of_range(seen.low, seen.high) for at, seen in self.seen.items()}
        self.mode, self.notes = "simulate", False

    # Quantizers.

    def _round(self, at: Any, tensor: Tensor) -> Tensor:
        if at not in self.rounded or not tensor.is_floating_point():
            return tensor
        if self.mode == "observe":
            self.seen[at].add(tensor)
        if self.mode != "simulate":
            return tensor
        return self._on_grid(tensor, self._grids[at])

    def _on_grid(self, tensor: Tensor, grid: Grid) -> Tensor:
        if grid.axis is None and tensor.numel():
            steps = (tensor.detach() / grid.scale.to(tensor.dtype)).clamp(grid.low - grid.high, grid.high - grid.low)
            self.closest = min(self.closest, float(((steps - steps.floor()) - 0.5).abs().min()))
        return grid.apply(tensor)

    def _operand(self, site: Site | None, kind: Kind, slot: int, value: Value) -> Tensor:
        axis, tensor = kind.weight_axis(slot), value.tensor
        if site is None and any(o.kind == "site" and o.source.kind.hidden for o in value.origins):
            raise NotUnderstood("what no function mode meets, read on a path that the example did not take")
        if site is None and any(o.stale for o in value.origins):
            raise NotUnderstood("changed in place, and read by its older name on a path that the example did not take")
        if site is None and any(o.kind == "site" and is_read_by_older_names_alone(o.source) for o in value.origins):
            raise NotUnderstood("what is quantized where older names read it, read where the example did not")
        if site is not None and self.mode == "simulate":
            planned = site.operands.get(slot, set())
            older = {o.source for o in value.origins if o.stale} - {o.source for o in planned if o.stale}
            if older and not (site.changes and slot == 0):
                raise NotUnderstood("changed in place, and read by its older name where the example did not")
            if any(o.stale for o in planned) and {o.source for o in planned} != {o.source for o in value.origins}:
                raise NotUnderstood("quantized where it is read by its older name, and something else is read there")
            hidden = {o.source for o in planned if o.kind == "site" and o.source.kind.hidden}
            if "unknown" in {o.kind for o in planned} - value.kinds:
                raise NotUnderstood("a tensor of unknown origin is quantized where it is read, and something else is read there")
            if {o.source for o in value.origins if o.kind == "site" and o.source.kind.hidden} - hidden:
                raise NotUnderstood("what no function mode meets, read where the example did not")
            if hidden and {o.source for o in planned} != {o.source for o in value.origins}:
                raise NotUnderstood("what no function mode meets is quantized where it is read, and something else is read there")
        if site is not None and ("unknown" in value.kinds or (site, slot) in self.rounded):
            return self._round((site, slot), tensor)
        if self.mode != "simulate" or not value.kinds <= {"const", "weight"} or slot == kind.bias or kind.family in ("norm", "loss"):
            return tensor
        if tensor.dim() == 0 or not tensor.is_floating_point():
            return tensor
        if axis is not None:
            if site is None and "weight" not in value.kinds and (id(tensor), axis) not in self.weights:
                raise NotUnderstood("a parameter of no layer, on a path that the example did not take")
            memory, is_part = part_of(tensor)
            if site is None and ((memory, True) in self.parts or (is_part and (memory, False) in self.parts)):
                raise NotUnderstood("other parts of a weight than the example reads")
            if site is None and not tensor.is_contiguous():
                raise NotUnderstood("a weight along other channels than its layer's, on a path that the example did not take")
            return self._on_grid(tensor, self.widths.of_weight(tensor, axis))
        if site is None:
            raise NotUnderstood("a constant on a path that the example did not take")
        return self._on_grid(tensor, self.widths.of_range(tensor.detach().min(), tensor.detach().max()))

    def _bias(self, site: Site, kind: Kind, values: list[Value]) -> Tensor:
        bias = values[kind.bias].tensor
        if site not in self.biases:
            return bias
        source, weight = self.biases[site]
        return int32_bias(bias, self._grids[source], self.widths.of_weight(values[weight].tensor, kind.weight_axis(weight)))
