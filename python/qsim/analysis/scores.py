"""Scores that a long measurement keeps in a file, so that it goes on where it was interrupted."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from torch import Tensor

from qsim.analysis.metric import Ratio, broken_in

_FORMAT = "qsim-scores-1"


class ScoreFile:
    """Scores by name, kept in a JSON file after each addition.

    Parameters
    ----------
    path : path-like or None
        The file; None keeps them in memory alone. One that exists is continued.
    measured : dict of str to str
        What is measured, by aspect: digests or names. A file whose aspects differ is refused, and left as it is.

    Attributes
    ----------
    scores : dict of str to float

    Raises
    ------
    ValueError
        The file is of something else, or no file of scores.
    """

    def __init__(self, path: str | PathLike[str] | None, measured: dict[str, str]) -> None:
        self.path = None if path is None else Path(path)
        self.measured = measured
        self.scores: dict[str, float] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            if found["format"] != _FORMAT:
                raise KeyError(found["format"])
            measured, scores = dict(found["measured"]), {name: float(value) for name, value in found["scores"].items()}
            scores |= {name: Ratio(scores[name], int(count)) for name, count in found.get("broken", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"qsim: '{path}' is no file of scores ({error!r}); give another path") from error
        differ = [name for name in {**self.measured, **measured} if self.measured.get(name) != measured.get(name)]
        if differ:
            raise ValueError(
                f"qsim: the scores in '{path}' are of something else: {', '.join(differ)} differ. Delete the file to start anew, or give "
                "another path"
            )
        self.scores = scores

    def add(self, name: str, value: float) -> None:
        """Keep a score; on disk too, if there is a path. An interruption leaves the file as it was before or after, never in between."""
        self.scores[name] = value
        if self.path is None:
            return
        # JSON has no NaN and no Inf: as text
        scores = {name: repr(value) if value - value != 0 else value for name, value in self.scores.items()}
        broken = {name: count for name, value in self.scores.items() if (count := broken_in(value))}
        text = json.dumps({"format": _FORMAT, "measured": self.measured, "scores": scores, "broken": broken}, indent=1)
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        beside.write_text(text)
        beside.replace(self.path)


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of named tensors: names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        data = tensor.detach().cpu().contiguous()
        if size := data.numel() * data.element_size():  # an empty tensor has no address
            found.update((ctypes.c_char * size).from_address(data.data_ptr()))
    return found.hexdigest()
