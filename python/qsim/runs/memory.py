"""The most memory that a process has used, and by how much a stretch of it raised that; what was freed, given back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_M_MMAP_THRESHOLD = -3  # of malloc.h


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory at the end of a stretch of work.

    Attributes
    ----------
    peak : int
        Bytes, the most since the process began, whatever used them: resident memory of the process, or what torch's allocator has handed
        out on a CUDA device.
    raised : int
        By how much the stretch raised it. 0 means that it stayed below what was used before, not that it used none.
    """

    peak: int
    raised: int

    def __str__(self) -> str:
        return f"{self.peak / 2**20:.0f} MiB" + (f" (raised by {self.raised / 2**20:.0f})" if self.raised >= 2**20 else "")


def give_back() -> None:
    """Have the C library hand freed memory to the operating system, where it can (glibc).

    It keeps a pool for each thread: many threads that ran one after the other hold, together, what each of them needed alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextmanager
def large_ones_handed_back() -> Iterator[None]:
    """Within it, the C library (glibc) hands tensors of 256 KiB and more back to the operating system as soon as they are freed.

    Its pools keep what is free at their upper end, which not even `give_back` returns: tens of MiB for each thread. Afterwards tensors up
    to 32 MiB come from pools again, as they do in any process that has freed one of that size (mallopt(3), M_MMAP_THRESHOLD).
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if choose is None:
        yield
        return
    choose(_M_MMAP_THRESHOLD, 256 << 10)
    try:
        yield
    finally:
        choose(_M_MMAP_THRESHOLD, 32 << 20)


class MemoryWatch:
    """Notes the peaks when it is made; `peaks` tells what they are then."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(dict.fromkeys(device for device in devices if device.type == "cuda"))
        self._before = self._now()

    def peaks(self) -> dict[str, PeakMemory]:
        """Peaks of "process" (missing on Windows, which does not tell) and of each CUDA device by its name."""
        return {name: PeakMemory(peak, peak - self._before[name]) for name, peak in self._now().items()}

    def _now(self) -> dict[str, int]:
        found = {str(device): torch.cuda.max_memory_allocated(device) for device in self._devices}
        if sys.platform != "win32":
            import resource

            unit = 1 if sys.platform == "darwin" else 1024
            found = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, **found}
        return found
