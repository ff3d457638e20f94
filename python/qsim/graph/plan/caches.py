"""Keys and values that a model caches: which operands of attention they are.

A cached tensor outlives the call: it is in what the model returned, in its arguments afterwards, or in its buffers. Whatever the cache is
made of, attention reads it whole, and quantizes it there: with scales that are calibrated, or taken from each token alone, this gives the
numbers that quantizing each token once, where it is written, gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from qsim.config.kv_cache import KVCache, kv_cache
from qsim.graph.plan.actions import Use
from qsim.graph.plan.dataflow import Dataflow
from qsim.graph.plan.ledger import Ledger
from qsim.graph.plan.reasons import unmet
from qsim.graph.plan.specs import Specs
from qsim.graph.record.routes import Site
from qsim.graph.record.tape import Origin, Slot
from qsim.numbers.spec import TensorSpec

_UNCACHED = "no example shows a cache that it is read from"
_FUSED = "scaled_dot_product_attention"
# Where the products of written-out attention take keys and values; nobody knows of einsum.
_PRODUCTS: dict[str, tuple[Slot, ...]] = {"matmul": (1, "other"), "bmm": (1, "mat2"), "baddbmm": (2, "batch2"), "einsum": ()}
# What may stand between a product and the softmax: scaling, masks, soft caps, casts.
_ELEMENTWISE = frozenset({"mul", "rmul", "div", "add", "radd", "sub", "tanh", "where", "maximum", "clamp"})


class Read(NamedTuple):
    """An operand of attention, and the axis along which `head_dim` lies there; None where that is not known."""

    site: Site
    slot: Slot
    axis: int | None


class Attention(NamedTuple):
    """Where attention reads keys and values."""

    keys: Read
    values: Read


class Caches:
    """Quantizers of what attention reads from a cache.

    Raises
    ------
    ValueError
        If a cache is asked for, and no attention with one is seen, or one of which keys or values alone are cached as they are read.
    """

    def __init__(self, specs: Specs, given: Any, ledger: Ledger) -> None:
        self._specs, self._ledger = specs, ledger
        cache = kv_cache(given)
        self._found: dict[tuple[Site, Slot], _Cached] = {} if cache is None else _cached_operands(specs.flow, cache, ledger)

    def plan(self, site: Site, slot: Slot) -> bool:
        """Plan an operand if it is read from a cache: whether it is. A ValueError where it cannot be, or is quantized otherwise too."""
        found = self._found.get((site, slot))
        if found is None:
            return False
        key, target = f"{site.name}.input[{slot}]", self._specs.placement.profile.name
        read = self._specs.placement.reads(site, slot) and self._specs.of(site, "activation") is not None
        if read or self._ledger.is_on_grid(site, slot):
            raise ValueError(
                f"Config.kv_cache: {key!r} is quantized as an activation already, on target {target!r}; leave kv_cache out, or take a "
                "target that leaves attention in float: qsim.w8a8_dynamic(kv_cache=...), qsim.w4a16(kv_cache=...)"
            )
        if not site.visible:
            raise ValueError(f"Config.kv_cache: {key!r} cannot be quantized where it is read: {unmet(site)}")
        self._ledger.add_activation(key, found.spec, site.name, site, f"{site.op}, from the cache")
        self._ledger.quantizers[key] = replace(self._ledger.quantizers[key], cache=found.what)
        self._ledger.actions[site].operands[slot] = Use(key)
        return True


class _Cached(NamedTuple):
    """What is cached, "keys" or "values", and how they are quantized."""

    what: str
    spec: TensorSpec


def _cached_operands(flow: Dataflow, cache: KVCache, ledger: Ledger) -> dict[tuple[Site, Slot], _Cached]:
    """The specs of what is read from a cache. What attention without one reads is noted as left in float."""
    kept = _outliving(flow)
    found: dict[tuple[Site, Slot], _Cached] = {}
    missed = []
    for attention in _attentions(flow):
        wanted = [(name, read, spec) for name, read, spec in zip(KVCache._fields, attention, cache, strict=True) if spec is not None]
        cached = [_is_cached(flow, read, kept) for _, read, _ in wanted]
        for is_cached, (name, read, spec) in zip(cached, wanted, strict=True):
            if is_cached:
                # blocks and channels lie along head_dim; a spec for the whole tensor has no axis
                found[read.site, read.slot] = _Cached(name, spec if spec.axis is None else replace(spec, axis=read.axis))
            elif any(cached) or _is_kept_elsewhere(flow, read, kept):
                missed.append(f"the {name} that {read.site.name!r} reads")
            else:
                ledger.leave(f"{read.site.name}.input[{read.slot}]", read.site.op, _UNCACHED)
    if missed:
        raise ValueError(
            f"Config.kv_cache: {', '.join(missed)} are not in the cache as they are read, or not the second factor of matmul or bmm. A "
            "rotary embedding between cache and attention, and products written otherwise, are not simulated: change that, or leave keys "
            "or values in float, kv_cache=(None, 8)"
        )
    if not found:
        raise ValueError(
            "Config.kv_cache: no example shows attention that reads keys and values which outlive the call. Give a call that returns or "
            "fills a cache as an example (for Hugging Face's models one with use_cache=True); attention is scaled_dot_product_attention, "
            "or a softmax between two products of torch.matmul or bmm"
        )
    return found


def _outliving(flow: Dataflow) -> set[tuple[Any, int]]:
    """The results that are there after a call."""
    tape = flow.tape
    kept = {*tape.results, *tape.reads, *tape.handed_back, *(o for origins in tape.written.values() for o in origins)}
    return {(origin.source, origin.output) for origin in kept if origin.kind in ("step", "stale")}


def _is_cached(flow: Dataflow, read: Read, kept: set[tuple[Any, int]]) -> bool:
    """Whether an operand outlives the call, or was there before it."""
    origins = read.site.operands().get(read.slot, []) if read.axis is not None else []
    return any(flow.kind(origin) in ("input", "other") or (origin.source, origin.output) in kept for origin in origins)


def _is_kept_elsewhere(flow: Dataflow, read: Read, kept: set[tuple[Any, int]]) -> bool:
    """Whether a product takes what outlives the call where it is not looked for: as its first factor, or by `einsum`. A model may return
    the probabilities, too."""
    operands = read.site.operands() if read.site.op != _FUSED else {}
    found = [origin for slot, origins in operands.items() if slot != read.slot for origin in origins]
    return any((o.source, o.output) in kept and flow.site_of[o.source].op != "softmax" for o in found)


def _attentions(flow: Dataflow) -> list[Attention]:
    found = []
    for site in flow.sites:
        if site.op == _FUSED:
            keys, values = (_slot(site, slots) for slots in ((1, "key"), (2, "value")))
            found.append(Attention(Read(site, keys, -1), Read(site, values, -1)))
        elif site.op == "softmax":
            before, after = _reached(flow, site, _sources), _reached(flow, site, _readers)
            found += [Attention(_factor(product, -2), _factor(other, -1)) for product in before for other in after]
    return found


def _factor(product: Site, axis: int) -> Read:
    slots = _PRODUCTS[product.op]
    return Read(product, _slot(product, slots), axis) if slots else Read(product, "", None)


def _slot(site: Site, slots: tuple[Slot, ...]) -> Slot:
    return next((slot for slot in slots if slot in site.operands()), slots[0])


def _reached(flow: Dataflow, start: Site, neighbours: Callable[[Dataflow, Site], list[Site]]) -> list[Site]:
    """The products that are reached from a softmax through what is elementwise."""
    seen, left, found = {start}, [start], list[Site]()
    while left:
        for site in neighbours(flow, left.pop()):
            if site in seen:
                continue
            seen.add(site)
            if site.op in _PRODUCTS:
                found.append(site)
            elif site.op in _ELEMENTWISE:
                left.append(site)
    return found


def _sources(flow: Dataflow, site: Site) -> list[Site]:
    origins: list[Origin] = [origin for found in site.operands().values() for origin in found]
    return [flow.site_of[origin.source] for origin in origins if origin.kind in ("step", "stale")]


def _readers(flow: Dataflow, site: Site) -> list[Site]:
    return [flow.site_of[reader.step] for reader in flow.readers(site) if reader.step is not None and reader.slot is not None]
