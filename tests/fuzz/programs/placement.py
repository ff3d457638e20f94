"""Where the default profile puts quantizers, written down once more from the documents: at the end of each fused chain."""

from __future__ import annotations

from collections.abc import Sequence

from .dataflow import ASKED, REMEMBERED, NotUnderstood, Origin, Site

_NORM = "BatchNormalization"
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Attention", "Gather"})
_RECTIFIERS = frozenset({"Relu", "Clip"})
_ACTIVATIONS = _RECTIFIERS | frozenset(
    ["LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Swish", "HardSwish", "Mish", "Sigmoid", "HardSigmoid", "Tanh", "Softplus"]
)
_CHAINS: tuple[tuple[frozenset[str], ...], ...] = (
    (_PRODUCTS, frozenset({_NORM})),
    (_PRODUCTS, _ACTIVATIONS),
    (_PRODUCTS, frozenset({_NORM}), _ACTIVATIONS),
    (frozenset({_NORM}), _ACTIVATIONS),
    (frozenset({"Add"}), _RECTIFIERS),
)


def quantized_results(sites: Sequence[Site]) -> set[Site]:
    """The operations whose results are quantized: all but those inside a chain, losses, what is computed from constants alone, and what no
    function mode meets and the example does not read."""
    inner = {site for chain in chains(sites) for site in chain[:-1]}
    unread = {site for site in sites if site.kind.hidden and not site.readers}  # what no mode meets is quantized where it is read
    ends = {site for site in sites if not (site.is_constant or site in inner | unread or site.kind.family == "loss")}
    for site in ends:
        readers = {reader for reader, _, _ in site.readers}
        if site.readers and all(slot == ASKED for _, slot, _ in site.readers):
            raise NotUnderstood("what only a number for Python reads stays in float: how far back is not written down")
        if site.readers and all(slot in (ASKED, REMEMBERED) for _, slot, _ in site.readers):
            raise NotUnderstood("what only goes into a buffer stays in float if the model never reads that: not written down")
        if readers and all(reader is not None and reader.kind.family == "loss" for reader in readers):
            raise NotUnderstood("what a loss alone reads stays in float: how far back is not written down")
    return ends


def chains(sites: Sequence[Site]) -> list[list[Site]]:
    """Operations that run as one: all but the last hand their results to the next alone."""
    found: list[list[Site]] = []
    taken: set[Site] = set()
    for site in sites:
        if site.is_constant or site in taken:
            continue
        run = [site]
        while len(run) < 3 and (reader := _handed_to(run[-1])) is not None and reader not in run:
            run.append(reader)
        fitting = [
            len(chain) for chain in _CHAINS if len(chain) <= len(run) and all(s.kind.type in c for s, c in zip(run, chain, strict=False))
        ]
        length = max(fitting, default=1)
        found.append(run[:length])
        taken.update(run[1:length])
    return found


def _handed_to(site: Site) -> Site | None:
    """The only reader of a result, if it takes it as it is as its main operand."""
    readers = {reader for reader, _, _ in site.readers}
    if len(readers) != 1 or not all(_is_main(reader, slot, origin) for reader, slot, origin in site.readers):
        return None
    return next(iter(readers))


def _is_main(reader: Site | None, slot: int, origin: Origin) -> bool:
    return reader is not None and slot == 0 and origin.direct and (not origin.stale or reader.changes)


def is_read_by_operations(readers: set[tuple[Site | None, int, Origin]]) -> bool:
    """Whether an input of the model is a quantity: something computes with it, and not a loss alone."""
    return any(reader is not None and reader.kind.family != "loss" for reader, _, _ in readers)


def is_read_by_older_names_alone(site: Site) -> bool:
    """Whether the example has no other readers of a result."""
    return bool(site.readers) and all(origin.stale for _, _, origin in site.readers)
