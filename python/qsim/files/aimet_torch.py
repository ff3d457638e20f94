"""AIMET's files by the names of PyTorch's modules, for loading into a simulation again: read here, and not written.

``activation_encodings`` has an object a module with "input" and "output", each an object of encodings by index: ``{"conv1": {"input":
{"0": {...}}, "output": {"0": {...}}}}``. An encoding is the object of version 0.6.1 (`qsim.files.aimet_0_6_1`), or a list of several.
``param_encodings`` is that of version 0.6.1: ``{"conv1.weight": [{...}]}``.

`QuantizationSimModel.save_encodings_to_json` writes no version. The files ``<name>_torch.encodings`` that an export leaves have the
version of the file beside it, 1.0.0 as well, and these entries in either case.

Entries are called as a simulation calls its quantizers: "conv1.input[0]", "conv1.output", "conv1.output[1]", "conv1.weight".

Source: ``quantsim.py`` of aimet_torch, versions 1.30 to 2.x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qsim.files import aimet_0_6_1
from qsim.files.encoding_file import EncodingFile, Entry
from qsim.files.fields import Fields, check_count, checked_name
from qsim.files.file_place import listed

FORMAT = "aimet-torch"
VERSIONS = ("0.5.0", "0.5.1", "0.6.1", "1.0.0")
_ACTIVATIONS, _PARAMETERS = "activation_encodings", "param_encodings"
_ENDS = frozenset({"input", "output"})


def is_torch(document: Fields) -> bool:
    """Whether a document is of this layout: by its activations, and without a version by its sections."""
    activations, parameters = document.values.get(_ACTIVATIONS), document.values.get(_PARAMETERS)
    if "format" in document:
        return False
    if "version" not in document:
        return isinstance(activations, dict) or isinstance(parameters, dict)
    return isinstance(activations, dict) and any(isinstance(ends, dict) and _ENDS & ends.keys() for ends in activations.values())


def read(document: Fields) -> EncodingFile:
    """What a parsed document holds."""
    place, version = document.place, document.values.get("version", "")
    if version and version not in VERSIONS:
        raise place.wanted("the version of encodings by modules", version, f"{listed(VERSIONS)}, or none")
    entries: dict[str, Entry] = {}
    for name, value, role in (*_activations(document), *_parameters(document)):
        here = place.at(checked_name(name, place))
        if name in entries:
            raise here.error("occurs twice; expected one encoding a tensor")
        entries[name] = aimet_0_6_1.read_entry(value if isinstance(value, list) else [value], role, here)
    return EncodingFile(entries, FORMAT, str(version), document.without("version", _ACTIVATIONS, _PARAMETERS))


def _parameters(document: Fields) -> Iterator[tuple[str, Any, str]]:
    section = _section(document, _PARAMETERS)
    for name, value in section.items():
        if not isinstance(value, list):
            raise document.place.at(name).wanted("the entry", value, "a list with one object a channel")
        yield name.removeprefix("."), value, "parameter"


def _activations(document: Fields) -> Iterator[tuple[str, Any, str]]:
    expected = 'an object with "input", "output" or both, each an object of encodings by index'
    for module, ends in _section(document, _ACTIVATIONS).items():
        place = document.place.at(module or "the model")
        if not isinstance(ends, dict) or not ends or not ends.keys() <= _ENDS:
            raise place.wanted("the module's entry", ends, expected)
        for end, by_index in ends.items():
            if not isinstance(by_index, dict) or not all(_is_index(index) for index in by_index):
                raise place.wanted(repr(end), by_index, 'an object of encodings by index: "0", "1" ...')
            check_count(len(by_index), place)
            for index, value in by_index.items():
                if not isinstance(value, list | dict):
                    raise place.at(_name(module, end, index)).wanted("the entry", value, "an object, or a list with one object a channel")
                yield _name(module, end, index), value, "activation"


def _section(document: Fields, name: str) -> dict[str, Any]:
    section = document.values.get(name, {})
    if not isinstance(section, dict):
        raise document.place.wanted(repr(name), section, "an object with an entry a name")
    check_count(len(section), document.place)
    return section


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6


def _name(module: str, end: str, index: str) -> str:
    number = "" if end == "output" and int(index) == 0 else f"[{int(index)}]"
    return f"{module}.{end}{number}".removeprefix(".")
