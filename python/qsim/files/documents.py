"""Where the entries stand in a JSON document of each format, and what of it is kept as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from qsim.files import aimet_0_6_1, aimet_1_0_0, aimet_2, aimet_torch, qsim_json
from qsim.files.encoding_file import EncodingFile, Entry, role_of
from qsim.files.fields import Fields, check_count, checked_name
from qsim.files.file_place import FilePlace, shown

_BY_ROLE = {"activation_encodings": "activation", "param_encodings": "parameter"}
_TOGETHER: dict[str, str | None] = {"encodings": None}


@dataclass(frozen=True)
class Layout:
    """A format of JSON documents.

    Attributes
    ----------
    head : dict
        The fields that name format and version.
    sections : dict
        The fields that hold entries, and the role of these.
    listed : bool
        Whether a section is a list of entries that hold their names, or an object.
    read, write : callable
        One entry.
    accepts : tuple of str
        The formats whose entries this one understands as they are.
    """

    head: Mapping[str, str]
    sections: Mapping[str, str | None]
    listed: bool
    read: Callable[[Any, str | None, FilePlace], Entry]
    write: Callable[[str, Entry, FilePlace], Any]
    accepts: tuple[str, ...]


LAYOUTS = {
    "qsim": Layout(
        {"format": qsim_json.MARK, "version": qsim_json.FORMAT_VERSION}, _TOGETHER, False, qsim_json.read_entry, qsim_json.write_entry, ()
    ),
    "aimet-0.6.1": Layout({"version": "0.6.1"}, _BY_ROLE, False, aimet_0_6_1.read_entry, aimet_0_6_1.write_entry, ("aimet-0.6.1",)),
    "aimet-1.0.0": Layout({"version": "1.0.0"}, _BY_ROLE, True, aimet_1_0_0.read_entry, aimet_1_0_0.write_entry, ("aimet-1.0.0",)),
    "aimet-2.0.0": Layout(
        {"version": "2.0.0"}, _TOGETHER, True, partial(aimet_2.read_entry, format="aimet-2.0.0"), aimet_2.write_entry, ("aimet-2.0.0",)
    ),
    "aimet-2.1.0": Layout(
        {"version": "2.1.0"},
        _TOGETHER,
        True,
        partial(aimet_2.read_entry, format="aimet-2.1.0"),
        aimet_2.write_entry,
        ("aimet-2.0.0", "aimet-2.1.0"),
    ),
}


def read(document: Fields) -> EncodingFile:
    """What a parsed document holds."""
    if aimet_torch.is_torch(document):
        return aimet_torch.read(document)
    place = document.place
    head = {name: document.values[name] for name in ("format", "version") if name in document}
    format = next((name for name, layout in LAYOUTS.items() if layout.head == head), None)
    if format is None:
        raise place.error(_unknown(head))
    layout = LAYOUTS[format]
    if not any(section in document for section in layout.sections):
        raise place.error(f"has no entries; expected {' and '.join(map(repr, layout.sections))}")
    entries: dict[str, Entry] = {}
    for section, role in layout.sections.items():
        for name, value in _items(document.values[section], section, layout, place) if section in document else ():
            if checked_name(name, place) in entries:
                raise place.at(name).error("occurs twice; expected one encoding a tensor")
            entries[name] = layout.read(value, role, place.at(name))
    return EncodingFile(entries, format, layout.head["version"], document.without(*layout.head, *layout.sections))


def _unknown(head: Mapping[str, Any]) -> str:
    got = " and ".join(f"{name} {shown(value)}" for name, value in head.items()) or "neither"
    versions = [layout.head["version"] for layout in LAYOUTS.values() if "format" not in layout.head]
    return (
        f"format and version: got {got}; expected format {qsim_json.MARK!r} and version {qsim_json.FORMAT_VERSION!r} of qsim, or AIMET's "
        f"version {', '.join(map(repr, versions))}; or no version and the sections that AIMET's save_encodings_to_json writes"
    )


def _items(section: Any, title: str, layout: Layout, place: FilePlace) -> Iterable[tuple[Any, Any]]:
    if isinstance(section, list | dict):
        check_count(len(section), place)
    if layout.listed and isinstance(section, list):
        return [(Fields(value, place).get("name"), value) for value in section]
    if not layout.listed and isinstance(section, dict):
        return section.items()
    raise place.wanted(repr(title), section, "a list of objects" if layout.listed else "an object with an entry a name")


def write(file: EncodingFile, format: str, place: FilePlace) -> dict[str, Any]:
    """The document of a file in this format."""
    layout = LAYOUTS[format]
    if taken := file.extra.keys() & {*layout.head, *layout.sections}:
        raise place.error(f"EncodingFile.extra holds {min(taken)!r}, which is the format's own; rename it")
    written = {name: _written(name, entry, layout, place.at(name)) for name, entry in file.entries.items()}
    sections: dict[str, Any] = {}
    for section, role in layout.sections.items():
        mine = {name: fields for name, fields in written.items() if role in (None, role_of(name, file.entries[name]))}
        sections[section] = list(mine.values()) if layout.listed else mine
    return {**layout.head, **sections, **file.extra}


def _written(name: str, entry: Entry, layout: Layout, place: FilePlace) -> Any:
    """An entry as its file had it, if it still says the same; as the format has it otherwise."""
    source = entry.source
    if source is not None and source.format in layout.accepts:
        again = layout.read(source.fields, entry.role, place)
        if (again.encoding, again.note) == (entry.encoding, entry.note):
            return {**source.fields, "name": name} if layout.listed else source.fields
    return layout.write(name, entry, place)
