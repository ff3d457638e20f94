"""The HTML pages: what is in them, that names stay text, that they load nothing, and how large they get."""

import base64
import hashlib
import math
import re

import pytest
import torch
from html_reader import Reader
from models import ConvNet, seeded
from torch import nn

import qsim
from qsim.analysis.bit_search_report import bit_search_page
from qsim.analysis.comparison import comparison_page
from qsim.analysis.sensitivity import sensitivity_page
from qsim.quantizers.sketch import Distribution
from qsim.simulation.calibration import calibration_page
from qsim.simulation.histogram import histogram
from qsim.simulation.summary import Row, summary_page

X = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(1))


def calibrated(model: nn.Module, x: torch.Tensor, config: qsim.Config | None = None) -> tuple[qsim.QuantSim, qsim.CalibrationReport]:
    sim = qsim.QuantSim(model, x, config)
    return sim, sim.calibrate([x], progress=False)


@pytest.fixture(scope="module")
def documents():
    x = X.clone()
    x[0, 0, 0, 0] = torch.nan
    sim, report = calibrated(seeded(ConvNet), x, qsim.int4().override("branch", off=True))
    pages = {
        "calibration": calibration_page(report),
        "summary": summary_page(sim.summary()),
        "comparison": comparison_page(sim.compare(X)),
        "sensitivity": sensitivity_page(sim.sensitivity([X], progress=False)),
        "bits": bit_search_page(sim.search_bits([X], budget=qsim.Budget(size=0.3), probes=0, progress=False)),
    }
    return sim, report, {name: page.html() for name, page in pages.items()}


@pytest.mark.parametrize("name", ["calibration", "summary", "comparison", "sensitivity", "bits"])
def test_documents_are_well_formed_and_load_nothing(documents, name):
    reader = Reader(documents[2][name])
    for tag, attributes in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "use")
        assert not {"src", "href", "style", "action"} & attributes.keys()
        assert not any(attribute.startswith("on") for attribute in attributes)
    assert not re.search(r"url\(|@import|https?://", documents[2][name])


@pytest.mark.parametrize("name", ["calibration", "summary", "comparison", "sensitivity", "bits"])
def test_the_policy_allows_the_script_and_the_style_of_the_page_alone(documents, name):
    document = documents[2][name]
    policy = next(a["content"] for tag, a in Reader(document).tags if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", document, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_every_quantizer_has_its_row(documents):
    sim, report, found = documents
    for name in ("calibration", "summary", "comparison", "sensitivity"):
        keys = [text for row in Reader(found[name]).rows for text in row[:1]]
        for key in sim.quantizers():
            assert any(text.startswith(key) for text in keys), (name, key)
    for row in sim.summary().rows:
        assert row.range in found["summary"]
    for problem in report.problems:
        assert problem.replace("'", "&#x27;") in found["calibration"]
    assert "left in float by the config" in found["summary"]


def test_saving_writes_the_page(documents, tmp_path):
    sim, report, found = documents
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == found["calibration"]
    for saved in (sim.summary(), sim.compare(X), sim.sensitivity([X], progress=False)):
        saved.save(str(tmp_path / "page.html"))
        assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_page_written_after_another_search_shows_the_new_ranges():
    sim, report = calibrated(seeded(ConvNet), X)
    sim.set_method("percentile", percentile=90.0)
    assert sim.summary().rows[0].range in calibration_page(report).html()


def test_names_are_text():
    hostile = ['<script>alert("1")</script>', "a&b'\"<img src=x onerror=alert(1)>", "${title}"]
    model = nn.Sequential()
    for i, name in enumerate(hostile):
        model.add_module(name.replace(".", ""), nn.Linear(6, 6, bias=i > 0))
    x = torch.randn(3, 6)
    sim, report = calibrated(model.eval(), x, qsim.int8().override("${title}", off=True))
    pages = [calibration_page(report), comparison_page(sim.compare(x)), sensitivity_page(sim.sensitivity([x], progress=False))]
    for page in pages:
        reader = Reader(page.html())
        assert [tag for tag, _ in reader.tags].count("script") == 1
        assert not any(tag == "img" for tag, _ in reader.tags)
        text = "".join(text for row in reader.rows for text in row)
        assert all(name in text for name in hostile[:2])
    assert hostile[2] in "".join(text for row in Reader(pages[0].html()).rows for text in row)


def test_five_hundred_quantizers_stay_small():
    rows = []
    for i in range(500):
        values = torch.randn(20_000)
        observer = qsim.Observer()
        observer(values)
        seen = Distribution.of(observer.sketch, observer.lowest, observer.highest)
        key = f"encoder.layers.{i}.attention.output.dense.output"
        options = {"scale": (0.02, 0.02), "low": -2.5, "high": 2.5, "observed": (-4.0, 4.0), "clipped": 0.01, "distribution": seen}
        rows.append(Row(key, "activation", "linear", "int8", 8, False, "per tensor", True, **options))
    document = summary_page(qsim.Summary(rows, [], [])).html()
    assert len(document) < 1_500_000
    assert len(Reader(document).rows) == 501


def row(values: torch.Tensor, low: float | None, high: float | None) -> Row:
    observer = qsim.Observer()
    observer(values)
    seen = Distribution.of(observer.sketch, observer.lowest, observer.highest)
    return Row("x", "activation", "relu", "int8", 8, False, "per tensor", True, low=low, high=high, distribution=seen)


def drawn(row: Row) -> str:
    return histogram(row.distribution, (row.low, row.high), "")


def areas(drawing: str, name: str) -> list[tuple[float, float]]:
    """Height over each unit of length of the bars of one color."""
    found = re.search(rf'<path class="{name}" d="M0 48(.*?)V48z"', drawing)
    if not found:
        return []
    return [(48 - int(y), int(width)) for y, width in re.findall(r"V(\d+)h(\d+)", found[1])]


def test_bars_are_logarithms_of_counts_and_change_color_at_the_range():
    values = torch.cat([torch.linspace(-1, 1, 8001), torch.linspace(3.0, 3.01, 100)])
    drawing = drawn(row(values, -1.0, 1.0))
    inside, outside = areas(drawing, "inside"), areas(drawing, "outside")
    assert sum(width for _, width in inside) == sum(width for _, width in outside) == 320
    filled = sum(width for height, width in inside if height)
    assert filled == pytest.approx(320 * 2 / 4.01, abs=4)
    assert outside[-1][0] == pytest.approx(48 * math.log(101) / math.log(8001 / (filled / 4) + 1), abs=1.5)
    left, right = map(float, re.search(r'class="edge" d="M(\S+) 0V48M(\S+) 0V48"', drawing).groups())
    assert (left, right) == (pytest.approx(0), pytest.approx(320 * 2 / 4.01, rel=1e-3))


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [(torch.zeros(10), 0.0, 0.0), (torch.full((10,), torch.nan), -1.0, 1.0), (torch.full((4,), 3.0), None, None)],
)
def test_nothing_to_draw(values, low, high):
    observer = qsim.Observer()
    observer(values)
    if observer.counts.nonfinite:
        assert drawn(Row("x", "input", "input", "int8", 8, False, "", True, low=low, high=high)) == ""
    else:
        assert drawn(row(values, low, high)) == ""


def test_ranges_far_beyond_the_values_do_not_flatten_them():
    drawing = drawn(row(torch.randn(1000), -65504.0, 65504.0))
    assert len(areas(drawing, "inside")) > 20


def test_a_constant_and_huge_values_are_drawn():
    assert areas(drawn(row(torch.full((100,), 2.0), 0.0, 2.0)), "inside")
    assert "nan" not in drawn(row(torch.tensor([-3e38, 1.0, 3e38]), -3e38, 3e38))
