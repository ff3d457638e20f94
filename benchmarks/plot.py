"""The picture of a run: fake_quantize over sizes beside a copy and its peers, and every operator against its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]
PEERS = {
    "torch core": "tab:orange",
    "HistogramObserver": "tab:orange",
    "aminmax": "tab:orange",
    "torch formula": "tab:green",
    "cast there and back": "tab:green",
    "torch.compile": "tab:green",
}


def over_sizes(axes: Axes, rows: list[Row]) -> None:
    drawn = [row for row in rows if row["operator"] == "fake_quantize" and row["dtype"] == "float32" and row["threads"] == 1]
    for case, theirs in [("reused output", ["copy_"]), ("fresh output", ["clone", "torch.compile", "torch core"])]:
        of_case = [row for row in drawn if row["case"] == case]
        axes.plot([row["elements"] for row in of_case], [row["ns_per_element"] for row in of_case], "o-", label=f"qsim, {case}")
        for name in theirs:
            having = [row for row in of_case if name in row["ratios"]]
            times = [row["ns_per_element"] / row["ratios"][name] for row in having]
            axes.plot([row["elements"] for row in having], times, "x--", label=name)
    axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="ns per element", title="fake_quantize, float32, one thread")
    axes.set_xscale("log", base=2)
    axes.legend()


def against_peers(axes: Axes, rows: list[Row]) -> None:
    bars = []
    for row in rows:
        for name, ratio in row["ratios"].items():
            if name in PEERS and row["threads"] == 1 and row["elements"] != 2**25:
                bars.append((f"{row['operator']}: {row['case']}, {row['dtype']} ({name})", 1 / ratio, PEERS[name]))
    bars.sort(key=lambda one: one[1])
    axes.barh([label for label, _, _ in bars], [value for _, value, _ in bars], color=[color for _, _, color in bars])
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="times faster than the peer", title="one thread, against peers")
    axes.tick_params(axis="y", labelsize=6)


def draw(rows: list[Row], to: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 8), layout="constrained")
    over_sizes(left, rows)
    against_peers(right, rows)
    figure.savefig(to, dpi=80)
