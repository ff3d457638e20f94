"""Writes a model's folder tensor by tensor: no more is held than one shard."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from qsim.atomic import write_atomically
from qsim.checkpoints.folder import INDEX, ONE, safetensors_library
from qsim.errors import FileFormatError

SHARD_BYTES = 2 << 30
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class FolderWriter:
    """Context in which tensors are added; files get their names when `finish` is called, and are gone where it was not.

    Parameters
    ----------
    folder : Path
        Made if it is not there. Weights of before are removed from it; other safetensors, which would be read beside them, are an error.
    shard_bytes : int
        Tensors of so many bytes are one file: ``model.safetensors`` if one holds all, else as Hugging Face numbers them, with an index.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._most, self._own = folder, shard_bytes, f".{secrets.token_hex(8)}.tmp"
        self._held: dict[str, Tensor] = {}
        self._memories: set[int] = set()  # of what is held
        self._shards: list[tuple[Path, list[str]]] = []
        self._total = 0
        self._library = safetensors_library()
        self._made = not folder.exists()

    def __enter__(self) -> FolderWriter:
        beside = [] if self._made else sorted(path.name for path in self._folder.glob("*.safetensors") if not _is_replaced(path))
        if beside:
            raise FileFormatError(
                f"qsim: '{self._folder}' has {', '.join(map(repr, beside))}, which readers would take for parts of what is written; "
                "expected a folder without other safetensors: move them, or write to another folder. Nothing is written"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for path, _ in self._shards:
            path.unlink(missing_ok=True)
        if self._made and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def add(self, name: str, t: Tensor) -> None:
        """A tensor of the checkpoint."""
        if self._held and sum(held.nbytes for held in self._held.values()) + t.nbytes > self._most:
            self._flush()
        t = t.detach().cpu().contiguous()
        storage = t.untyped_storage()
        if storage.nbytes() != t.nbytes or storage.data_ptr() in self._memories:
            t = t.clone()  # the library takes each memory once, and whole
        self._memories.add(t.untyped_storage().data_ptr())
        self._held[name] = t
        self._total += t.nbytes

    def _flush(self) -> None:
        path = self._folder / f"{len(self._shards)}{self._own}"
        self._shards.append((path, list(self._held)))
        path.touch()
        mode = path.stat().st_mode  # as any file of the user's; the library makes one that nobody else may read
        self._library.torch.save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(mode)
        self._held, self._memories = {}, set()

    def finish(self, config: Mapping[str, Any]) -> None:
        """Name what was written, and write ``config.json`` beside it."""
        self._flush()
        before = [path for path in self._folder.iterdir() if path.name == INDEX or _is_replaced(path)]
        count = len(self._shards)
        names = [ONE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        shards, self._shards = self._shards, []
        for (path, _), name in zip(shards, names, strict=True):
            path.replace(self._folder / name)
        if count > 1:
            places = {entry: name for (_, entries), name in zip(shards, names, strict=True) for entry in entries}
            index = {"metadata": {"total_size": self._total}, "weight_map": places}
            write_atomically(self._folder / INDEX, json.dumps(index, indent=2).encode())
        for path in before:
            if path.name not in (*names, *([INDEX] if count > 1 else [])):
                path.unlink()
        write_atomically(self._folder / "config.json", json.dumps(config, indent=2).encode())


def _is_replaced(path: Path) -> bool:
    """Whether a file holds weights under a name that is written here."""
    return path.name == ONE or _SHARD.fullmatch(path.name) is not None
