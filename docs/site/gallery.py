"""The pictures of docs/gallery.md, from a real run: a small CNN trained on scikit-learn's digits, quantized, and looked at.

    python docs/site/gallery.py FOLDER

Drawings are SVG, one for light pages and one for dark ones. Reports are photographed where a Chromium is installed (apt install chromium);
where there is none, the page says so.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

import qsim

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "python")]

from browser import CHROMIUM, Browser  # noqa: E402
from digits import accuracy, loaders, train  # noqa: E402
from digits_qat import DigitsNet  # noqa: E402

from qsim.numbers.range_methods import SEARCHES  # noqa: E402

INK = {"light": "#24292f", "dark": "#ced6dd"}  # on the theme's grounds
SHOT = (1200, 860)


@dataclass
class Run:
    """What the pictures show."""

    sim: qsim.QuantSim
    calibration: qsim.CalibrationReport
    comparison: qsim.Comparison
    sensitivity: qsim.Sensitivity
    search: qsim.BitSearch
    progressive: qsim.Progressive
    diagnosis: qsim.Diagnosis

    @classmethod
    def made(cls) -> Run:
        torch.manual_seed(0)
        train_loader, test_loader = loaders()
        model = DigitsNet()
        train(model, train_loader, 6, torch.optim.Adam(model.parameters(), 3e-3), "train")
        model.eval()
        batches = list(train_loader)[:4]
        sim = qsim.QuantSim(model, batches[0][0], qsim.int4())
        calibration = sim.calibrate(batches, progress=False)
        test = list(test_loader)
        return cls(
            sim,
            calibration,
            sim.compare(batches[0]),
            sim.sensitivity(test, accuracy, progress=False),
            sim.search_bits(batches, budget=qsim.Budget(size=0.2), candidates=(2, 4, 6, 8), probes=200, progress=False),
            sim.progressive(test, accuracy, progress=False),
            qsim.doctor(Overflowing(model), batches, target="tensorrt-fp16"),
        )


class Overflowing(torch.nn.Module):
    """The network behind a norm that leaves float16 when it squares."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        bright = images * 1000
        return self.model(bright / bright.square().mean((1, 2, 3), keepdim=True).sqrt())


def draw(folder: Path, name: str, content: Callable[[plt.Axes], None]) -> None:
    """One drawing for a light page, one for a dark page."""
    for ground, ink in INK.items():
        keys = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
        settings = dict.fromkeys(keys, ink) | {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "qsim"}
        with mpl.rc_context(settings):
            figure, axes = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
            content(axes)
            figure.savefig(folder / f"{name}-{ground}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


def histogram(run: Run, folder: Path) -> None:
    key = "stem.0.output"
    edges, masses = run.sim.quantizers()[key].observer.histogram(96)
    ends = {}
    for method in SEARCHES:
        run.sim.set_method(method)
        ends[method] = run.sim.encodings()[key].max.item()
    run.sim.set_method("tf_enhanced")

    def content(axes: plt.Axes) -> None:
        axes.stairs(masses / masses.sum() * 100, edges, fill=True, alpha=0.45, color="tab:blue")
        for number, (method, end) in enumerate(ends.items()):
            axes.axvline(end, color=f"C{number + 1}", label=f"{method}: {end:.2f}", linewidth=1.6)
        axes.set(yscale="log", xlabel=f"value of {key}", ylabel="share of the values (%)")
        axes.legend(frameon=False, title="upper end at 4 bits", loc="center left", bbox_to_anchor=(1, 0.5))

    draw(folder, "histogram", content)


def sqnr(run: Run, folder: Path) -> None:
    rows = [row for row in run.comparison.rows if row.role != "weight"]

    def content(axes: plt.Axes) -> None:
        places = range(len(rows))
        axes.plot(places, [row.local.sqnr for row in rows], "o-", label="by its own quantizer", color="tab:blue")
        axes.plot(places, [row.accumulated.sqnr for row in rows], "s-", label="with everything before it", color="tab:orange")
        axes.set_xticks(places, [row.key.removesuffix(".output") for row in rows], rotation=35, ha="right")
        axes.set(ylabel="SQNR against float (dB)")
        axes.legend(frameon=False)

    draw(folder, "sqnr", content)


def sensitivity(run: Run, folder: Path) -> None:
    ranked = run.sensitivity.ranked()[:10][::-1]

    def content(axes: plt.Axes) -> None:
        axes.barh([score.name for score in ranked], [run.sensitivity.lost(score.value) for score in ranked], color="tab:red", alpha=0.8)
        axes.set(xlabel=f"points of accuracy lost by this one alone at 4 bits (float: {run.sensitivity.baseline:.1f} %)")

    draw(folder, "sensitivity", content)


def pareto(run: Run, folder: Path) -> None:
    points = sorted(run.search.front, key=lambda point: point.costs.size)

    def content(axes: plt.Axes) -> None:
        sizes = [100 * point.costs.size for point in points]
        axes.plot(sizes, [point.loss for point in points], "o-", color="tab:green", label="not beaten by any other")
        best = run.search.best
        axes.plot(100 * best.costs.size, best.loss, "*", markersize=15, color="tab:orange", label="least loss within the budget")
        axes.axvline(20, linestyle=":", color="gray")
        axes.set(xlabel="size of the parameters (% of float32)", ylabel="distance from float", yscale="log")
        axes.legend(frameon=False)

    draw(folder, "pareto", content)


def photographs(run: Run, folder: Path) -> str:
    """Markdown that shows them."""
    if CHROMIUM is None:
        return "This site was built where no Chromium is installed, so the reports were not photographed.\n"
    reports: dict[str, Any] = {
        "Calibration": run.calibration,
        "Summary": run.sim.summary(),
        "Comparison": run.comparison,
        "Sensitivity": run.sensitivity,
        "Search for bits": run.search,
        "Progressive quantization": run.progressive,
        "Diagnosis": run.diagnosis,
    }
    shown = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, Browser(Path(scratch) / "profile") as browser:
        for title, report in reports.items():
            page, stem = Path(scratch) / "page.html", title.lower().replace(" ", "_")
            report.save(page)
            shown.append(f"### {title}\n")
            for ground in INK:
                browser.screen(*SHOT, dark=ground == "dark")
                browser.open(page)
                browser.screenshot(folder / f"{stem}-{ground}.png")
                shown.append(image(f"{stem}-{ground}.png", f"{title}, as a page", f"only-{ground} shot"))
        if browser.messages:
            raise RuntimeError(f"a page complains: {browser.messages[0]}")
    return "\n".join(shown)


def image(name: str, alt: str, classes: str) -> str:
    return f"```{{image}} pictures/{name}\n:alt: {alt}\n:class: {classes}\n```\n"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run = Run.made()
    for picture in (histogram, sqnr, sensitivity, pareto):
        picture(run, folder)
    (folder / "reports.md").write_text(photographs(run, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
