"""The scripts of docs/distributed.md, each in two processes."""

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
SCRIPTS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
@pytest.mark.parametrize("script", SCRIPTS, ids=["ddp", "fsdp", "scales"])
def test_runs_on_two_ranks(script, tmp_path):
    (tmp_path / "script.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    surroundings = {**os.environ, **address, "PYTHONPATH": str(Path(qsim.__path__[0]).parent)}
    command = [sys.executable, "-W", "ignore", "script.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, cwd=tmp_path, env={**surroundings, "RANK": str(rank)}, **pipes) for rank in range(2)]
    for rank in ranks:
        output, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0, output
    if "torch.save" in script:
        state = torch.load(tmp_path / "sim.pt", weights_only=True)
        assert {"0.weight", "quantization.input.scale"} <= state.keys() or "0.0.weight" in state
