"""What every report can do: pages in files, and in notebooks."""

import csv
import json
from html import unescape
from pathlib import Path

import pytest
import torch
from html_reader import Reader
from torch import nn

import qsim
from qsim.pages.page import Page
from qsim.pages.report import Report

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
NOTEBOOK = Path(__file__).parents[3] / "examples" / "tour.ipynb"


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), X, qsim.int8(target="onnxruntime"))
    sim.calibrate([X], progress=False)
    return sim


@pytest.fixture(scope="module")
def reports(sim, tmp_path_factory):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    restored = qsim.QuantSim(model, X, qsim.w4a8())
    restored.calibrate([X], progress=False)
    restoration = restored.restore([X], steps=8, progress=False)
    exported = tmp_path_factory.mktemp("export")
    torch.onnx.export(model, (X,), exported / "float.onnx", dynamo=True, input_names=["x"])
    return {
        "calibration": qsim.QuantSim(model, X).calibrate([X], progress=False),
        "summary": sim.summary(),
        "comparison": sim.compare(X),
        "sensitivity": sim.sensitivity([X], progress=False),
        "progressive": sim.progressive([X], progress=False),
        "diagnosis": qsim.doctor(model, [X], "tensorrt-fp16", progress=False),
        "restore": restoration,
        "goal": qsim.quantize(model, X, [X], lambda network, data: 1.0, progress=False),
        "equalize": qsim.equalize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), X),
        "export": sim.export(exported / "model.onnx", verify=[X]),
        "onnx": qsim.quantize_onnx(exported / "float.onnx", [{"x": X.numpy()}], exported / "int8.onnx", progress=False),
        "borders": qsim.QuantSim(model, X).borders(),
        "fallback": sim.retarget("onnxruntime").fallback("2", to="fp16"),
        "distill": restoration.distilled,
        "fold": qsim.fold_batch_norms(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)).eval(), X),
    }


NAMES = ["calibration", "summary", "comparison", "sensitivity", "progressive", "diagnosis", "export", "restore", "goal", "equalize"]
NAMES += ["onnx", "borders", "fallback", "fold", "distill"]


@pytest.mark.parametrize("name", NAMES)
def test_every_report_is_a_page_in_a_file_and_in_a_notebook(reports, name, tmp_path):
    report = reports[name]
    assert isinstance(report, Report)
    report.save(tmp_path / "page.html")
    document = (tmp_path / "page.html").read_text()
    assert "<table>" in document
    assert f"qsim {qsim.__version__}, torch " in document
    shown = report._repr_html_()
    frames = [attributes for tag, attributes in Reader(shown).tags if tag == "iframe"]
    (frame,) = frames
    assert "<table>" in unescape(frame["srcdoc"])
    assert shown.startswith("<details open><summary>")


def test_reports_have_pictures(reports):
    """Curves along the model, or bars."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).eval()
    nn.init.constant_(model[0].weight, 3e4)
    overflowing = qsim.doctor(model, [X.abs()], "tensorrt-fp16", progress=False)
    largest = [f.evidence["largest"] for f in overflowing.findings if {"largest", "limit"} <= f.evidence.keys()]
    assert largest
    chart = overflowing.page().chart
    assert list(chart.series[0].values) == largest
    assert [overflowing.findings[row].evidence["limit"] for row in chart.rows] == list(chart.series[1].values)
    for name in ("calibration", "summary", "comparison", "sensitivity", "export", "onnx", "distill"):
        document = reports[name].page().html()
        assert 'data-chart="' in document or 'class="bar"' in document
    assert f"<dd>{reports['export'].verification.times.ratio:.2f}</dd>" in reports["export"].page().html()


@pytest.mark.parametrize("name", NAMES)
def test_every_report_is_a_table_of_its_numbers(reports, name, tmp_path):
    reports[name].save(tmp_path / "numbers.csv")
    with (tmp_path / "numbers.csv").open(newline="") as file:
        read = {"/".join(filter(None, (row["figure"], row["of"]))): float(row["value"]) for row in csv.DictReader(file)}
    assert read == pytest.approx(reports[name].figures().scalars, rel=0, abs=0, nan_ok=True)


def test_no_page_under_the_name_of_something_else(reports, tmp_path):
    for name in ("report.json", "report.jpg", "report.txt"):
        with pytest.raises(ValueError, match=r"expected one that ends as what is written does: '\.html', '\.png', .*'\.csv' of a report"):
            reports["summary"].save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    reports["summary"].save(tmp_path / "report")  # without a suffix: a page
    assert (tmp_path / "report").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", NAMES)
def test_every_report_is_logged_and_says_what_it_is_about(reports, name):
    figures = reports[name].figures()
    assert figures.known()
    assert all(isinstance(value, float | int) for value in figures.scalars.values())
    assert ("float.onnx" if name == "onnx" else "Sequential") in "".join(str(part) for part in reports[name].page().about)


def test_a_large_report_is_text_in_a_notebook():
    class Large(Report):
        def page(self):
            return Page("Large", "of many tensors", "x" * (1 << 20))

        def __str__(self):
            return "<all of it>"

    assert "<pre>&lt;all of it&gt;</pre>" in Large()._repr_html_()


def test_losses_without_a_metric_are_in_decibels(reports):
    found = reports["sensitivity"]
    heads = [text for text in ("SQNR dB", "lost dB", "of all noise") if f"<button>{text}</button>" in found.page().html()]
    assert heads == ["SQNR dB", "lost dB", "of all noise"]
    worst = found.ranked()[0]
    assert f"{found.lost(worst.value):.3g}" in str(found)


def test_two_runs_side_by_side(sim, tmp_path):
    other = sim.retarget("onnxruntime")
    other.disable("0.weight")
    mine, beside = sim.compare(X), other.compare(X)
    mine.save(tmp_path / "both.html", beside=beside)
    document = (tmp_path / "both.html").read_text()
    assert "<button>gained dB</button>" in document
    assert "accumulated of the other run" in document
    assert f"{beside['2.output'].accumulated.sqnr:.1f}" in document


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    names: dict = {}
    for cell in cells:
        *lines, last = "".join(cell["source"]).splitlines()
        exec("\n".join(lines), names)
        shown = eval(last, names)
        assert shown is None or "<table>" in unescape(shown._repr_html_())
