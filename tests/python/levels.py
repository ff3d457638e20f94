"""Running a script at another instruction-set level: a process chooses its level once, when it first calls a kernel."""

import contextlib
import functools
import io
import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection

import pytest

LEVELS = ("default", "avx2", "avx512")

# Processes are forked from one that has imported torch, which takes longer than most scripts.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "qsim.ops"])


@functools.cache
def output_at(level: str, script: str) -> str:
    """What the script prints at `level`; skips the test where this machine cannot run it. It may import from this folder and from `ops`."""
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_run, args=(level, script, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        printed, error = ours.recv()
    except EOFError:
        process.join()
        pytest.fail(f"the process ended with exit code {process.exitcode}")
    process.join()
    if "does not support it" in error:
        pytest.skip(f"this machine cannot run level {level}")
    assert not error, error[-3000:]
    return printed


def _run(level: str, script: str, results: Connection) -> None:
    os.environ["QSIM_CPU_CAPABILITY"] = level
    here = os.path.dirname(__file__)
    sys.path[:0] = [here, os.path.join(here, "ops")]
    printed, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(script, {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    results.send((printed.getvalue(), error))


def assert_same_output(level: str, script: str) -> None:
    """The script prints something, and at `level` the same as at the lowest level."""
    found = output_at(level, script)
    assert found
    assert found == output_at("default", script)
