"""Ready-made configs. Weights are symmetric per output channel, activations asymmetric per tensor, both signed.

At 8 bits and more a weight channel has steps to spare, so its exact range is used; at 4 bits clipping the few largest weights
buys everything else a finer step, so the range with the least squared error is searched. Activations have tails that calibration
data only samples: their range is always searched. `target` is that of `Config`, and decides symmetry and signs too.

Those for language models (`w4a16`, `w8a8_dynamic`, `w8a8_static`, `fp8_dynamic`, `fp8_static`, `fp8_block`, `mxfp8`, `mxfp4`, `nvfp4`)
quantize linear layers alone, as servers of such models do. Embeddings stay in float: they are looked up, not multiplied, so fewer bits
save memory alone, and a tied one is the head too. The last layer with a weight, the head, stays in float: it is a few percent of the
products, and behind it nothing makes up for its errors. llm-compressor, ModelOpt and AutoRound leave it out by default as well; to
quantize it: ``config.override(position="last", weight=config.weight, activation=config.activation)``. `kv_cache` is that of `Config`:
``kv_cache=8`` stores keys and values in 8 bits, a scale per token and head.
"""

from __future__ import annotations

import dataclasses

from qsim.call_fit import tells_arguments
from qsim.config.config import Config
from qsim.config.kv_cache import KVCache
from qsim.config.profile import LINEAR_LAYERS, Profile
from qsim.numbers.spec import TensorSpec

Cache = KVCache | TensorSpec | int | tuple[TensorSpec | int | None, TensorSpec | int | None] | None
_BY_OVERRIDE = "Fields of its specs are changed by override: qsim.int8().override(bits=4), override(weight={'block_size': 32})"


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


@tells_arguments(advice=_BY_OVERRIDE)
def int8(target: str | Profile = "default") -> Config:
    """8-bit weights and activations: what every deployment target runs.

    Examples
    --------
    >>> int8(target="tensorrt").activation.symmetric
    True
    """
    return _integer(8, 8, target)


@tells_arguments(advice=_BY_OVERRIDE)
def int4(target: str | Profile = "default") -> Config:
    """4-bit weights and activations: usually needs training.

    Examples
    --------
    >>> int4().weight.bits, int4().weight.method
    (4, 'mse')
    """
    return _integer(4, 4, target)


@tells_arguments(advice=_BY_OVERRIDE)
def int16(target: str | Profile = "default") -> Config:
    """16-bit weights and activations; biases stay in float.

    Examples
    --------
    >>> int16().activation.quant_max, int16().bias
    (32767, False)
    """
    return _integer(16, 16, target)


@tells_arguments(advice=_BY_OVERRIDE)
def w4a8(target: str | Profile = "default") -> Config:
    """4-bit weights, 8-bit activations.

    Examples
    --------
    >>> w4a8().weight.bits, w4a8().activation.bits
    (4, 8)
    """
    return _integer(4, 8, target)


@tells_arguments(advice=_BY_OVERRIDE)
def fp16(target: str | Profile = "default") -> Config:
    """float16 weights and activations; what overflows becomes Inf.

    Examples
    --------
    >>> sim = qsim.QuantSim(torch.nn.Tanh(), torch.zeros(1), fp16())
    >>> report = sim.calibrate([torch.ones(4)], progress=False)
    >>> sim(torch.tensor([0.1])).half().float() == sim(torch.tensor([0.1]))
    tensor([True])
    """
    return _floating("float16", target)


@tells_arguments(advice=_BY_OVERRIDE)
def bf16(target: str | Profile = "default") -> Config:
    """bfloat16 weights and activations.

    Examples
    --------
    >>> bf16().weight.dtype, bf16().weight.has_scale
    ('bfloat16', False)
    """
    return _floating("bfloat16", target)


@tells_arguments(advice=_BY_OVERRIDE)
def fp8(target: str | Profile = "default") -> Config:
    """float8_e4m3fn weights and activations, saturating: the largest magnitude of a tensor, of weights per output channel, is 448.

    Examples
    --------
    >>> fp8().activation.dtype, fp8().activation.has_scale, fp8().activation.quant_max
    ('float8_e4m3fn', True, 448)
    """
    return _floating("float8_e4m3fn", target)


def _language_model(weight: TensorSpec, activation: TensorSpec | None, kv_cache: Cache, target: str | Profile) -> Config:
    config = Config(weight=weight, activation=activation, bias=False, target=target, kv_cache=kv_cache)
    return config.override(position="last", off=True)


def _blocks(format: str, kv_cache: Cache, target: str | Profile) -> Config:
    return _language_model(TensorSpec(dtype=format), TensorSpec(dtype=format), kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def w4a16(group: int | None = 128, *, symmetric: bool = True, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """4-bit weights in groups along the input features, activations as they are: what GPTQ, AWQ and llama.cpp deploy.

    Parameters
    ----------
    group : int or None
        Weights that share a scale; the last group of a row may be short. Usually 32, 64 or 128. None: one scale an output channel.
    symmetric : bool
        Without zero points. AWQ and ``MatMulNBits`` know groups with them too.
    kv_cache : int, TensorSpec, pair of these, or None
        As in `Config`.
    target : str or Profile
        By default linear layers alone.

    Examples
    --------
    >>> w4a16(group=32).weight.block_size, w4a16().activation is None
    (32, True)
    """
    weight = TensorSpec(bits=4, symmetric=symmetric, axis=0 if group is None else 1, block_size=group, method="mse")
    return _language_model(weight, None, kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def w8a8_dynamic(*, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """8-bit weights per output channel, 8-bit activations with a scale for each token from the token itself.

    Both on ``[-127, 127]``: a scale is the largest magnitude over 127, as vLLM's and TensorRT-LLM's kernels compute it.

    Examples
    --------
    >>> w8a8_dynamic().activation.is_dynamic, w8a8_dynamic().activation.axis
    (True, -1)
    """
    weight = TensorSpec(symmetric=True, signed=True, narrow=True, axis=0, method="minmax")
    return _language_model(weight, dataclasses.replace(weight, axis=-1, method="dynamic"), kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def fp8_dynamic(*, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """float8_e4m3fn weights per output channel, float8_e4m3fn activations with a scale for each token from the token itself.

    Examples
    --------
    >>> fp8_dynamic().activation.method, fp8_dynamic().activation.axis
    ('dynamic', -1)
    """
    dtype = "float8_e4m3fn"
    activation = TensorSpec(dtype=dtype, axis=-1, method="dynamic")
    return _language_model(TensorSpec(dtype=dtype, axis=0), activation, kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def w8a8_static(*, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """8-bit weights per output channel, 8-bit activations with one scale from calibration, both symmetric.

    Servers save the pass that finds a scale for each token, and lose accuracy where tokens differ: compare with `w8a8_dynamic`.

    Examples
    --------
    >>> w8a8_static().activation.is_dynamic, w8a8_static().activation.axis, w8a8_static().activation.quant_min
    (False, None, -128)
    """
    weight = TensorSpec(symmetric=True, signed=True, axis=0, method="minmax")
    return _language_model(weight, TensorSpec(symmetric=True, signed=True), kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def fp8_static(*, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """float8_e4m3fn weights per output channel, float8_e4m3fn activations with one scale from calibration: what servers call FP8 static.

    Examples
    --------
    >>> fp8_static().activation.is_dynamic, fp8_static().activation.axis
    (False, None)
    """
    dtype = "float8_e4m3fn"
    return _language_model(TensorSpec(dtype=dtype, axis=0), TensorSpec(dtype=dtype), kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def fp8_block(block: int = 128, *, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """float8_e4m3fn weights with a scale for each tile of `block` x `block`, float8_e4m3fn activations with a scale for each `block`
    values of a token, from the values themselves: how DeepSeek-V3 was trained and Qwen3's FP8 checkpoints are stored.

    Tiles and blocks at the ends may be short.

    Examples
    --------
    >>> config = fp8_block()
    >>> config.weight.block_size, config.activation.axis, config.activation.block_size
    ((128, 128), -1, 128)
    """
    dtype = "float8_e4m3fn"
    activation = TensorSpec(dtype=dtype, axis=-1, block_size=block, method="dynamic")
    return _language_model(TensorSpec(dtype=dtype, axis=(0, 1), block_size=(block, block)), activation, kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def mxfp8(*, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """Weights and activations in MXFP8 (E4M3): blocks of 32 with a power of two each, those of activations from the tensor itself.

    Examples
    --------
    >>> mxfp8().weight.dtype, mxfp8().weight.block_size
    ('float8_e4m3fn', 32)
    """
    return _blocks("mxfp8", kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def mxfp4(*, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """Weights and activations in MXFP4: E2M1 in blocks of 32 with a power of two each, those of activations from the tensor itself.

    ``config.override(activation=None)`` leaves activations in float, as models that are published in MXFP4 have them.

    Examples
    --------
    >>> mxfp4().weight.scale_format
    'float8_e8m0fnu'
    """
    return _blocks("mxfp4", kv_cache, target)


@tells_arguments(advice=_BY_OVERRIDE)
def nvfp4(*, kv_cache: Cache = None, target: str | Profile = LINEAR_LAYERS) -> Config:
    """Weights and activations in NVFP4: E2M1 in blocks of 16 with an E4M3 scale each, and one float32 a tensor.

    The float32 of an activation comes from the tensor itself, too, and not from calibration, as some engines have it.

    Examples
    --------
    >>> nvfp4().weight.scale_format, nvfp4().weight.block_size
    ('float8_e4m3fn', 16)
    """
    return _blocks("nvfp4", kv_cache, target)
