"""The part of `qsim.QuantSim` that writes its encodings to files, and reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from operator import attrgetter
from os import PathLike
from typing import NamedTuple

import torch

from qsim.encoding import Encoding, grid_of
from qsim.files import EncodingFile, Entry, load_encodings, save_encodings
from qsim.files.fitting import fitted
from qsim.quantizers.bias import bias_scale
from qsim.sim.sharding import whole
from qsim.sim.training import Training

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


class Files(Training):
    """Base of `qsim.QuantSim`: encodings in files."""

    def save_encodings(self, path: str | PathLike[str], format: str = "qsim", names: Mapping[str, str] | None = None) -> None:
        """Write all encodings to a file, those of quantizers that are switched off too.

        Parameters
        ----------
        path : path-like
            Replaced as a whole, or left as it was.
        format : str
            "qsim" (lossless), "aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0" or "tensorrt-cache" (activations only). AIMET 2.x
            also gets the int32 encodings of biases.
        names : mapping of str to str, optional
            What the file calls quantizers (and biases), by key: names of ONNX tensors, for example. Others go by their keys.

        Raises
        ------
        NoEncodingError
            Before calibration.
        FileFormatError
            The format cannot hold an encoding. Nothing is written.

        Examples
        --------
        >>> import tempfile
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(3, 2), torch.zeros(1, 3), qsim.int8(target="tensorrt"))
        >>> report = sim.calibrate([torch.ones(4, 3)], progress=False)
        >>> path = tempfile.mktemp(".cache")
        >>> sim.save_encodings(path, "tensorrt-cache", names={"input": "images"})
        >>> print(open(path).read().splitlines()[1])
        images: 3c010204
        """
        if self._missing():
            raise self._no_encoding()
        named = self._named(names)
        entries: dict[str, Entry] = {}
        for key, quantizer in self.quantizers().items():
            encoding = quantizer.encoding
            if encoding is None:  # off, or nothing in integers needs it
                continue
            entry = Entry(encoding, "parameter" if self._is_parameter(key) else "activation")
            if entries.setdefault(named[key], entry) != entry:
                raise ValueError(f"QuantSim: two quantizers are called {named[key]!r}, '{key}' is the second; expected names of their own")
        if format.startswith("aimet-2"):
            entries.update({named[name]: Entry(encoding, "parameter") for name, encoding in self._bias_encodings().items()})
        save_encodings(EncodingFile(entries), path, format)

    def load_encodings(self, path: str | PathLike[str], strict: bool = True, names: Mapping[str, str] | None = None) -> LoadedEncodings:
        """Quantize with the encodings of a file from now on. All of them are set, or, after an error, none.

        The file decides scales and zero points, and nothing else: grids and granularities are those of the simulation, and an encoding for
        another one is an error. The same numbers in another form fit: uint8 around 128 is int8 around 0, and AIMET 0.6.1 and 1.0.0, which
        do not tell the axis of channels, have that of the quantizer. Weights that have no encoding yet get one from their values where
        the file is a calibration cache, which holds none. int32 encodings of biases are left alone: their scales are products of others.

        Parameters
        ----------
        path : path-like
            Of any format that `qsim.load_encodings` reads.
        strict : bool
            Every enabled quantizer has to be in the file, and every name of the file has to be known. Otherwise what both have is set.
        names : mapping of str to str, optional
            What the file calls quantizers, by key, as in `save_encodings`.

        Returns
        -------
        LoadedEncodings

        Raises
        ------
        FileFormatError
            The file is damaged.
        ValueError
            It does not fit: the message lists all names that are missing, unknown, or of another grid, with close ones.
        """
        file, named, quantizers = load_encodings(path), self._named(names), self.quantizers()
        weights = self._weights()
        chosen: dict[str, Encoding] = {}
        unfit: list[str] = []
        for key, quantizer in quantizers.items():
            if (entry := file.entries.get(named[key])) is not None:
                try:
                    chosen[key] = fitted(entry, quantizer, weights[key].dim() if key in weights else None)
                except ValueError as error:
                    unfit.append(f"'{key}': {error}")
        cache = file.format == "tensorrt-cache"
        expected = [key for key, q in quantizers.items() if q.enabled and q.spec.has_scale and not (cache and self._is_parameter(key))]
        missing = [key for key in expected if named[key] not in file.entries]
        biases = {named[bias.parameter] for bias in self._biases}
        used = {named[key] for key in quantizers}
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

    def _is_parameter(self, key: str) -> bool:
        return self._planned[key].role in ("weight", "constant")

    def _named(self, names: Mapping[str, str] | None) -> dict[str, str]:
        """What a file calls each quantizer and each bias."""
        own = {name: name for name in [*self.quantizers(), *(bias.parameter for bias in self._biases)]}
        for key in names or ():
            if key not in own:
                close = ", ".join(map(repr, get_close_matches(key, own))) or "see sim.quantizers()"
                raise ValueError(f"QuantSim: names has {key!r}, which is no quantizer; close to it: {close}")
        return {**own, **(names or {})}

    def _bias_encodings(self) -> dict[str, Encoding]:
        """What biases are held as, by parameter. A bias that is added to several products has several scales, and is left out."""
        quantizers = self.quantizers()
        found = defaultdict(list)
        for bias in self._biases:
            input, weight = quantizers[bias.input], quantizers[bias.weight]
            if input.enabled and weight.enabled and input.encoding is not None and weight.encoding is not None:
                elements = attrgetter(bias.parameter)(self.model).numel()
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
