"""What a config says of the tensors of a recording, and where half precision begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qsim.config.config import Config
from qsim.config.override import SiteInfo
from qsim.config.profile import selects
from qsim.graph.plan import reasons
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.placement import Placement
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import InputSlot, Origin, Slot, Tape
from qsim.numbers.spec import TensorSpec
from qsim.operations.onnxruntime import FOLLOWING, LEAVING_FLOAT

_KERNEL_BITS = 8  # no integer kernel takes more


def is_half(spec: TensorSpec | None) -> bool:
    """Whether a tensor is cast to a float format: without a range to choose, it can be rounded wherever it is read."""
    return spec is not None and not spec.has_scale


class Specs:
    """A config applied to a recording.

    An operation that the config leaves in float beside others in half precision reads and returns float32: engines put a cast where
    a tensor goes from the one to the other. So what is in half precision rounds what it reads of the others, and inputs of the model
    that are read in float32 are not rounded before.

    Attributes
    ----------
    flow : Dataflow
    placement : Placement
    uncast : list of InputSlot
        Inputs of the model that something reads in float32.
    copied : set of InputSlot
        Inputs that are quantized before the model begins: what it writes into is not what its caller gave.
    """

    def __init__(self, tape: Tape, config: Config) -> None:
        self._tape, self._config, self._unchanged = tape, config, replace(config, overrides=())
        self._known: dict[tuple[tuple[SiteInfo, ...], str], TensorSpec | None] = {}
        profile = config.profile
        self.flow = Dataflow(tape, profile.chains, profile.half_chains, self._has_cast_between, self.is_half, profile.gates)
        self.placement = Placement(self.flow, profile, self.is_half, self._takes_input, self._may_run, self._follows)
        self.uncast = self._uncast_inputs()
        replaced = tape.inputs.keys() - tape.unreplaced - {*self.uncast}
        self.copied = {slot for slot in replaced if self._takes_input(slot) and self.of_input(slot) is not None}

    def of(self, site: Site, role: str) -> TensorSpec | None:
        """For "weight" or "activation" of an operation."""
        return self._spec_of([self.flow.infos[site]], role)

    def _spec_of(self, infos: Sequence[SiteInfo], role: str) -> TensorSpec | None:
        """What the config says, asked once: a plan wants to know of each operation some twenty times."""
        key = tuple(infos), role
        if key not in self._known:
            self._known[key] = self._config.spec_of(infos, role)
        return self._known[key]

    def is_half(self, *infos: SiteInfo, role: str = "activation") -> bool:
        """Whether an operation, or several that run as one, are in half precision: everything that they read and return is rounded."""
        return is_half(self._spec_of(infos, role))

    def _takes_input(self, slot: InputSlot) -> bool:
        return self._config.profile.model_input or is_half(self.of_input(slot))

    def _may_run(self, site: Site) -> bool:
        """Whether an operation may run in an integer kernel, as far as anybody knows."""
        kernels = self._config.profile.kernels
        if not kernels or self._is_no_kernels(site):
            return True
        return (selects(kernels, site.type) or site.moves) and (self.of(site, "activation") or self.of(site, "weight")) is not None

    def _follows(self, site: Site) -> bool:
        """Whether it depends on what reads a result if that needs a grid: where the kernels of the runtime are known, and take these
        numbers. Products with a bias in float have none that leave their result so."""
        if not self._config.profile.kernels or self._is_no_kernels(site):
            return False
        if site.type in FOLLOWING:
            return True
        return site.type in LEAVING_FLOAT and (self._config.bias is not False and selects(self._config.profile.bias, site.type))

    def _is_no_kernels(self, site: Site) -> bool:
        """Whether the config asks for numbers that no integer kernel takes: wherever it does, they are simulated."""
        activation = self.of(site, "activation")
        return activation is not None and (activation.is_float or activation.bits > _KERNEL_BITS)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        return self._tape.shapes[name]

    def of_chain(self, chain: Sequence[Site]) -> TensorSpec | None:
        """For the result of a chain: an override that names any operation of it applies, the last override's fields last."""
        return self._spec_of([self.flow.infos[site] for site in chain], "activation")

    def reason(self, sites: Sequence[Site], role: str = "activation") -> str:
        """Why what is in float for all that the config says of it is so: by a rule of the target, or by what the config has itself."""
        infos, profile = [self.flow.infos[site] for site in sites], self._config.profile
        if getattr(self._config, role) is None or self._unchanged.spec_of(infos, role) is not None:
            return reasons.BY_CONFIG
        found = [rule.op_type for rule in profile.rules if getattr(rule, role) is None and any(map(rule.matches, infos))]
        return reasons.BY_TARGET.format(profile.name, (found and found[-1]) or sites[0].type)

    def of_input(self, slot: InputSlot) -> TensorSpec | None:
        """For an input of the model."""
        return self._spec_of([self.input_info(slot)], "activation")

    def input_info(self, slot: InputSlot) -> SiteInfo:
        return SiteInfo(self.input_key(slot), "input", is_first=True)

    def input_key(self, slot: InputSlot) -> str:
        """What an input is called: "input" where there is one, else by position, keyword or path."""
        if len(self._tape.inputs) == 1:
            return "input"
        return slot if isinstance(slot, str) else f"input[{slot}]" if isinstance(slot, int) else f"input{list(slot)}"

    def is_cast(self, site: Site, origins: Sequence[Origin]) -> bool:
        """Whether an operand is in float32 by the config, and `site`, which reads it, in half precision."""
        return is_half(self.of(site, "activation")) and any(map(self._is_left_in_float, origins))

    def is_written_in_float(self, site: Site, slot: Slot) -> bool:
        """Whether an operation in half precision reads what the config leaves in float32, and writes its result there: it is rounded in
        its place, as no quantizer does it."""
        return all(slot in step.changed for step in site.steps) and site.visible and self.is_cast(site, site.operands().get(slot, ()))

    def _is_left_in_float(self, origin: Origin) -> bool:
        if origin.kind == "input" or self.flow.kind(origin) == "other":
            return origin.source in self.uncast or not self.placement.takes(origin)
        producer = self.flow.site_of[origin.source] if origin.kind in ("step", "stale") else None
        if producer not in self.flow.chains or self.flow.is_constant(producer):
            return False
        return not self.placement.makes(producer) or self.of_chain(self.flow.chains[producer]) is None

    def _has_cast_between(self, first: SiteInfo, then: SiteInfo) -> bool:
        specs = [self._spec_of([info], "activation") for info in (first, then)]
        return None in specs and any(map(is_half, specs))

    def _uncast_inputs(self) -> list[InputSlot]:
        readers = [site for site in self.flow.sites if self.of(site, "activation") is None]
        read = {o.source for site in readers for origins in site.operands().values() for o in origins if o.kind == "input"}
        return [slot for slot in self._tape.inputs if slot in read - self._tape.unreplaced and is_half(self.of_input(slot))]
