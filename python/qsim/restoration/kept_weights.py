"""A folder that keeps what was found for each weight, so that a restoration that was cut off goes on where it was."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsim.atomic import write_atomically
from qsim.errors import FileFormatError
from qsim.restoration.choice import Solved, Steps, WeightOutcome
from qsim.restoration.frozen import is_frozen
from qsim.restoration.ranks import Group, agree, is_first
from qsim.restoration.restore_report import Restored
from qsim.simulation.simulation import Simulation

_HEAD = "restoration.json"
_FORMAT = "qsim restoration 1"


class KeptWeights:
    """One folder, of one simulation and one way to restore it.

    Parameters
    ----------
    path : str or PathLike
        Made where it is not there.
    sim : Simulation
    steps : Steps
    group : ProcessGroup or None
        Ranks that restore together: the first writes, and all must read the same.

    Raises
    ------
    ValueError
        The folder belongs to another simulation, or to another way of restoring it.
    FileFormatError
        A file in it is not what was written.
    """

    def __init__(self, path: str | os.PathLike[str], sim: Simulation, steps: Steps, group: Group) -> None:
        self._folder, self._sim, self._group = Path(path), sim, group
        self._number = {key: i for i, key in enumerate(sim.quantizers())}
        head = {"format": _FORMAT, "of": _fingerprint(sim, steps)}
        file = self._folder / _HEAD
        if file.exists():
            if _read_json(file) != head:
                raise ValueError(
                    f"path={str(self._folder)!r} keeps what was found for another model, other encodings, or with other options; "
                    "give another path, or remove the folder"
                )
        elif is_first(group):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(head).encode())

    def found(self, keys: Iterable[str]) -> Iterator[tuple[str, WeightOutcome | str]]:
        """What is there of these weights: what `choose` said."""
        there = [(key, file) for key in keys if (file := self._file(key)).exists()]
        agree([key for key, _ in there], "which weights are kept in path=", self._group)
        for key, file in there:
            yield key, self._read(key, file)

    def keep(self, key: str, outcome: WeightOutcome | str) -> None:
        """Write it. A restoration that is cut off while it does leaves no file."""
        if not is_first(self._group):
            return
        content: dict[str, Any] = {"key": key}
        if isinstance(outcome, str):
            content["skipped"] = outcome
        else:
            content["row"] = dataclasses.asdict(outcome.row)
            if (solved := outcome.solved) is not None:
                parts = {name: getattr(solved, name) for name in ("weight", "solves", "bias", "value", "read")}
                content["solved"] = parts | {"scale": solved.encoding.scale, "zero_point": solved.encoding.zero_point}
        stream = io.BytesIO()
        torch.save(content, stream)
        write_atomically(self._file(key), stream.getvalue())

    def _file(self, key: str) -> Path:
        return self._folder / f"{self._number[key]:05d}.pt"

    def _read(self, key: str, file: Path) -> WeightOutcome | str:
        weight = self._sim.weights()[key]
        try:
            content = torch.load(file, map_location=weight.device, weights_only=True)
            if content["key"] != key:
                raise KeyError(content["key"])
            if "skipped" in content:
                return str(content["skipped"])
            row = Restored(**content["row"])
            if "solved" not in content:
                return WeightOutcome(row, None)
            parts = dict(content["solved"])
            encoding = self._sim.quantizers()[key].encoding
            assert encoding is not None
            encoding = dataclasses.replace(encoding, scale=parts.pop("scale"), zero_point=parts.pop("zero_point"))
            solved = Solved(encoding=encoding, **parts)
            if solved.weight.shape != weight.shape:
                raise ValueError(f"a weight of shape {tuple(solved.weight.shape)} for one of shape {tuple(weight.shape)}")
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError, AttributeError, pickle.UnpicklingError) as error:
            raise FileFormatError(f"{file}: is not what was found for '{key}' ({error}); remove it, and it is solved for again") from error
        return WeightOutcome(row, solved)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise FileFormatError(f"{file}: is not JSON ({error}); remove the folder, or give another path") from error


def _fingerprint(sim: Simulation, steps: Steps) -> str:
    """Of the options, the model's weights, and all encodings. Data may be other ones."""
    digest = hashlib.sha256(repr(steps).encode())
    for name, tensor in (*sim.model.named_parameters(), *sim.model.named_buffers()):
        _add(digest, f"{name} frozen" if is_frozen(tensor) else name, [tensor])
    for key, quantizer in sim.quantizers().items():
        encoding = quantizer.encoding
        _add(digest, f"{key} {quantizer.spec} {quantizer.enabled}", [] if encoding is None else [encoding.scale, encoding.zero_point])
    return digest.hexdigest()


def _add(digest: Any, name: str, tensors: Sequence[Tensor]) -> None:
    digest.update(name.encode())
    for t in tensors:
        dense = t.detach().cpu().contiguous()
        digest.update(f"{tuple(t.shape)} {t.dtype}".encode())
        if dense.numel():
            digest.update((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))
