"""What tests of other runtimes' integer kernels need of the CPU."""

from pathlib import Path

import pytest

_CPU = Path("/proc/cpuinfo")
_HAS_VNNI = not _CPU.exists() or any(name in _CPU.read_text() for name in ("avx512_vnni", "avx_vnni", "asimddp"))

needs_vnni = pytest.mark.skipif(not _HAS_VNNI, reason="this CPU has no VNNI: the runtime's sums of two products saturate")
