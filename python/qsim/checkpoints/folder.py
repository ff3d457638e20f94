"""A model's folder: ``config.json`` and safetensors, in one file or in shards with an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsim.errors import FileFormatError
from qsim.files.file_place import FilePlace
from qsim.files.json_text import parse

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_JSON = 1 << 26
_MAX_SIZE = (1 << 31) - 1


def safetensors_library() -> Any:
    """The library, which is an extra."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError('qsim: checkpoints are read and written with safetensors: pip install "qsim[weights]"') from error
    return safetensors


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any] | None:
    """A JSON object of the folder; None where there is no such file."""
    path = folder / name
    if not path.is_file():
        return None
    place = FilePlace(str(path))
    with path.open("rb") as stream:
        data = stream.read(_MAX_JSON + 1)
    if len(data) > _MAX_JSON:
        raise place.error(f"has more than {_MAX_JSON} bytes; expected a model's configuration")
    try:
        found = parse(data.decode(), place)
    except UnicodeDecodeError as error:
        raise place.error(f"byte {error.start} is not UTF-8; expected JSON") from None
    if not isinstance(found, dict):
        raise place.wanted("the document", found, "an object")
    return found


def is_size(value: Any) -> bool:
    """Whether a value of a configuration may be a number of rows or columns."""
    return type(value) is int and 0 < value <= _MAX_SIZE


def config_names(found: Mapping[str, Any], key: str, place: FilePlace) -> list[str]:
    """The names that a configuration lists under a key: none where it is missing or null."""
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise place.wanted(key, names, "a list of names")
    return names


def said_once(found: Mapping[str, Any], keys: Sequence[str], place: FilePlace) -> Any:
    """What a configuration says under one of several names of the same thing, in small letters; None where it says nothing.

    Raises
    ------
    FileFormatError
        It says different things.
    """
    said = {key: value.lower() if isinstance(value := found[key], str) else value for key in keys if found.get(key) is not None}
    first = next(iter(said.values()), None)
    if any(value != first for value in said.values()):
        told = " and ".join(f"{key} {value!r}" for key, value in said.items())
        raise place.error(f"quantization_config has {told}, which are two names of one thing; expected one value")
    return first


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, on the CPU, each from the one file that has it."""
    named = _named(folder)
    state: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    for file in _files(folder, named):
        for name, t in _read_file(folder / file).items():
            if name in state:
                raise _of_two(folder, f"{name!r} is in {files[name]!r} and in {file!r}")
            state[name], files[name] = t, file
    if named is not None:
        _check_index(folder, named, files)
    return state


def _files(folder: Path, named: Mapping[str, str] | None) -> list[str]:
    if named is not None:
        return sorted({*named.values()})
    return sorted(path.name for path in folder.glob("*.safetensors")) or [ONE]


def _named(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, as the index has it; None where there is no index."""
    index = read_config(folder, INDEX)
    place = FilePlace(str(folder / INDEX))
    if index is None:
        return None
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise place.wanted("weight_map", names, "an object of file names")
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise place.wanted("a shard", name, "the name of a .safetensors file in the same folder")
    return names


def _check_index(folder: Path, named: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Raise unless each tensor is where the index has it, and nothing else is read in its place."""
    for name, file in named.items():
        if files.get(name) != file:
            found = f"in {files[name]!r}" if name in files else "in no file"
            raise FilePlace(str(folder / INDEX)).error(f"has {name!r} in {file!r}, and it is {found}: is the checkpoint complete?")
    if (folder / ONE).is_file() and ONE not in named.values():
        raise _of_two(folder, f"{ONE!r} lies beside {INDEX!r}, which does not name it")


def _of_two(folder: Path, found: str) -> FileFormatError:
    return FilePlace(str(folder)).error(f"{found}, and readers differ on which counts; expected one checkpoint: take out what is not of it")


def _read_file(path: Path) -> dict[str, Tensor]:
    place = FilePlace(str(path))
    safetensors = safetensors_library()
    if not path.is_file():
        raise FileNotFoundError(f"qsim: there is no file {str(path)!r}; expected a folder with config.json and safetensors")
    try:
        found: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise place.error(f"is no safetensors file: {error}. Is it complete?") from None
    return found


SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class Parts:
    """The tensors of one packed layer, taken out of a state one by one, each checked."""

    def __init__(self, state: dict[str, Tensor], module: str, place: FilePlace) -> None:
        self.state, self.module, self.place = state, module, place.at(module)

    def take(self, name: str, dims: int | tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """`optional`, of a tensor that has to be there."""
        found = self.optional(name, dims, *dtypes)
        if found is None:
            raise self.place.error(f"has no {name}: is the checkpoint complete?")
        return found

    def only(self, *names: str) -> str:
        """Which of these names a tensor has, that may be there under one of them; the first where there is none."""
        found = [name for name in names if f"{self.module}.{name}" in self.state]
        if len(found) > 1:
            raise self.place.error(f"has {' and '.join(found)}; expected one of them")
        return found[0] if found else names[0]

    def optional(self, name: str, dims: int | tuple[int, ...], *dtypes: torch.dtype) -> Tensor | None:
        """The tensor ``<module>.<name>`` if there is one, of one of these numbers of dimensions, none of them 0, and of these types."""
        found = self.state.pop(f"{self.module}.{name}", None)
        if found is None:
            return None
        numbers = dims if isinstance(dims, tuple) else (dims,)
        if found.dim() not in numbers or found.numel() == 0 or found.dtype not in dtypes:
            raise self.place.error(
                f"{name} is {str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)}; expected "
                f"{' or '.join(str(t).removeprefix('torch.') for t in dtypes)} with "
                f"{' or '.join(map(str, numbers))} dimensions, not empty"
            )
        return found

    def check(self, what: str, got: object, expected: object) -> None:
        """Raise unless the two are the same."""
        if got != expected:
            raise self.place.error(f"{what} is {got}; expected {expected}, by the other tensors of this layer")
