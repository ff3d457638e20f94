"""The histogram of what a quantizer observed, as data that the page's script draws."""

from __future__ import annotations

from html import escape

from qsim.pages.packed import packed
from qsim.quantizers.sketch import Distribution, even_edges

_BINS = 80


def histogram(seen: Distribution | None, ends: tuple[float | None, float | None], told: str) -> str:
    """Counts over what was observed and what the grid spans: `_BINS` of equal width.

    "" where there is no distribution, or all of it is one value and there is no range.

    Parameters
    ----------
    seen : Distribution, optional
    ends : (float or None, float or None)
        Of the grid.
    told : str
        What is said of the grid in words.
    """
    if seen is None:
        return ""
    first, last = ends
    low = seen.lowest if first is None else min(seen.lowest, first)
    high = seen.highest if last is None else max(seen.highest, last)
    if (
        first is not None and last is not None and last - first > 40 * (seen.highest - seen.lowest) > 0
    ):  # a format's own range, such as that of float16: the bars would be one
        low, high = seen.lowest, seen.highest
    if not low < high:
        return ""
    counts = packed(seen.histogram(even_edges(low, high, _BINS)))
    told = f"observed {seen.lowest:.4g} to {seen.highest:.4g}; {told}"
    places = {"low": low, "high": high, "first": first, "last": last}
    data = "".join(f' data-{name}="{place:.6g}"' for name, place in places.items() if place is not None)
    drawn = f'<svg class="histogram" role="img" data-counts="{counts}"{data}><title>{escape(told)}</title></svg>'
    return f'{drawn}<small class="ends"><span>{low:.3g}</span><span>{high:.3g}</span></small>'
