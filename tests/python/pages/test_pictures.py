"""Reports as pictures: the curve of the page, drawn by matplotlib, or a sentence that says why not."""

import math
import re
import sys

import pytest
import torch
from torch import nn

import qsim
from qsim.pages.chart import Axis, Chart, Limit, Series
from qsim.pages.picture import SUFFIXES, picture

pytest.importorskip("matplotlib")

BEGINS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    simulated = qsim.QuantSim(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(2, 8))
    simulated.calibrate([torch.randn(16, 8)], progress=False)
    return simulated


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_reports_are_pictures_by_their_file_name(sim, tmp_path, suffix):
    x = torch.randn(16, 8)
    reports = [sim.summary(), sim.calibrate([x], progress=False), sim.compare(x), sim.sensitivity([x], progress=False)]
    reports.append(sim.search_bits([x], budget=qsim.Budget(size=0.5), probes=0, progress=False))
    for report in reports:
        report.save(tmp_path / f"report{suffix.upper()}")
        assert (tmp_path / f"report{suffix.upper()}").read_bytes().startswith(BEGINS[suffix])


def points(svg: str, color: str) -> list[tuple[float, float]]:
    """Of the curve of a color, by the path that matplotlib wrote."""
    path = re.search(rf'<path d="([^"]*)"[^>]*stroke: {color}; stroke-width: 1.5', svg)
    assert path is not None
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path[1])]


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_picture_shows_the_values(logarithmic):
    values = [1.0, 10.0, math.nan, 1000.0, 100.0]
    axes = Axis("place", "m"), Axis("height", "dB", logarithmic)
    limits = [Limit(5.0, "error", "too little")]
    chart = Chart("what it tells", *axes, [Series("one", "inside", values), Series("other", "third", values[::-1])], [0] * 5, limits=limits)
    svg = picture("Title", chart, ".svg").decode()
    for text in ("Title: what it tells", "place (m)", "height (dB)", "one", "other", "too little"):
        assert f"<!-- {text} -->" in svg
    drawn = points(svg, "#3f6fd8")
    assert len(drawn) == 4  # a gap where there is nothing
    (left, low), (_, high), (_, top), (right, middle) = drawn
    assert left < right
    scale = math.log10 if logarithmic else float
    expected = [(scale(v) - scale(1.0)) / (scale(1000.0) - scale(1.0)) for v in (1.0, 10.0, 1000.0, 100.0)]
    assert [(low - y) / (low - top) for y in (low, high, top, middle)] == pytest.approx(expected, abs=1e-4)


def test_a_report_without_a_curve_says_so_and_replaces_nothing(sim, tmp_path):
    path = tmp_path / "borders.png"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match=r"'Borders' has no curve to draw as \.png: save it as \.html"):
        sim.borders().save(path)
    assert path.read_bytes() == b"before"


def test_without_matplotlib(sim, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install qsim\[report\]"):
        sim.summary().save(tmp_path / "summary.png")
    sim.summary().save(tmp_path / "summary.html")
