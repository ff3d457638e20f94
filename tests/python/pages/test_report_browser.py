"""The pages in a real browser without a network: no complaint on the console, sorting, filtering, sizes. Skipped where no Chromium is."""

from pathlib import Path

import pytest
import torch
from browser import CHROMIUM
from torch import nn

import qsim
from qsim.quantizers.sketch import Distribution
from qsim.simulation.summary import Row, summary_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the pages were not looked at (apt install chromium)")

HOSTILE = "<script>document.title='run'<|script><img src=x onerror=document.title='run'>"
NAMES = "[...document.querySelectorAll('tbody tr:not([hidden]) .name')].map((name) => name.textContent)"


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    model.add_module(HOSTILE.replace(".", ""), nn.Linear(3, 3))
    simulated = qsim.QuantSim(model.eval(), torch.randn(2, 3, 8, 8), qsim.int8().override("2", bits=4))
    simulated.calibrate([torch.randn(16, 3, 8, 8)], progress=False)
    return simulated


@pytest.fixture(scope="module")
def pages(sim, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    x = torch.randn(4, 3, 8, 8)
    x[0, 0, 0, 0] = torch.inf
    reports = {
        "calibration": sim.calibrate([x], progress=False),
        "summary": sim.summary(),
        "comparison": sim.compare(x),
        "sensitivity": sim.sensitivity([x], progress=False),
    }
    for name, report in reports.items():
        report.save(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in reports}


@pytest.mark.parametrize("name", ["calibration", "summary", "comparison", "sensitivity"])
@pytest.mark.parametrize(("width", "phone"), [(1400, False), (1200, False), (900, False), (360, True)])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_load_without_complaint_and_fit_the_screen(browser, pages, name, width, phone, dark):
    browser.messages.clear()
    browser.screen(width, 800, dark=dark, phone=phone)
    browser.open(pages[name])
    assert browser.messages == []
    assert "run" not in browser.run("document.title")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    ink, paper = (browser.run(f"getComputedStyle(document.body).{what}") for what in ("color", "backgroundColor"))
    assert (brightness(ink) > brightness(paper)) == dark
    assert abs(brightness(ink) - brightness(paper)) > 150
    small = "[...document.querySelectorAll('td, dd, p, button, li')].filter((e) => parseFloat(getComputedStyle(e).fontSize) < 11).length"
    assert browser.run(small) == 0


def brightness(color: str) -> float:
    return sum(map(float, color.removeprefix("rgb(").removesuffix(")").split(","))) / 3


def test_nothing_but_the_script_of_the_page_runs(browser, pages, tmp_path):
    document = pages["summary"].read_text().replace("</main>", "<script>document.title = 'run'</script><img src='file:///x.png'></main>")
    (tmp_path / "page.html").write_text(document)
    browser.open(tmp_path / "page.html")
    assert browser.run("document.title") == "Quantization"
    assert any("Content Security Policy" in message for message in browser.messages)


def test_columns_are_sorted_by_number_and_by_name(browser, pages, sim):
    browser.screen(1400, 800)
    browser.open(pages["summary"])
    keys = browser.run(NAMES)
    assert keys[: len(sim.quantizers())] == list(sim.quantizers())
    scales = {row.key: row.scale[1] for row in sim.summary().rows if row.scale}

    def click(head: str) -> list[str]:
        browser.run(f"[...document.querySelectorAll('th button')].find((button) => button.textContent === '{head}').click()")
        return browser.run(NAMES)

    falling = click("scale")
    assert falling[: len(scales)] == sorted(scales, key=scales.get, reverse=True)
    assert set(falling[len(scales) :]) == keys_of_biases(sim)
    rising = click("scale")
    assert rising[: len(scales)] == sorted(scales, key=scales.get)
    assert set(rising[len(scales) :]) == keys_of_biases(sim)  # nothing is last, both ways
    assert browser.run("document.querySelector('th[aria-sort=ascending]').textContent") == "scale"
    names = click("quantizer")
    assert names.index("0.weight") < names.index("2.weight") < names.index("4.weight") < names.index("input")
    assert click("quantizer") == names[::-1]


def keys_of_biases(sim: qsim.QuantSim) -> set[str]:
    return {row.key for row in sim.summary().rows if row.role == "bias"}


def test_the_filter_hides_rows_that_lack_a_word(browser, pages):
    browser.screen(1400, 800)
    browser.open(pages["summary"])
    write = "box = document.querySelector('input'); box.value = '{}'; box.dispatchEvent(new Event('input'))"
    browser.run(write.format("WEIGHT int4"))
    assert browser.run(NAMES) == ["2.weight"]
    assert browser.run("document.querySelector('output').textContent").startswith("1 of ")
    browser.run(write.format("no such name"))
    assert browser.run(NAMES) == []
    browser.run(write.format(""))
    assert len(browser.run(NAMES)) > 5


def test_a_phone_sorts_by_a_list(browser, pages):
    browser.screen(360, 800, phone=True)
    browser.open(pages["comparison"])
    assert browser.run("getComputedStyle(document.querySelector('thead')).display") == "none"
    browser.run("list = document.querySelector('select'); list.value = '1 up'; list.dispatchEvent(new Event('change'))")
    values = browser.run("[...document.querySelectorAll('tbody tr')].map((row) => row.cells[1].dataset.value)")
    numbers = [float(value) for value in values if value]
    assert numbers == sorted(numbers)
    assert len(numbers) > 5


def write(path: Path, count: int) -> list[str]:
    """A page of that many quantizers, whose scales rise; their names."""
    rows = []
    observer = qsim.Observer()
    observer(torch.randn(2000))
    seen = Distribution.of(observer.sketch, observer.lowest, observer.highest)
    for i in range(count):
        options = {"low": -2.0, "high": 2.0, "observed": (-3.0, 3.0), "scale": (0.1 + i, 0.1 + i), "distribution": seen}
        rows.append(Row(f"layer.{i}.output", "activation", "linear", "int8", 8, False, "per tensor", True, **options))
    summary_page(qsim.Summary(rows, [], [])).write(path)
    return [row.key for row in rows]


def test_two_thousand_rows_are_sorted(browser, tmp_path):
    keys = write(tmp_path / "page.html", 2000)
    browser.screen(1400, 800)
    browser.open(tmp_path / "page.html")
    browser.run("document.querySelectorAll('th button')[3].click()")
    assert browser.run(NAMES) == keys[::-1]


def test_rows_out_of_view_are_not_laid_out(browser, tmp_path):
    """What makes pages of thousands of tensors open at once."""
    counts = {}
    for rows in (200, 2000):
        write(tmp_path / "page.html", rows)
        browser.screen(1400, 800)
        browser.open(tmp_path / "page.html")
        laid_out = "row.querySelector('.name').checkVisibility({contentVisibilityAuto: true})"
        counts[rows] = browser.run(f"[...document.querySelectorAll('tbody tr')].filter((row) => {laid_out}).length")
    assert min(counts.values()) >= 5
    assert max(counts.values()) < 60
