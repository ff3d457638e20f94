"""The examples run, cut short."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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

# Runs an example for each line that it is given, each in a process of its own, which has imported what all of them import but qsim.
RUNNER = """
import json, os, runpy, sys
import matplotlib.pyplot, rich.table, sklearn.datasets, torch._dynamo, tqdm

for line in sys.stdin:
    folder, *arguments = json.loads(line)
    if (child := os.fork()) == 0:
        os.chdir(folder)
        for descriptor, name in ((1, "printed"), (2, "errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = arguments
        sys.path[0] = os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., int]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(qsim.__path__[0]).parent), "COLUMNS": "200"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", RUNNER], env=environment, **pipes) as runner:

        def run(*arguments: object) -> int:
            runner.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
            return int(runner.stdout.readline())

        yield run
        runner.stdin.close()


def test_no_example_is_left_out():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "digits.py"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(name, run, tmp_path):
    arguments, shown = EXAMPLES[name]
    assert run(tmp_path, ROOT / "examples" / name, *arguments) == 0, (tmp_path / "errors").read_text()[-2000:]
    assert shown in (tmp_path / "printed").read_text()
