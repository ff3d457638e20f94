"""How far two encodings of one tensor differ."""

from __future__ import annotations

from qsim.numbers.encoding import Encoding


def difference(a: Encoding, b: Encoding) -> tuple[float, str]:
    """The largest relative difference of scales; in words what else differs, infinitely far."""
    if a.dtype != b.dtype:
        return float("inf"), f"{a.dtype}, and {b.dtype}"
    if a.scale.shape != b.scale.shape or (a.axis, a.block_size) != (b.axis, b.block_size):
        return float("inf"), f"{a.scale.numel()} scales, and {b.scale.numel()}"
    if (a.quant_min, a.quant_max) != (b.quant_min, b.quant_max):
        return float("inf"), f"{a.quant_min} to {a.quant_max}, and {b.quant_min} to {b.quant_max}"
    share = float(((a.scale.double() - b.scale.double()).abs() / a.scale.double()).max())
    zero = int((a.zero_point - b.zero_point).abs().max())
    return (share, f"zero point differs by {zero}, scale by {100 * share:.3g} %") if zero else (share, "")
