"""Names close to one that a person mistyped, a glob too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

_BETWEEN = re.compile(r"([*?.]+|\[[^\]]*\])")  # what globs have between letters, and the dots of paths


def close_names(pattern: str, names: Iterable[str], cutoff: float = 0.4) -> list[str]:
    """At most three of `names` that are like `pattern`; of a glob one that matches some of them.

    Parameters
    ----------
    pattern : str
        A name, or a glob as `fnmatch.fnmatchcase` takes it, that matches none.
    names : iterable of str
        Paths with dots.
    cutoff : float
        How like, of 1 for the same; `difflib.get_close_matches` measures it.

    Examples
    --------
    >>> names = ["stem.conv", "layer1.conv1", "layer1.conv2", "head"]
    >>> close_names("hed", names), close_names("haed*", names), close_names("*.cnov[12]", names)
    (['head'], ['head*'], ['*.conv[12]'])
    """
    names = list(dict.fromkeys(names))
    if not any(sign in pattern for sign in "*?["):
        return get_close_matches(pattern, names, cutoff=cutoff)
    words = dict.fromkeys(word for name in names for word in name.split("."))
    parts = ["", *_BETWEEN.split(pattern), ""]  # what lies between is at even places
    for i in range(1, len(parts), 2):
        is_whole = parts[i - 1][-1:] in ("", ".") and parts[i + 1][:1] in ("", ".")
        if parts[i] and not (parts[i] in words if is_whole else any(parts[i] in name for name in names)):
            pieces = words if is_whole else [piece for word in words for piece in (word, word[: len(parts[i])], word[-len(parts[i]) :])]
            parts[i] = next(iter(get_close_matches(parts[i], dict.fromkeys(pieces), n=1, cutoff=cutoff)), parts[i])
    corrected = "".join(parts)
    return [corrected] if any(fnmatchcase(name, corrected) for name in names) else []
