"""Models that several test files use."""

import torch
from torch import nn


class Forward(nn.Module):
    """A model in one line: modules by name, and a forward that reads them."""

    def __init__(self, forward, **modules: nn.Module) -> None:
        super().__init__()
        for name, m in modules.items():
            self.add_module(name, m)
        self.run = forward

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


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
