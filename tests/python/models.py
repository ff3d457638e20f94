"""Models that several test files use."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def seeded(model_class: type[nn.Module], *args: object) -> nn.Module:
    """The model in eval mode with weights, and BatchNorm statistics as a training leaves them, that are the same in every run."""
    torch.manual_seed(0)
    model = model_class(*args)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.num_batches_tracked.fill_(10)
    return model.eval()


class Forward(nn.Module):
    """A model in one line: modules by name, and a forward that reads them."""

    def __init__(self, forward, **modules: nn.Module) -> None:
        super().__init__()
        for name, m in modules.items():
            self.add_module(name, m)
        self.run = forward

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


class Calls(nn.Module):
    """A model that is one expression."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def trained(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """In eval mode, with statistics and affine parameters (of both signs) as a training could leave them."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
            m.running_mean.normal_()
            m.running_var.uniform_(0.05, 4)
            m.num_batches_tracked.fill_(100)
            for parameter in m.parameters():
                nn.init.normal_(parameter)
    return model.to(dtype).eval()


def data(dims: int, channels: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, channels, *(7, 6, 5)[:dims]).to(dtype)


class ResidualBlock(nn.Module):
    """As in ResNet: one ReLU module used twice, an addition in place; the second convolution is depthwise."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class ConvNet(nn.Module):
    """Convolution, BatchNorm, ReLU, depthwise, residual addition, concatenation, pooling, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = nn.Sequential(ResidualBlock(8), ResidualBlock(8))
        self.branch = nn.Conv2d(8, 4, 1)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.stem(x))
        x = self.pool(torch.cat([x, self.branch(x)], 1))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(self.dropout(x))


CONV_NET_KEYS = [
    "input",
    *("stem.0.weight", "stem.0.output"),
    *("layer1.0.conv1.weight", "layer1.0.conv1.output", "layer1.0.conv2.weight", "layer1.0.conv2.output", "layer1.0.add.output"),
    *("layer1.1.conv1.weight", "layer1.1.conv1.output", "layer1.1.conv2.weight", "layer1.1.conv2.output", "layer1.1.add.output"),
    *("branch.weight", "branch.output", "cat.output", "adaptive_avg_pool2d.output", "fc.weight", "fc.output"),
]


class Perceptron(nn.Module):
    """Two linear layers: small enough to be composed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class Branches(nn.Module):
    """Two convolutions that are added, a concatenation with the input of one of them, a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.left = nn.Conv2d(4, 4, 3, padding=1)
        self.right = nn.Conv2d(4, 4, 1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.left(x)) + self.right(x)
        return self.head(torch.cat([y, x], 1))
