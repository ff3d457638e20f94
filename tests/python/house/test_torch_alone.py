"""The core needs torch alone: no other package that happens to be installed, NumPy among them, is imported before it is used."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import qsim

PROGRAM = """
import sys, tempfile
from pathlib import Path
sys.path[:0] = sys.argv[1:]
import torch
from torch import nn
import qsim

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
images = torch.randn(32, 3, 8, 8)
data = images.split(8)
equalized = qsim.equalize(model, images[:1])
sim = qsim.QuantSim(model, images[:1], qsim.w4a8())
sim.calibrate(data, progress=False)
assert sim.compare(images).output.sqnr > 15
sim.sensitivity(data, progress=False)
sim.progressive(data)
sim.restore(data, progress=False)
qsim.doctor(model, data)
qsim.quantize(model, images[:1], data, lambda sim, data: 1.0, goal=0.9, seconds=5)
with tempfile.TemporaryDirectory() as folder:
    sim.summary().save(Path(folder) / "summary.html")
    sim.save_encodings(Path(folder) / "model.json")
sim.bake()
for cure, use in (
    ("qsim[onnx]", lambda: sim.export("model.onnx")),
    ("qsim[onnx]", lambda: qsim.quantize_onnx),
    ("qsim[search]", lambda: sim.search_bits(data, budget=qsim.Budget(size=0.5))),
):
    try:
        use()
    except ImportError as error:
        assert cure in str(error), error
    else:
        raise AssertionError(cure)
for name in set(qsim.__all__) - {"quantize_onnx", "OnnxQuantized"}:
    getattr(qsim, name)
assert "numpy" not in sys.modules
"""


def needed(name: str, found: set[str]) -> set[str]:
    """A distribution and all that it needs."""
    if name not in found:
        found.add(name)
        required = [entry for entry in metadata.requires(name) or () if "extra ==" not in entry and "sys_platform ==" not in entry]
        for entry in required:
            needed(re.match(r"[\w.-]+", entry)[0], found)
    return found


def test_the_core_runs_where_torch_alone_is_installed(tmp_path):
    for name in needed("torch", set()):
        for file in metadata.files(name):
            top = Path(file.parts[0])
            link = tmp_path / top
            if top.name not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(Path(metadata.distribution(name).locate_file(top)).resolve())
    package = Path(qsim.__file__).parent.parent
    command = [sys.executable, "-S", "-I", "-W", "ignore", "-c", PROGRAM, tmp_path, package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
