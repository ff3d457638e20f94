"""What a file of encodings holds, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from qsim.close_names import close_names
from qsim.numbers.encoding import Encoding

UNQUANTIZED = "float32: it is not quantized"
ENTRY_ROLES = ("activation", "parameter")


@dataclass(frozen=True)
class Source:
    """An entry as its file has it, so that writing the same format loses nothing that an `Encoding` does not hold.

    Attributes
    ----------
    format : str
    fields : object
        Values of JSON.
    """

    format: str
    fields: Any


@dataclass(frozen=True)
class Entry:
    """What a file says about one tensor.

    Parameters
    ----------
    encoding : Encoding or None
        None where an `Encoding` cannot hold it; `note` says what it is then.
    role : "activation", "parameter" or None
        None where the format does not tell them apart (AIMET 2.x).
    layout_given : bool
        False where the format lists scales without saying along which axis of the tensor they lie (AIMET 0.6.1 and 1.0.0). Channels
        are output channels then, and `encoding` has axis 0; blocks lie along the input channels, and `encoding` has axis 1 and its
        scales in one row: the shape of the tensor decides, which `QuantSim.load_encodings` knows.
    note : str
        Why there is no encoding.
    source : Source, optional
        The entry as it was read. It counts while it still says what `encoding` says.

    Examples
    --------
    >>> entry = Entry(Encoding(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -128, 127), "activation")
    >>> qsim.EncodingFile({"input": entry}).entries["input"].role
    'activation'
    """

    encoding: Encoding | None
    role: str | None = None
    layout_given: bool = True
    note: str = ""
    source: Source | None = None

    def __post_init__(self) -> None:
        if self.role not in (None, *ENTRY_ROLES):
            raise ValueError(f"Entry: got role={self.role!r}; expected 'activation', 'parameter' or None")


@dataclass(frozen=True)
class EncodingFile:
    """The encodings of a model by the names of its tensors, and what else their file held.

    Parameters
    ----------
    entries : mapping of str to Entry
        In the order of the file.
    format : str
        "qsim", "aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0" or "tensorrt-cache"; "onnx" where they come out of a Q/DQ
        model, "aimet-torch" out of a file of AIMET by the names of modules.
    version : str
        Of the format; of a calibration cache, TensorRT's ("8501").
    extra : mapping
        All that the file holds beside entries: AIMET's ``quantizer_args``, ``excluded_layers`` and whatever key a writer adds. It goes
        along into every JSON format.

    Examples
    --------
    >>> encoding = Encoding(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -128, 127)
    >>> file = EncodingFile({"conv1.weight": Entry(encoding, "parameter"), "input": Entry(encoding, "activation")})
    >>> list(file.parameters), list(file.without("input").entries)
    (['conv1.weight'], ['conv1.weight'])
    """

    entries: Mapping[str, Entry]
    format: str = "qsim"
    version: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("entries", "extra"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def encodings(self) -> dict[str, Encoding]:
        """All entries that an `Encoding` can hold.

        Examples
        --------
        >>> encoding = Encoding(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -128, 127)
        >>> EncodingFile({"input": Entry(encoding)}).encodings["input"].scale.item()
        0.5
        """
        return {name: entry.encoding for name, entry in self.entries.items() if entry.encoding is not None}

    @property
    def activations(self) -> dict[str, Entry]:
        """The entries of activations.

        Examples
        --------
        >>> encoding = Encoding(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), -128, 127)
        >>> list(EncodingFile({"input": Entry(encoding, "activation"), "weight": Entry(encoding, "parameter")}).activations)
        ['input']
        """
        return {name: entry for name, entry in self.entries.items() if entry.role == "activation"}

    @property
    def parameters(self) -> dict[str, Entry]:
        """The entries of weights and other parameters."""
        return {name: entry for name, entry in self.entries.items() if entry.role == "parameter"}

    def without(self, *patterns: str) -> EncodingFile:
        """The same file without the entries whose names match any glob. A pattern that matches nothing is an error."""
        dropped: set[str] = set()
        for pattern in patterns:
            found = [name for name in self.entries if name == pattern or fnmatchcase(name, pattern)]
            if not found:
                close = ", ".join(map(repr, close_names(pattern, self.entries))) or "see file.entries"
                raise ValueError(f"EncodingFile: no entry matches {pattern!r}; close to it: {close}")
            dropped.update(found)
        return replace(self, entries={name: entry for name, entry in self.entries.items() if name not in dropped})


def role_of(name: str, entry: Entry) -> str:
    """The role of an entry; where its format does not tell, parameters are what has several scales, int32, or a parameter's name."""
    if entry.role is not None:
        return entry.role
    encoding = entry.encoding
    several = encoding is not None and (encoding.axis is not None or encoding.dtype == "int32")
    return "parameter" if several or name.endswith((".weight", ".bias")) else "activation"
