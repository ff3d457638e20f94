"""The HTML pages: what is in them, that names stay text, that they load nothing, and how large they get."""

import base64
import hashlib
import json
import re
from datetime import datetime, timezone

import numpy as np
import pytest
import torch
from html_reader import Reader
from models import ConvNet, seeded
from torch import nn

import qsim
from qsim.analysis.bit_search_report import bit_search_page
from qsim.analysis.comparison import comparison_page
from qsim.analysis.sensitivity import sensitivity_page
from qsim.config.described import described
from qsim.pages.curves import Curves
from qsim.pages.packed import packed
from qsim.quantizers.sketch import Distribution
from qsim.simulation.calibration import calibration_page
from qsim.simulation.histogram import histogram
from qsim.simulation.summary import HELD, LARGEST, Row, summary_page

LIBRARY = "/*! https://github.com/leeoniya/uPlot (v1.6.32) */"  # its first line, a comment
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
    assert len(re.findall(re.escape(LIBRARY), documents[2][name])) == 1
    assert not re.search(r"url\(|@import|https?://", documents[2][name].replace(LIBRARY, ""))


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
    minute = r"\d\d:\d\d UTC"  # which may have passed
    assert re.sub(minute, "", (tmp_path / "report.html").read_text()) == re.sub(minute, "", found["calibration"])
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


def test_two_thousand_quantizers_stay_below_three_megabytes():
    observer = qsim.Observer()
    observer(torch.randn(20_000))
    seen = Distribution.of(observer.sketch, observer.lowest, observer.highest)
    options = {"scale": (0.02, 0.02), "low": -2.5, "high": 2.5, "observed": (-4.0, 4.0), "clipped": 0.01, "distribution": seen}
    rows = []
    for i in range(1000):
        key = f"encoder.layers.{i}.attention.output.dense"
        rows.append(Row(f"{key}.output", "activation", "linear", "int8", 8, False, "per tensor", True, **options))
        channels = Curves("channel of axis 0", {LARGEST: torch.rand(4096), HELD: torch.rand(4096)})
        rows.append(Row(f"{key}.weight", "weight", "linear", "int8", 8, True, "per channel (axis 0)", True, **options, channels=channels))
    document = summary_page(qsim.Summary(rows, [], [])).html()
    assert len(document.encode()) < 3_000_000
    assert len(Reader(document).rows) == 2001


def test_the_head_names_model_config_date_and_versions(documents):
    text = re.search(r'<dl class="about">(.*?)</dl>', documents[2]["comparison"])[1]
    assert "<dd>ConvNet, " in text
    assert f"<dd>{described(documents[0].config)}</dd>" in text
    assert re.search(
        rf"<dd>{datetime.now(timezone.utc):%Y-%m-%d} \d\d:\d\d UTC by qsim {qsim.__version__}, torch {re.escape(torch.__version__)}", text
    )


def unpacked(text: str) -> torch.Tensor:
    """Inverse of `packed`, by another way: NumPy and a shift."""
    halves = np.frombuffer(base64.b64decode(text), np.uint16)
    return torch.from_numpy((halves.astype(np.uint32) << 16).view(np.float32).copy())


def test_packed_numbers_are_bfloat16():
    values = torch.randn(1000) * torch.logspace(-30, 30, 1000)
    assert torch.equal(unpacked(packed(values)), values.bfloat16().float())


def test_channels_of_a_weight():
    model = nn.Linear(6, 4).eval()
    with torch.no_grad():
        model.weight[2] *= 30
        model.weight[3, 0] = 0.0
    sim, _ = calibrated(model, torch.randn(8, 6))
    channels = next(row for row in sim.summary().rows if row.role == "weight").channels
    largest = model.weight.detach().abs().amax(1)
    assert torch.equal(channels.values[LARGEST], largest)
    encoding = sim.encodings()["weight"]
    assert torch.equal(channels.values[HELD], torch.maximum(encoding.min.abs(), encoding.max.abs()))
    for most, expected in ((100, largest), (2, largest.view(2, 2).amax(1))):
        found = json.loads(data(channels.markup(most))["data-curves"])
        assert (found["along"], found["each"]) == ("channel of axis 0", 4 // len(expected))
        assert torch.equal(unpacked(found["values"][LARGEST]), expected.bfloat16().float())


def test_channels_of_a_tensor_with_one_scale_and_of_a_broken_one():
    model = nn.Linear(6, 4).eval()
    with torch.no_grad():
        model.weight[1, 1] = torch.inf
    sim, _ = calibrated(model, torch.randn(8, 6), qsim.int8().override("*", weight={"axis": None}))
    channels = next(row for row in sim.summary().rows if row.role == "weight").channels
    expected = model.weight.detach().abs()
    expected[1, 1] = 0
    assert torch.equal(channels.values[LARGEST], expected.amax(1))
    assert len(set(channels.values[HELD].tolist())) == 1


def row(values: torch.Tensor, low: float | None, high: float | None) -> Row:
    observer = qsim.Observer()
    observer(values)
    seen = Distribution.of(observer.sketch, observer.lowest, observer.highest)
    return Row("x", "activation", "relu", "int8", 8, False, "per tensor", True, low=low, high=high, distribution=seen)


def drawn(row: Row) -> str:
    return histogram(row.distribution, (row.low, row.high), "")


def data(drawing: str) -> dict[str, str]:
    return Reader(drawing).tags[0][1]


def test_counts_lie_where_the_values_are():
    values = torch.cat([torch.linspace(-1, 1, 8001), torch.linspace(3.0, 3.01, 100)])
    found = data(drawn(row(values, -1.0, 1.0)))
    counts, (low, high) = unpacked(found["data-counts"]), (float(found[f"data-{end}"]) for end in ("low", "high"))
    assert (low, high, found["data-first"], found["data-last"]) == (-1.0, pytest.approx(3.01), "-1", "1")
    edges = torch.linspace(low, high, len(counts) + 1, dtype=torch.float64)
    expected = torch.histogram(values.double(), edges).hist
    assert counts.sum() == pytest.approx(8101, rel=4e-3)
    assert (counts - expected).abs().max() <= 0.1 * expected.max()  # a bin of the sketch is 1/32 of its value wide
    assert counts[-1] == pytest.approx(100, abs=1)


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
    counts = unpacked(data(drawn(row(torch.randn(1000), -65504.0, 65504.0)))["data-counts"])
    assert (counts > 0).sum() > 20


def test_a_constant_and_huge_values_are_drawn():
    assert unpacked(data(drawn(row(torch.full((100,), 2.0), 0.0, 2.0)))["data-counts"])[-1] == 100
    assert unpacked(data(drawn(row(torch.tensor([-3e38, 1.0, 3e38]), -3e38, 3e38)))["data-counts"]).sum() == 3
