"""Arrays of .npz files as the inputs of an ONNX model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsim.cli.arrays import batches, read_npz
from qsim.files.file_place import FilePlace

if TYPE_CHECKING:
    from qsim.cli.arrays import Array


class InputBatches:
    """Batches for a session of ONNX Runtime, by the names of its inputs; read again whenever they are gone through."""

    def __init__(self, files: Sequence[Path], size: int | None, wanted: Sequence[Any]) -> None:
        self._files, self._size, self._wanted = files, size, wanted

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for path in self._files:
            place = FilePlace(str(path))
            for batch in batches(read_npz(path), self._size, place):
                yield fitted(self._wanted, batch, place)


def fitted(wanted: Sequence[Any], arrays: Mapping[str, Array], place: FilePlace) -> dict[str, Array]:
    """The arrays by the names of inputs, checked for what these take."""
    names = [value.name for value in wanted]
    if len(arrays) != len(names) or (set(arrays) != set(names) and any(name in names for name in arrays)):
        raise place.error(f"holds the arrays {', '.join(arrays)}; the model takes {', '.join(names)}")
    found = {name: arrays[name] for name in names} if set(arrays) == set(names) else dict(zip(names, arrays.values(), strict=True))
    for value in wanted:
        got = found[value.name]
        fits = len(got.shape) == len(value.shape) and all(
            n == m or not isinstance(m, int) for n, m in zip(got.shape, value.shape, strict=True)
        )
        if not fits or got.dtype.name != _dtype(value.type):
            shape = ", ".join(str(n) for n in value.shape)
            raise place.at(value.name).error(f"is {got.dtype} of the shape {got.shape}; the model takes {_dtype(value.type)} of ({shape})")
        if got.shape and not got.shape[0]:
            raise place.at(value.name).error(f"has no samples: its shape is {got.shape}")
    return found


def _dtype(kind: str) -> str:
    """What NumPy calls "tensor(float)"."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)
