"""The examples run, cut short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qsim

ROOT = Path(__file__).parents[3]
EXAMPLES = {
    "digits_qat.py": (["--epochs", "1", "--qat-epochs", "1"], "ranges that moved"),
    "vit_digits.py": (["--epochs", "1", "--qat-epochs", "1", "--depth", "1"], "most sensitive at 4 bits"),
    "deploy_onnxruntime.py": (["--epochs", "1", "--width", "8", "--runs", "2"], "0 of 4500 integers differ"),
    "nafnet_denoise.py": (["--steps", "2", "--qat-steps", "2"], "overflow float16"),
}


def test_no_example_is_left_out():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "digits.py"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(name, tmp_path):
    arguments, shown = EXAMPLES[name]
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(qsim.__path__[0]).parent), "COLUMNS": "200"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert shown in run.stdout
