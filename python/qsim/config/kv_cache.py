"""What keys and values in the cache of a language model are stored as."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from qsim.numbers.spec import TensorSpec
from qsim.options import shown


class KVCache(NamedTuple):
    """Specs of the keys and the values in a cache; None leaves one in float.

    Axes are those of a cache of shape ``[..., tokens, head_dim]``, wherever an operation has them: ``axis=-1`` is `head_dim`.

    Examples
    --------
    >>> cache = qsim.w4a16(kv_cache=(8, 4)).kv_cache
    >>> cache.keys.bits, cache.values.bits, cache.values.method
    (8, 4, 'dynamic')
    """

    keys: TensorSpec | None
    values: TensorSpec | None


def kv_cache(given: Any) -> KVCache | None:
    """What `Config.kv_cache` accepts, as a pair of specs. A TypeError or ValueError says what else was got."""
    if given is None:
        return None
    if not isinstance(given, tuple):
        given = (given, given)
    if len(given) != 2:
        raise TypeError(f"Config: got kv_cache of {len(given)} entries; expected one for both, or two: (keys, values)")
    found = KVCache(*(_spec(entry, what) for entry, what in zip(given, KVCache._fields, strict=True)))
    return None if found == (None, None) else found


def _spec(given: Any, what: str) -> TensorSpec | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool):
        # Per token and head, from the smallest value to the largest: Liu et al., KIVI (2024), section 3, have values so.
        return TensorSpec(bits=given, method="dynamic", axis=-1)
    if not isinstance(given, TensorSpec):
        raise TypeError(f"Config: got kv_cache={shown(given)} for the {what}; expected bits, a TensorSpec, or None to leave them in float")
    spec = dataclasses.replace(given, method="dynamic", nonfinite="skip") if given.scale_format is not None else given
    if spec.is_dynamic:
        # The group of a token never changes then: what was written once is read as the same numbers ever after.
        if spec.axis != -1:
            raise ValueError(
                f"Config: got kv_cache with method='dynamic', axis={spec.axis} for the {what}: their numbers would change when tokens are "
                "added; use axis=-1, a scale per token and head"
            )
        if spec.scale_format == "float8_e4m3fn":
            raise ValueError(
                f"Config: got kv_cache in NVFP4 for the {what}: its float32 comes from the whole tensor, so their numbers would change "
                "when tokens are added; use 'mxfp4', or 4 bits"
            )
    elif spec.axis not in (None, -1) or spec.block_size is not None:
        raise ValueError(
            f"Config: got kv_cache with axis={spec.axis}, block_size={spec.block_size} for the {what}; expected axis=-1, a scale per "
            "channel of head_dim, or None, one for all (only method='dynamic' takes blocks)"
        )
    elif spec.is_running:
        raise ValueError(f"Config: got kv_cache with method='ema' for the {what}; use method='minmax', which is calibrated")
    return spec
