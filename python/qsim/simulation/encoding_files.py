"""The encodings of a simulation written to files, and read from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from operator import attrgetter
from os import PathLike
from typing import NamedTuple

import torch

from qsim import files
from qsim.files import EncodingFile, Entry, aimet_torch
from qsim.files.fitting import fitted
from qsim.numbers.encoding import Encoding, grid_of
from qsim.options import check_flag
from qsim.quantizers.bias import bias_scale
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.sharding import whole
from qsim.simulation.module_names import module_names
from qsim.simulation.simulation import Simulation

_MOST_SHOWN = 100
_MOST_COMPARED = 1000  # names of a file that are looked at for a close one


class LoadedEncodings(NamedTuple):
    """What `QuantSim.load_encodings` met, and did not use.

    Attributes
    ----------
    missing : list of str
        Enabled quantizers that the file has no encoding for. They keep theirs.
    unknown : list of str
        Names of the file that no quantizer has.
    """

    missing: list[str]
    unknown: list[str]


def save_encodings(sim: Simulation, path: str | PathLike[str], format: str, names: Mapping[str, str] | None) -> None:
    """`QuantSim.save_encodings` documents it."""
    if sim.missing():
        raise sim.no_encoding()
    named = _named(sim, names)
    entries: dict[str, Entry] = {}
    for key, quantizer in sim.quantizers().items():
        encoding = quantizer.encoding
        if encoding is None:  # off, or nothing in integers needs it
            continue
        entry = Entry(encoding, "parameter" if _is_parameter(sim, key) else "activation")
        if entries.setdefault(named[key], entry) != entry:
            raise ValueError(f"QuantSim: two quantizers are called {named[key]!r}, '{key}' is the second; expected names of their own")
    if str(format).startswith("aimet-2"):
        entries.update({named[name]: Entry(encoding, "parameter") for name, encoding in _bias_encodings(sim).items()})
    files.save_encodings(EncodingFile(entries), path, format)


def load_encodings(sim: Simulation, path: str | PathLike[str], strict: bool, names: Mapping[str, str] | None) -> LoadedEncodings:
    """`QuantSim.load_encodings` documents it."""
    check_flag("QuantSim.load_encodings", "strict", strict)
    file, named, quantizers = files.load_encodings(path), _named(sim, names), sim.quantizers()
    weights, called = sim.weights(), {key: [name] for key, name in named.items()}
    if file.format == aimet_torch.FORMAT:
        for key, others in module_names(sim).items():
            called[key] += others if named[key] == key else ()
    chosen: dict[str, Encoding] = {}
    unfit: list[str] = []
    for key, quantizer in quantizers.items():
        found = [name for name in called[key] if name in file.entries]
        try:
            fits = [fitted(file.entries[name], quantizer, weights[key].dim() if key in weights else None) for name in found]
        except ValueError as error:
            unfit.append(f"'{key}': {error}")
            continue
        if any(other != fits[0] for other in fits):
            unfit.append(f"'{key}': the file has {' and '.join(map(repr, found))} for it, which differ: leave out all but one of them")
        elif fits:
            chosen[key] = fits[0]
    cache = file.format == "tensorrt-cache"
    expected = [key for key, q in quantizers.items() if q.enabled and _is_stored(q) and not (cache and _is_parameter(sim, key))]
    missing = [key for key in expected if not any(name in file.entries for name in called[key])]
    biases = {named[bias.parameter] for bias in sim.decisions.biases}
    used = {name for key in quantizers for name in called[key]}
    unknown = [name for name in file.entries if name not in used and not (name in biases and _is_int32(file.entries[name]))]
    if unfit or (strict and (missing or unknown)):
        raise ValueError(
            "\n".join([f"QuantSim: '{path}' does not fit this simulation.", *_listed(missing, unknown, named, strict), *unfit])
        )
    for key in (key for key in weights if cache and key not in chosen and quantizers[key].encoding is None):
        quantizers[key].compute_encoding_from(whole(weights[key]))
    for key, encoding in chosen.items():
        quantizers[key].set_encoding(encoding)
    return LoadedEncodings(missing, unknown)


def _is_stored(quantizer: Quantizer) -> bool:
    """Whether a file can have an encoding for it: not without a scale, nor with one from each tensor."""
    return quantizer.spec.has_scale and not quantizer.spec.is_dynamic


def _is_parameter(sim: Simulation, key: str) -> bool:
    return sim.decisions.quantizers[key].role in ("weight", "constant")


def _named(sim: Simulation, names: Mapping[str, str] | None) -> dict[str, str]:
    """What a file calls each quantizer and each bias."""
    own = {name: name for name in [*sim.quantizers(), *(bias.parameter for bias in sim.decisions.biases)]}
    for key in names or ():
        if key not in own:
            close = ", ".join(map(repr, get_close_matches(key, own))) or "see sim.quantizers()"
            raise ValueError(f"QuantSim: names has {key!r}, which is no quantizer; close to it: {close}")
    return {**own, **(names or {})}


def _bias_encodings(sim: Simulation) -> dict[str, Encoding]:
    """What biases are held as, by parameter. A bias that is added to several products has several scales, and is left out."""
    quantizers = sim.quantizers()
    found = defaultdict(list)
    for bias in sim.decisions.biases:
        input, weight = quantizers[bias.input], quantizers[bias.weight]
        if input.enabled and weight.enabled and input.encoding is not None and weight.encoding is not None:
            elements = attrgetter(bias.parameter)(sim.model).numel()
            scale = bias_scale(input.encoding.scale, weight.encoding.scale, elements)
            zero_point = torch.zeros_like(scale, dtype=torch.int32)
            found[bias.parameter].append(Encoding(scale, zero_point, *grid_of("int32"), 0, dtype="int32"))
    return {name: encodings[0] for name, encodings in found.items() if all(other == encodings[0] for other in encodings)}


def _is_int32(entry: Entry) -> bool:
    return entry.encoding is not None and entry.encoding.dtype == "int32"


def _listed(missing: list[str], unknown: list[str], named: Mapping[str, str], strict: bool) -> Iterable[str]:
    """A line for each name that is on one side only."""
    if not strict:
        return
    for names, title, others in (
        ([named[key] for key in missing], "missing in the file", unknown),
        (unknown, "unknown to the simulation", [named[key] for key in missing]),
    ):
        for name in names[:_MOST_SHOWN]:
            close = get_close_matches(name, others[:_MOST_COMPARED], n=1)
            yield f"{title}: {name!r}" + (f" (close to it: {close[0]!r})" if close else "")
        if len(names) > _MOST_SHOWN:
            yield f"{title}: {len(names) - _MOST_SHOWN} more"
