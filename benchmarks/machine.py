"""On what a run was measured."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

import torch

import qsim


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    facts = Path("/proc/cpuinfo")
    names = (
        [row.partition(":")[2].strip() for row in facts.read_text().splitlines() if row.startswith("model name")] if facts.exists() else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def describe() -> dict[str, str | int]:
    return {
        "cpu": processor(),
        "level": qsim.cpu_capability(),
        "cores": cores(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
