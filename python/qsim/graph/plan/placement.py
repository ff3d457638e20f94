"""What a target's profile says about the operations of a recording, before any config: where its tensors are to be quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qsim.config.override import SiteInfo
from qsim.config.profile import Profile, selects
from qsim.graph.plan.actions import WEIGHTS_LEFT
from qsim.graph.plan.computed_weights import ancestors
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.rules import is_bias, is_multiplied, stays_float, weight_axes
from qsim.graph.plan.sharing import shared_scales
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import InputSlot, Origin, Slot
from qsim.operations.onnxruntime import COPYING, FOLLOWING, LEAVING_FLOAT


class Placement:
    """A profile applied to a dataflow.

    Parameters
    ----------
    flow : Dataflow
    profile : Profile
    is_half : callable
        As `qsim.graph.plan.specs.Specs.is_half`: in half precision every operation rounds.
    takes_input : callable
        Whether an input of the model is to be quantized as it enters.
    may_run : callable
        Whether an operation may run in an integer kernel of the target, as far as its type and the config say.
    follows : callable
        Whether it depends on what reads a result if that needs a grid: not where numbers are simulated that no integer kernel takes.

    Attributes
    ----------
    shared : dict of Made to Site
        For each tensor that shares its scale, the operation by whose name the shared quantizer goes.
    """

    def __init__(
        self,
        flow: Dataflow,
        profile: Profile,
        is_half: Callable[..., bool],
        takes_input: Callable[[InputSlot], bool],
        may_run: Callable[[Site], bool],
        follows: Callable[[Site], bool],
    ) -> None:
        self.flow, self.profile, self._in_half, self._may_run = flow, profile, profile.in_half(), may_run
        self._is_half, self._takes_input = is_half, takes_input
        self._following = set(filter(follows, flow.sites))
        self._follow_integers: set[Site] = set()
        self._find_followers()
        self._in_float_anyway: dict[Site, bool] = {}  # what was asked of `needs_no_grid`: thousands may read one result, and each asks
        self._residual: set[tuple[Site, Slot]] = set()
        self._handed_over: set[Site] = set()
        for site in flow.sites:
            self._note_residual(site)
        self._joined = self._joined_sites()
        sharing = [site for site in flow.sites if site in self._joined or (self._shares(site) and self.makes(site))]
        self.shared = shared_scales(flow, sharing)

    def profile_of(self, *sites: Site) -> Profile:
        """The rules for what a site reads, or a chain of them returns."""
        return self._in_half if self._is_half(*(self.flow.infos[site] for site in sites)) else self.profile

    def takes(self, origin: Origin) -> bool:
        """Whether what no operation of the model made is to be quantized as it enters."""
        return self._takes_input(origin.source) if origin.kind == "input" else self.profile.model_input

    def makes(self, site: Site) -> bool:
        """Whether results of `site`, the end of a chain, are to be quantized where they are made."""
        if self.profile.model_output is True and site in self.flow.returned:
            return True
        profile = self.profile_of(*self.flow.chain_of(site))
        wanted = selects(profile.outputs, site.type) and not self._is_left_outside(site) and site not in self._handed_over
        return wanted and not self.needs_no_grid(site)

    def needs_no_grid(self, site: Site) -> bool:
        """Whether all that reads the results of `site`, the end of a chain, runs in float, and no kernel of the chain asks for integers."""
        if site not in self._in_float_anyway:
            self._in_float_anyway[site] = self._is_in_float_anyway(site)
        return self._in_float_anyway[site]

    def _is_in_float_anyway(self, site: Site) -> bool:
        chain, readers = self.flow.chain_of(site), self.flow.readers(site)
        reading = [self.flow.site_of[reader.step] for reader in readers if reader.step is not None]
        ends = any(reader.step is None for reader in readers) or any(reader.type == "ConvTranspose" for reader in reading)
        idle = COPYING if ends else (*FOLLOWING, *(LEAVING_FLOAT if len(chain) == 1 else ()))
        own = [
            at for at in chain if not (at in self._following and (at.type in idle or (at.type in FOLLOWING and self._takes_constants(at))))
        ]
        return not any(map(self._may_run, own)) and not any(map(self.on_integers, reading))

    def _takes_constants(self, site: Site) -> bool:
        """Whether an operand is constant, numbers alone aside, which kernels take as they are: in float it is exact."""
        constant = [slot for slot, origins in site.operands().items() if {self.flow.kind(origin) for origin in origins} == {"const"}]
        return any(site.dims(slot) > 0 for slot in constant)

    def on_integers(self, site: Site) -> bool:
        """Whether an operation runs in an integer kernel of the target, as far as anybody knows: then what it reads and makes has a grid.

        One that copies or takes element by element gains nothing by itself: it does where an integer kernel reads its result, or it
        computes what the model returns or a transposed convolution reads; not where an operand comes out of operations in float for it
        alone. Elsewhere a grid would be one more rounding beside operations in float, and a residual stream that only additions and
        normalizations read has none.
        """
        if site.type in FOLLOWING and site in self._following:
            return site in self._follow_integers
        return self._may_run(site)

    def _find_followers(self) -> None:
        """Note which of the operations that depend on their neighbours run on integers."""
        following = [site for site in reversed(self.flow.sites) if site.type in FOLLOWING and site in self._following]
        while True:
            self._ask_readers(following)
            fed = {site for site in self._follow_integers if site.type not in COPYING and self._is_fed_in_float(site)}
            if not fed:
                return
            following = [site for site in following if site not in fed]

    def _ask_readers(self, following: list[Site]) -> None:
        """Have those run on integers whose results need a grid: those behind them first."""
        self._follow_integers, known = set(), -1
        while known < len(self._follow_integers):  # again where a result comes back in another call
            known = len(self._follow_integers)
            for site in following:
                if not self._is_in_float_anyway(self.flow.end_of(site)):
                    self._follow_integers.add(site)

    def _is_fed_in_float(self, site: Site) -> bool:
        """Whether an operand comes out of operations in float and is read by no integer kernel but this: it would be one rounding more."""
        return any(self._is_float_for(site, origins) for origins in site.operands().values())

    def _is_float_for(self, site: Site, origins: list[Origin]) -> bool:
        makers = {self.flow.site_of[origin.source] for origin in origins if self.flow.kind(origin) == "step"}
        chains = [self.flow.chain_of(maker) for maker in makers]
        readers = {self.flow.site_of[r.step] for maker in makers for r in self.flow.readers(maker) if r.step is not None} - {site}
        in_float = bool(makers) and not any(self.on_integers(member) for chain in chains for member in chain)
        return in_float and not any(map(self.on_integers, readers))

    def _is_left_outside(self, site: Site) -> bool:
        """Whether the profile leaves alone what the model returns, and nothing in the model reads the results of `site`."""
        kept = self.profile_of(*self.flow.chain_of(site)).model_output is False and site in self.flow.returned
        return kept and all(reader.step is None for reader in self.flow.readers(site))

    def reads(self, site: Site, slot: Slot) -> bool:
        """Whether `site` is to quantize an operand that reaches it unquantized."""
        inputs = self.profile_of(site).inputs
        if selects(inputs, site.type) or (any(step.stacks for step in site.steps) and selects(inputs, "Gemm")):
            return is_multiplied(site.op, slot, site.dims(slot))
        return site in self._joined or (site, slot) in self._residual

    def is_reader(self, site: Site) -> bool:
        """Whether the profile names `site` among the operations that quantize what they read."""
        return selects(self.profile_of(site).inputs, site.type)

    def weighs(self, info: SiteInfo, *types: str) -> bool:
        """Whether weights of this operation are quantized; it may be of more types than one."""
        weights = self._in_half.weights if self._is_half(info, role="weight") else self.profile.weights
        return any(selects(weights, op_type) for op_type in (info.type or "", *types))

    def constant_reason(self, site: Site, role: str) -> str | None:
        """Why a constant that `site` reads stays in float; None if it is to be quantized."""
        profile = self.profile_of(site)
        if role == "weight":
            return None if self.weighs(self.flow.infos[site]) else f"target {profile.name!r} {WEIGHTS_LEFT} {site.type} in float"
        if site in self._joined or selects(profile.inputs, site.type):
            return None
        if selects(profile.outputs, site.type) and self.on_integers(site):
            return None
        return f"target {profile.name!r} leaves constants of {site.type} in float"

    def takes_constant(self, site: Site, slot: Slot, origins: Iterable[Origin]) -> bool:
        """Whether some of these come of a parameter or buffer, and it is quantized where `site` takes nothing else."""
        if not ancestors(origin for origin in origins if self.flow.kind(origin) == "const"):
            return False
        role, dims = "constant" if weight_axes(site.op, slot) is None else "weight", site.dims(slot)
        return not (is_bias(site.op, slot, dims) or stays_float(site.kind, dims) or self.constant_reason(site, role))

    def bias_reason(self, site: Site, wanted: bool | None) -> str | None:
        """Why a bias stays in float; None if it is to be int32. `wanted` is what the config says."""
        if wanted is False:
            return "bias in float: Config.bias is off"
        if wanted is None and not selects(self.profile.bias, site.type):
            return f"bias in float on target {self.profile.name!r}"
        return None

    def is_quantized(self, origin: Origin) -> bool:
        """Whether a tensor is to be put on a grid where it is made, or together from such. Half precision is none, whoever reads it."""
        if origin.kind == "input":
            return self.takes(origin) and origin.source not in self.flow.tape.unreplaced
        if origin.kind != "step":
            return False
        maker = self.flow.site_of[origin.source]
        return self.makes(maker) and self.profile_of(*self.flow.chain_of(maker)) is self.profile

    def joins(self, site: Site) -> bool:
        """Whether all that `site` takes shares a scale, which is also that of its result."""
        return self._shares(site) and (site, 0) in self.shared

    def _shares(self, site: Site) -> bool:
        return selects(self.profile_of(site).shared, site.type) and not self.flow.is_constant(site) and not site.training_only

    def known_range(self, site: Site) -> tuple[float, float] | None:
        """The range of the results of `site`, the end of a chain, if the profile fixes one."""
        return self.profile.known_range(site.type)

    def reason(self, site: Site) -> str:
        """Why the profile leaves a result in float."""
        name, profile = self.profile.name, self.profile_of(*self.flow.chain_of(site))
        if self._is_left_outside(site):
            return f"target {name!r} leaves what the model returns in float"
        if site in self._handed_over:
            return f"target {name!r} adds to this result before it quantizes: the addition that reads it is part of the operation"
        if site.type == "Add" and profile.residual:
            return f"target {name!r} quantizes an addition only where it takes a result of {', '.join(profile.residual)} and another"
        if selects(profile.outputs, site.type) and self.needs_no_grid(site):
            if self.on_integers(site):
                return f"target {name!r} leaves results of {site.type} in float where nothing reads them on integers"
            return f"target {name!r} computes {site.type} in float, and all that reads it: a grid would gain nothing"
        if selects(profile.shared, site.type):
            return f"target {name!r} quantizes {site.type} only where the result is read by {', '.join(profile.inputs)}"
        what = f"operands of {', '.join(profile.inputs)}" if profile.inputs else f"results of {', '.join(profile.outputs) or 'nothing'}"
        return f"target {name!r} computes {site.type} in float: it quantizes {what}"

    def _note_residual(self, site: Site) -> None:
        """Note what a convolution hands to an addition alone, whose kernel adds, and the other operands of the addition."""
        if site.type != "Add" or not self.profile_of(site).residual:
            return
        operands = site.operands()
        main = next((slot for slot, origins in operands.items() if self._is_handed_over(site, origins)), None)
        if main is not None:
            self._residual |= {(site, slot) for slot in operands if slot != main}
            self._handed_over |= {self.flow.site_of[origin.source] for origin in operands[main]}

    def _is_handed_over(self, site: Site, origins: list[Origin]) -> bool:
        producers = {self.flow.site_of[origin.source] for origin in origins if origin.kind == "step"}
        if len(producers) != 1 or not all(origin.kind == "step" and origin.direct for origin in origins):
            return False
        (producer,) = producers
        head, *rest = self.flow.chain_of(producer)
        plain = all(member.type == "BatchNormalization" for member in rest)
        return plain and selects(self.profile_of(head).residual, head.type) and self.flow.sole_reader(producer) is site

    def _joined_sites(self) -> set[Site]:
        """Operations with shared scales whose result is read quantized, and that therefore quantize what they read."""
        found: set[Site] = set()
        for site in reversed(self.flow.sites):
            if not self._shares(site) or self.makes(site):
                continue
            readers = [(self.flow.site_of[r.step], r.slot) for r in self.flow.readers(site) if r.step is not None and r.slot is not None]
            if any(at in found or (at, slot) in self._residual or self.is_reader(at) for at, slot in readers):
                found.add(site)
        return found
