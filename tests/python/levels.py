"""Running a script at another instruction-set level: a process chooses its level once."""

import os
import subprocess
import sys

import pytest

LEVELS = ("default", "avx2", "avx512")


def output_at(level: str, script: str) -> str:
    """What the script prints at `level`; skips the test where this machine cannot run it. It may import from this folder and from `ops`."""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.join(here, "ops"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "QSIM_CPU_CAPABILITY": level, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    if "does not support it" in run.stderr:
        pytest.skip(f"this machine cannot run level {level}")
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def assert_same_output(level: str, script: str) -> None:
    """The script prints something, and at `level` the same as at the lowest level."""
    found = output_at(level, script)
    assert found
    assert found == output_at("default", script)
