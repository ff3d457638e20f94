"""Whether the qsim of this environment is whole: run from outside of the checkout, with nothing but torch installed."""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import qsim

package = Path(qsim.__file__).parent
assert package.is_relative_to(sys.prefix), f"{package} is not of this environment"
assert (package / "py.typed").exists(), "no py.typed: type checkers would ignore the annotations"
assert importlib.metadata.version("qsim") == qsim.__version__

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
images = torch.randn(32, 3, 8, 8)
sim = qsim.QuantSim(model, images[:1])
sim.calibrate(images.split(8), progress=False)
assert sim.compare(images).output.sqnr > 20
with tempfile.TemporaryDirectory() as folder:
    sim.summary().save(Path(folder) / "summary.html")
    sim.save_encodings(Path(folder) / "model.json")
    subprocess.run([Path(sys.executable).parent / "qsim", "inspect", Path(folder) / "model.json"], check=True, stdout=subprocess.DEVNULL)
print(f"qsim {qsim.__version__} works in Python {sys.version.split()[0]} with torch {torch.__version__}, at level {qsim.cpu_capability()}")
