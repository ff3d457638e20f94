"""Networks to export, and ONNX Runtime as the oracle of what was exported."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from blocks import Transformer
from models import seeded
from torch import Tensor, nn

import qsim
from qsim.onnx.sessions import session


class Vision(nn.Module):
    """Residual addition, depthwise and transposed convolution, squeeze-excite, concatenation, maximum and average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.squeeze, self.excite = nn.Linear(8, 4), nn.Linear(4, 8)
        self.mix = nn.Conv2d(16, 8, 1)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8 * 4, 6)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.norm(self.stem(image)))
        y = self.up(F.max_pool2d(F.relu(x + self.depthwise(x)), 2))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        y = self.mix(torch.cat([y * gate[..., None, None], x], 1))
        z = F.adaptive_avg_pool2d(F.avg_pool2d(y, 2), 2)
        return y, self.head(self.dropout(z.flatten(1)))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.gru, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.table(tokens))[0])


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(n))


def vectors(n: int) -> Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(n))


def tokens(n: int) -> Tensor:
    return torch.randint(0, 20, (n, 5), generator=torch.Generator().manual_seed(n))


# Each network, its inputs, and how many of them give 10,000 outputs.
NETWORKS = {
    "vision": (Vision, images, 20),
    "perceptron": (Perceptron, vectors, 420),
    "attention": (Transformer, images, 260),
    "recurrent": (Recurrent, tokens, 340),
}


@functools.cache
def simulated(name: str, config: qsim.Config) -> qsim.QuantSim:
    """A calibrated simulation; not to be changed."""
    network, inputs, _ = NETWORKS[name]
    sim = qsim.QuantSim(seeded(network), inputs(2), config)
    sim.calibrate([inputs(64)], progress=False)
    return sim


@functools.cache
def exported(name: str, config: qsim.Config, target: str | None = None) -> tuple[Path, qsim.ExportReport]:
    """The file of `simulated`, written once; not to be changed."""
    path = Path(tempfile.mkdtemp(prefix="qsim-"), f"{name}.onnx")
    return path, simulated(name, config).export(path, target)


def computed(path: Path, *inputs: Tensor, optimised: bool = False) -> list[np.ndarray]:
    """What ONNX Runtime computes."""
    run = session(path, optimised=optimised)
    return run.run(None, {end.name: x.numpy() for end, x in zip(run.get_inputs(), inputs, strict=True)})


def expected(sim: qsim.QuantSim, *inputs: Tensor) -> list[np.ndarray]:
    """What the simulation computes."""
    with torch.no_grad():
        found = sim(*inputs)
    return [t.numpy() for t in ([found] if isinstance(found, Tensor) else found)]


def optimised_types(path: Path, folder: Path) -> list[str]:
    """Types of the operators in ONNX Runtime's optimised graph."""
    saved = folder / "optimised.onnx"
    session(path, optimised=True, save=saved)
    return [node.op_type for node in onnx.load(saved).graph.node]


def nodes(path: Path) -> dict[str, onnx.NodeProto]:
    """The nodes of a model by the names of their first results."""
    return {node.output[0]: node for node in onnx.load(path).graph.node}


def constants(path: Path) -> dict[str, np.ndarray]:
    """The initializers of a model."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
