"""Small constants and small numbers that float16 turns into zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import Calls
from torch import Tensor

from museum.exhibit import Case, exhibit, noise


def with_zeros(*shape: int) -> Tensor:
    x = noise(*shape)
    x[1] = 0
    return x


@exhibit("QS013", "normalize")
def normalize() -> Case:
    """F.normalize of a zero vector is NaN in half precision: its epsilon of 1e-12 is 0 there: pytorch/pytorch#32137.

    https://github.com/pytorch/pytorch/issues/32137
    """
    return Case(Calls(lambda x: F.normalize(x, dim=-1)), [with_zeros(4, 8)], Calls(lambda x: F.normalize(x, dim=-1, eps=1e-3)))


@exhibit("QS013", "add")
def equal_scores() -> Case:
    """Scores scaled by their range with an epsilon of 1e-8 are NaN in float16 where all are equal: lightonai/pylate#239.

    https://github.com/lightonai/pylate/issues/239
    """

    def scaled(epsilon: float):
        def model(x: Tensor) -> Tensor:
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            return (x - low) / (high - low + epsilon)

        return Calls(model)

    return Case(scaled(1e-8), [with_zeros(4, 8)], scaled(1e-3))


@exhibit("QS013", "maximum")
def division_by_maximum() -> Case:
    """x / max(y, 1e-9) divides by zero once it is FP16; OpenVINO replaces such numbers: openvinotoolkit/openvino#8676.

    https://github.com/openvinotoolkit/openvino/pull/8676
    """

    def model(epsilon: float):
        return Calls(lambda x: x / torch.maximum(x.abs().sum(-1, keepdim=True), torch.tensor(epsilon)))

    return Case(model(1e-9), [with_zeros(4, 8)], model(1e-3))


@exhibit("QS013", "clamp")
def quaternion() -> Case:
    """normalize_quaternion gives NaN for the zero quaternion in float16: kornia/kornia#4021.

    https://github.com/kornia/kornia/issues/4021
    """

    def model(epsilon: float):
        return Calls(lambda q: q / q.norm(dim=-1, keepdim=True).clamp(min=epsilon))

    return Case(model(1e-12), [with_zeros(4, 4)], model(1e-3))


@exhibit("QS014", "softmax")
def logarithm_of_softmax() -> Case:
    """What a softmax returns is below float16, 0, and its logarithm -Inf: pytorch/pytorch#119898.

    https://github.com/pytorch/pytorch/pull/119898
    """
    return Case(Calls(lambda x: x.softmax(-1).log()), [8 * noise(4, 16)], Calls(lambda x: x.log_softmax(-1)))


@exhibit("QS013", "add")
def gumbel() -> Case:
    """The logarithms of Gumbel noise meet zero in float16: pytorch/pytorch#41663.

    https://github.com/pytorch/pytorch/issues/41663. The guess there is right: the epsilon is below float16.
    """

    def sample(epsilon: float):
        return Calls(lambda x, u: (x - ((u + epsilon).log().neg() + epsilon).log()).softmax(-1))

    u = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).clamp(0.05, 0.95)
    zeros = u.clone()
    x = noise(4, 8)
    zeros[torch.arange(4), x.argmax(-1)] = 0
    return Case(sample(1e-10), [(3 * x, zeros)], sample(1e-3))
