"""Scales of cached keys and values, between a simulation and checkpoints: by the module of the attention that reads them."""

from __future__ import annotations

from collections import defaultdict

from qsim.checkpoints import Checkpoint, kv_scales
from qsim.checkpoints.activation import one_scale
from qsim.config.kv_cache import KVCache
from qsim.errors import NoEncodingError
from qsim.files import Entry
from qsim.files.fitting import fitted
from qsim.numbers.encoding import Encoding
from qsim.simulation.simulation import Simulation


def _read(sim: Simulation) -> dict[str, str]:
    """The name of the scale of each quantizer of keys or values: ``<attention>.k_scale``."""
    names = {what: name for name, what in kv_scales.NAMES.items()}
    found = {}
    for key, planned in sim.decisions.quantizers.items():
        if planned.cache is not None and sim.quantizers()[key].enabled:
            operation = key.rpartition(".input[")[0]
            found[key] = f"{operation.rpartition('.')[0]}.{names[planned.cache]}"
    return found


def caches_of(sim: Simulation) -> tuple[KVCache | None, dict[str, Encoding], set[str]]:
    """How keys and values are quantized, their encodings by the names of scales, and their quantizers; none where no file has such."""
    quantizers, names = sim.quantizers(), _read(sim)
    of_module = defaultdict(list)
    for name in names.values():
        module, _, own = name.rpartition(".")
        of_module[module].append(own)
    kinds = {kv_scales.kind(quantizers[key].spec) for key in names}
    if len(kinds) != 1 or None in kinds or any(sorted(found) != sorted(kv_scales.NAMES) for found in of_module.values()):
        return None, {}, set()
    encodings = {}
    for key, name in names.items():
        encoding = quantizers[key].encoding
        if encoding is None:
            raise NoEncodingError(f"QuantSim.save_compressed: {key!r} has no encoding yet: call calibrate first")
        encodings[name] = encoding
    spec = one_scale(str(kinds.pop()))
    return KVCache(spec, spec), encodings, set(names)


def fitting_caches(sim: Simulation, checkpoint: Checkpoint) -> tuple[dict[str, Encoding], list[str]]:
    """The encodings that a checkpoint has for keys and values, by quantizer; and what of them does not fit the simulation."""
    if checkpoint.kv_cache is None:
        return {}, []
    names = _read(sim)
    problems = [
        f"'{name}' is the scale of a cache that the simulation does not quantize: make it with checkpoint.config(), and an example that "
        "fills a cache"
        for name in checkpoint.encodings
        if name.rpartition(".")[2] in kv_scales.NAMES and name not in names.values()
    ]
    found: dict[str, Encoding] = {}
    for key, name in names.items():
        if name not in checkpoint.encodings:
            problems.append(f"'{name}' is not in the checkpoint, and the simulation quantizes that cache")
            continue
        try:
            found[key] = fitted(Entry(checkpoint.encodings[name], "activation"), sim.quantizers()[key], None)
        except ValueError as error:
            problems.append(f"'{name}': {error}")
    return found, problems
