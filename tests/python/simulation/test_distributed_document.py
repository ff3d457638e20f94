"""The scripts of docs/distributed.md in two processes, one after the other: starting processes takes longer than what they run."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import qsim

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "distributed.md"
SCRIPTS = dict(zip(["ddp", "fsdp", "scales"], re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S), strict=True))
RUNNER = """
import os, runpy, sys
import torch.distributed as dist

for folder, port in (argument.rsplit(":", 1) for argument in sys.argv[1:]):
    os.environ["MASTER_PORT"] = port
    os.chdir(folder)
    runpy.run_path("script.py", run_name="__main__")
    print("done:", os.path.basename(folder), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, int]]]:
    """The folder of all scripts, what each rank printed, and how it ended."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, script in SCRIPTS.items():
        (folder / name).mkdir()
        (folder / name / "script.py").write_text(script)
    address = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    surroundings = {**os.environ, **address, "PYTHONPATH": str(Path(qsim.__path__[0]).parent)}
    arguments = [f"{folder / name}:{port}" for name, port in zip(SCRIPTS, free_ports(len(SCRIPTS)), strict=True)]
    command = [sys.executable, "-W", "ignore", "-c", RUNNER, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env={**surroundings, "RANK": str(rank)}, **pipes) for rank in range(2)]
    return folder, [(rank.communicate(timeout=200)[0], rank.returncode) for rank in ranks]


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_on_two_ranks(script, run):
    folder, outputs = run
    for output, returncode in outputs:
        assert f"done: {script}" in output, output
        assert returncode == 0, output
    if "torch.save" in SCRIPTS[script]:
        state = torch.load(folder / script / "sim.pt", weights_only=True)
        assert {"0.weight", "quantization.input.scale"} <= state.keys() or "0.0.weight" in state
