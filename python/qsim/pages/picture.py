"""The curves of a page as a picture, for papers and tickets: PNG, SVG or PDF, drawn by matplotlib."""

from __future__ import annotations

import io

from qsim.pages.chart import Chart

SUFFIXES = (".png", ".svg", ".pdf")

# The page's, in light: a picture has no reader whose system is dark.
_COLORS = {
    "inside": "#3f6fd8",
    "second": "#8d4fc9",
    "third": "#12908a",
    "edge": "#b97a00",
    "error": "#d9482b",
    "warning": "#c98a00",
}
_SIZE, _DPI = (8.0, 4.2), 160  # in inches


def picture(title: str, chart: Chart | None, suffix: str) -> bytes:
    """The contents of a picture's file.

    Parameters
    ----------
    title : str
        Of the page.
    chart : Chart or None
    suffix : str
        One of `SUFFIXES`.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        There is nothing to draw.
    """
    if chart is None:
        raise ValueError(f"the report {title!r} has no curve to draw as {suffix}: save it as .html, which has its tables")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as missing:
        raise ImportError(f"to save a report as {suffix} takes matplotlib: pip install qsim[report]; .html takes nothing") from missing
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    if chart.along is None:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    along = range(1, len(chart.rows) + 1) if chart.along is None else chart.along
    for one in chart.series:
        axes.plot(along, one.values, color=_COLORS[one.color], label=one.name, marker="o" if chart.points else None, markersize=4)
        if chart.picked is not None:
            axes.plot([along[chart.picked]], [one.values[chart.picked]], color=_COLORS[one.color], marker="o", markersize=9)
    for limit in chart.limits:
        axes.axhline(limit.value, color=_COLORS[limit.severity], linestyle="--", linewidth=1, label=limit.meaning)
    axes.set(title=f"{title}: {chart.told}", xlabel=chart.x.text, ylabel=chart.y.text, yscale="log" if chart.y.logarithmic else "linear")
    axes.grid(alpha=0.3)
    if len(chart.series) + len(chart.limits) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format=suffix[1:])
    return file.getvalue()
