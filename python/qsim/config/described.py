"""A config in one line."""

from __future__ import annotations

from qsim.config.config import Config
from qsim.config.named import PRESETS
from qsim.numbers.granularity import granularity, grid_text
from qsim.numbers.spec import TensorSpec


def described(config: Config) -> str:
    """What a config quantizes and how, as a line: the preset that it is, if it is one, weights, activations, target and overrides.

    Examples
    --------
    >>> described(qsim.int8())
    'int8: weights int8 symmetric per channel (axis 0), minmax; activations int8 asymmetric per tensor, tf_enhanced'
    """
    parts = [f"{role}s {_spec(getattr(config, role))}" for role in ("weight", "activation")]
    if config.target != "default":
        parts.append(f"target {config.target if isinstance(config.target, str) else config.target.name}")
    if config.overrides:
        parts.append(f"{len(config.overrides)} override{'s' * (len(config.overrides) != 1)}")
    if config.kv_cache is not None:
        parts.append("kv_cache")
    if config.batch_norm != "fold":
        parts.append(f"batch_norm {config.batch_norm if isinstance(config.batch_norm, str) else dict(config.batch_norm)}")
    name = next((name for name, made in PRESETS.items() if config in (made(), made(target=config.target))), "")
    return f"{name}: {'; '.join(parts)}" if name else "; ".join(parts)


def _spec(spec: TensorSpec | None) -> str:
    if spec is None:
        return "in float"
    grid = grid_text(spec.encoding_dtype, spec.symmetric, granularity(spec))
    return f"{grid}, {spec.method}" if spec.has_scale and not spec.is_dynamic else grid
