"""How far a scale reaches, in words."""

from __future__ import annotations

from qsim.numbers.spec import TensorSpec


def granularity(spec: TensorSpec) -> str:
    """ "per tensor", "per channel (axis 0)", "per 32 along axis 1, scales in float8_e8m0fnu"; "" of a format without scales.

    Examples
    --------
    >>> granularity(TensorSpec(axis=0)), granularity(TensorSpec(method="dynamic", axis=-1))
    ('per channel (axis 0)', 'dynamic, per token')
    """
    if not spec.has_scale:
        return ""
    stored = "" if spec.scale_format is None else f", scales in {spec.scale_format}"
    if spec.scale_format == "int":
        beside = "channel" if spec.super_block is None else spec.super_block
        stored = f", scales of 1 to {spec.scale_levels} beside a float per {beside}"
    return f"{'dynamic, ' if spec.is_dynamic else ''}{_extent(spec)}{stored}"


def _extent(spec: TensorSpec) -> str:
    if spec.block_size is not None:
        tile = " x ".join(map(str, spec.block_size)) if isinstance(spec.block_size, tuple) else spec.block_size
        return f"per {tile} along axis {spec.axis}"
    if spec.axis is None:
        return "per tensor"
    if spec.is_dynamic:
        return "per token" if spec.axis == -1 else f"per line along axis {spec.axis}"
    return f"per channel (axis {spec.axis})"


def grid_text(dtype: str, symmetric: bool, granularity: str) -> str:
    """Storage type, symmetry and granularity; of a format without scales the type alone.

    Examples
    --------
    >>> grid_text("int8", True, "per channel (axis 0)"), grid_text("float16", True, "")
    ('int8 symmetric per channel (axis 0)', 'float16')
    """
    kind = "scaled" if dtype.startswith("float") else "symmetric" if symmetric else "asymmetric"
    return f"{dtype} {kind} {granularity}" if granularity else dtype
