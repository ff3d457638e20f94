"""What `Config.kv_cache` accepts."""

import dataclasses

import pytest

import qsim
from qsim import TensorSpec

PRESETS = [qsim.w4a16, qsim.w8a8_dynamic, qsim.fp8_dynamic, qsim.mxfp8, qsim.mxfp4, qsim.nvfp4]
BY_TOKEN = TensorSpec(bits=4, method="dynamic", axis=-1)
BY_CHANNEL = TensorSpec(bits=4, method="minmax", axis=-1)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_take_a_cache(preset):
    assert preset().kv_cache is None
    config = preset(kv_cache=4)
    assert config.kv_cache == (BY_TOKEN, BY_TOKEN)
    assert dataclasses.replace(config, kv_cache=None) == preset()


@pytest.mark.parametrize("given", [8, BY_TOKEN, (8, 4), (BY_CHANNEL, 2), (None, 8), TensorSpec(dtype="mxfp4"), None, (None, None)])
def test_a_config_with_a_cache_is_json(given):
    config = qsim.w4a16(kv_cache=given)
    assert qsim.Config.from_json(config.to_json()) == config
    assert hash(config) == hash(qsim.w4a16(kv_cache=given))
    assert config.override("a", bits=8).kv_cache == config.kv_cache


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("8", TypeError, "kv_cache='8' for the keys"),
        (True, TypeError, "kv_cache=True"),
        ((8, 8, 8), TypeError, "kv_cache of 3 entries"),
        (20, ValueError, "bits=20"),
        ((8, TensorSpec(method="dynamic")), ValueError, "axis=None for the values: their numbers would change when tokens are added"),
        (TensorSpec(method="dynamic", axis=-2), ValueError, "axis=-2"),
        (TensorSpec(dtype="nvfp4"), ValueError, "NVFP4"),
        (TensorSpec(axis=1), ValueError, "axis=1"),
        (TensorSpec(axis=-1, block_size=4), ValueError, "block_size=4"),
        (TensorSpec(method="ema"), ValueError, "method='minmax'"),
    ],
)
def test_what_is_no_cache_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        qsim.w4a16(kv_cache=given)
