"""Ready-made configs. Weights are symmetric per output channel, activations asymmetric per tensor, both signed.

At 8 bits and more a weight channel has steps to spare, so its exact range is used; at 4 bits clipping the few largest weights
buys everything else a finer step, so the range with the least squared error is searched. Activations have tails that calibration
data only samples: their range is always searched. `target` is that of `Config`, and decides symmetry and signs too.
"""

from __future__ import annotations

from qsim.config.config import Config
from qsim.config.profile import Profile
from qsim.numbers.spec import TensorSpec


def _integer(weight_bits: int, activation_bits: int, target: str | Profile) -> Config:
    method = "minmax" if weight_bits >= 8 else "mse"
    fits = weight_bits + activation_bits <= 16  # products of wider integers have steps so fine that an int32 bias would clip
    return Config(
        weight=TensorSpec(bits=weight_bits, symmetric=True, axis=0, method=method),
        activation=TensorSpec(bits=activation_bits),
        bias=None if fits else False,
        target=target,
    )


def _floating(dtype: str, target: str | Profile) -> Config:
    return Config(weight=TensorSpec(dtype=dtype, axis=0), activation=TensorSpec(dtype=dtype), target=target)


def int8(target: str | Profile = "default") -> Config:
    """8-bit weights and activations: what every deployment target runs.

    Examples
    --------
    >>> int8(target="tensorrt").activation.symmetric
    True
    """
    return _integer(8, 8, target)


def int4(target: str | Profile = "default") -> Config:
    """4-bit weights and activations: usually needs training."""
    return _integer(4, 4, target)


def int16(target: str | Profile = "default") -> Config:
    """16-bit weights and activations; biases stay in float."""
    return _integer(16, 16, target)


def w4a8(target: str | Profile = "default") -> Config:
    """4-bit weights, 8-bit activations."""
    return _integer(4, 8, target)


def fp16(target: str | Profile = "default") -> Config:
    """float16 weights and activations; what overflows becomes Inf."""
    return _floating("float16", target)


def bf16(target: str | Profile = "default") -> Config:
    """bfloat16 weights and activations."""
    return _floating("bfloat16", target)


def fp8(target: str | Profile = "default") -> Config:
    """float8_e4m3fn weights and activations, saturating: the largest magnitude of a tensor, of weights per output channel, is 448."""
    return _floating("float8_e4m3fn", target)
