"""Whether memory is scarce: of the machine, or of the container that the process runs in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")
# The files of the second version of control groups, and those of the first: the limit, what is used, and its statistics.
_VERSIONS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def is_scarce() -> bool:
    """Whether less than a quarter is free. False where the system (Linux) does not say."""
    return any(free < total // 4 for total, free in _total_and_free())


def _total_and_free() -> Iterator[tuple[int, int]]:
    """In bytes, of each that has a limit. Files that can be dropped from memory count as free."""
    machine = _text(_MACHINE)
    total = _number(r"^MemTotal:\s*(\d+) kB", machine) << 10
    yield total, _number(r"^MemAvailable:\s*(\d+) kB", machine) << 10
    for limit, used, statistics in _VERSIONS:
        most = _number(r"^(\d+)$", _text(_CONTAINER / limit))  # "max", or more than there is: none
        if 0 < most < total:
            dropped = _number(r"^(?:total_)?inactive_file (\d+)", _text(_CONTAINER / statistics))
            yield most, most - _number(r"^(\d+)$", _text(_CONTAINER / used)) + dropped


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else 0
