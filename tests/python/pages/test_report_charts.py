"""The drawings of the pages under a mouse, in a real browser: what the cursor names, where a click leads, what a row opens.
Skipped where no Chromium is."""

import json

import pytest
import torch
from browser import CHROMIUM, Browser
from torch import nn

import qsim

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the pages were not looked at (apt install chromium)")

LAST_PICTURE = "[...document.querySelectorAll('svg.histogram')].at(-1)"
TIP = "[...document.querySelectorAll('.tip:not([hidden]) > *')].map((line) => line.textContent)"


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3)]
    simulated = qsim.QuantSim(nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8), qsim.int8().override("2", bits=3))
    simulated.calibrate([torch.randn(16, 3, 8, 8)], progress=False)
    return simulated


@pytest.fixture(scope="module")
def pages(sim, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    x = torch.randn(4, 3, 8, 8)
    reports = {
        "summary": sim.summary(),
        "comparison": sim.compare(x),
        "sensitivity": sim.sensitivity([x], progress=False),
        "progressive": sim.progressive([x], order="forward", progress=False),
        "bits": sim.search_bits([x], budget=qsim.Budget(size=0.3), probes=0, progress=False),
    }
    for name, report in reports.items():
        report.save(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in reports}


class Cursor:
    """A mouse over the first chart of a page."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        browser.run("document.querySelector('figure.chart').scrollIntoView({block: 'center'})")
        self.left, self.top, self.width, self.height = browser.box("document.querySelector('figure.chart .u-over')")

    def move(self, share: float) -> list[str]:
        """Go there; what the box beside the cursor says."""
        self.browser.point(self.left + share * self.width, self.top + self.height / 2)
        assert self.browser.becomes("document.querySelector('.tip:not([hidden])')")
        return self.browser.run(TIP)

    def click(self, share: float) -> None:
        self.browser.click(self.left + share * self.width, self.top + self.height / 2)


def drawn(browser: Browser) -> dict:
    return json.loads(browser.run("document.querySelector('figure.chart').dataset.chart"))


def activations(sim: qsim.QuantSim) -> list[str]:
    return [row.key for row in sim.summary().rows if row.role not in ("weight", "bias")]


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("summary", ("tensor, in the order of the model", "largest magnitude")),
        ("comparison", ("tensor, in the order of the model", "SQNR to float (dB)")),
        ("sensitivity", ("group, in the order of the model", "lost by it alone (dB)")),
        ("progressive", ("operations that are quantized", "metric")),
        ("bits", ("size (share of float32)", "lost beside float (MSE over mean square)")),
    ],
)
def test_the_cursor_names_the_tensor_and_its_numbers(browser, pages, name, axes):
    browser.messages.clear()
    browser.screen(1400, 800)
    browser.open(pages[name])
    chart = drawn(browser)
    assert (chart["x"], chart["y"]) == axes
    rows = "[...document.querySelector('section.table').querySelectorAll('tbody tr')]"
    names = browser.run(f"{rows}.map((row) => (row.querySelector('.name') ?? row.cells[0]).textContent)")
    cursor = Cursor(browser)
    for share, point in ((0.999, -1), (0.001, 0)):
        title, *lines = cursor.move(share)
        row = chart["rows"][point]
        assert title == ("float" if row is None else names[row])
        shown = dict(line.split(": ") for line in lines)
        for one in chart["series"]:
            value = one["values"][point]
            assert (one["name"] in shown) == (value is not None)
            if value is not None:
                number, *unit = shown[one["name"]].split()
                assert float(number) == pytest.approx(value, rel=1e-3)
                assert unit == ([chart["unit"]] if chart["unit"] else [])
    assert browser.messages == []


def test_a_click_on_the_curve_leads_to_the_row(browser, pages, sim):
    browser.screen(1400, 500)
    browser.open(pages["comparison"])
    browser.run("box = document.querySelector('input'); box.value = 'nothing has this name'; box.dispatchEvent(new Event('input'))")
    browser.run("[...document.querySelectorAll('th button')].at(2).click()")  # another order
    cursor = Cursor(browser)
    cursor.move(0.999)
    cursor.click(0.999)
    assert browser.becomes("document.querySelector('tr.found')")
    assert browser.run("document.querySelector('tr.found .name').textContent") == activations(sim)[-1]
    assert not browser.run("document.querySelector('tr.found').hidden")
    _, top, _, height = browser.box("document.querySelector('tr.found')")
    assert 0 <= top < top + height <= 500


def test_dragging_looks_closer_and_two_clicks_go_back(browser, pages):
    browser.screen(1400, 800)
    browser.open(pages["comparison"])
    cursor = Cursor(browser)
    first = cursor.move(0.001)[0]
    left, middle, right = (cursor.left + share * cursor.width for share in (0.4, 0.6, 0.99))
    height = cursor.top + cursor.height / 2
    browser.point(left, height)
    browser("Input.dispatchMouseEvent", type="mousePressed", x=left, y=height, button="left", clickCount=1)
    for x in (middle, right):
        browser("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=height, button="left", buttons=1)
    browser("Input.dispatchMouseEvent", type="mouseReleased", x=right, y=height, button="left", clickCount=1)
    assert cursor.move(0.001)[0] != first
    assert browser.run("document.querySelector('tr.found')") is None  # it was no click
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            browser("Input.dispatchMouseEvent", type=kind, x=middle, y=height, button="left", clickCount=clicks)
    assert cursor.move(0.002)[0] == first
    assert not browser.run("new Promise((done) => setTimeout(() => done(Boolean(document.querySelector('tr.found'))), 400))")


def test_a_chart_is_drawn_again_in_the_dark(browser, pages):
    ink = """(() => {
      const canvas = document.querySelector('canvas');
      return [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].reduce((sum, value) => sum + value, 0);
    })()"""
    browser.screen(1400, 800)
    browser.open(pages["comparison"])
    light = browser.run(ink)
    browser.screen(1400, 800, dark=True)
    assert browser.becomes(f"{ink} !== {light}")


def test_severity_has_a_color(browser, pages):
    browser.screen(1400, 800)
    browser.open(pages["comparison"])
    found = browser.run(
        "[...document.querySelectorAll('tbody tr')].map((row) => [row.className, row.cells[1].dataset.value, row.cells[2].dataset.value])"
    )
    expected = {name: min(float(value) for value in values if value) for name, *values in found}
    assert {"error", "warning", ""} >= expected.keys() >= {"warning", ""}
    for name, *values in found:
        worst = min(float(value) for value in values if value)
        assert name == ("error" if worst < 10 else "warning" if worst < 20 else "")
    color = "getComputedStyle(document.documentElement).getPropertyValue('--warning').trim()"
    shadow = browser.run("getComputedStyle(document.querySelector('tr.warning')).boxShadow")
    assert shadow.startswith("rgb({}, {}, {})".format(*bytes.fromhex(browser.run(color)[1:])))


def test_a_row_opens_its_distribution_and_its_channels(browser, pages, sim):
    browser.messages.clear()
    browser.screen(1400, 800)
    browser.open(pages["summary"])
    row = "[...document.querySelectorAll('tbody tr')].find((row) => row.querySelector('.name').textContent === '0.weight')"
    browser.run(f"{row}.querySelector('button.more').click()")
    assert browser.run("document.querySelectorAll('tr.detail figure.plot canvas').length") == 2
    assert browser.run(f"{row}.querySelector('button.more').getAttribute('aria-expanded')") == "true"
    browser.run("document.querySelector('tr.detail').scrollIntoView({block: 'center'})")
    left, top, _, height = browser.box("[...document.querySelectorAll('tr.detail .u-over')].at(1)")
    browser.point(left + 1, top + height / 2)
    assert browser.becomes("document.querySelector('tr.detail .tip:not([hidden])')")
    channel, largest, end = browser.run(TIP)
    assert channel == "channel of axis 0 0"
    weight, grid = sim.model[0].weight.detach()[0].abs().max().item(), sim.encodings()["0.weight"]
    assert float(largest.removeprefix("largest magnitude: about ")) == pytest.approx(weight, rel=0.06)
    held = max(abs(grid.min[0].item()), abs(grid.max[0].item()))
    assert float(end.removeprefix("end of the grid: about ")) == pytest.approx(held, rel=0.06)
    browser.run("document.querySelector('th button').click()")  # sorting closes it
    assert browser.run("document.querySelectorAll('tr.detail').length") == 0
    assert browser.messages == []


def test_pictures_are_drawn_when_they_come_into_view(browser, pages):
    browser.screen(1400, 800)
    browser.open(pages["summary"])
    browser.run(f"{LAST_PICTURE}.scrollIntoView()")
    assert browser.becomes(f"{LAST_PICTURE}.querySelector('.inside')")
    _, _, width, height = browser.box(LAST_PICTURE)
    assert width >= 180
    assert height >= 40
    _, _, width, height = browser.box(f"{LAST_PICTURE}.querySelector('.inside')")
    assert width * height > 1000


def test_bars_beyond_the_range_have_another_color(browser, tmp_path):
    sim = qsim.QuantSim(nn.ReLU(), torch.zeros(1, 4), qsim.Config(activation=qsim.TensorSpec(method="percentile", percentile=50.0)))
    values = torch.linspace(-1, 1, 4000)
    sim.calibrate([values.view(-1, 4)], progress=False)
    sim.summary().save(tmp_path / "page.html")
    browser.screen(1400, 800)
    browser.open(tmp_path / "page.html")
    assert browser.becomes("document.querySelector('svg.histogram .outside')")
    counts, low, high, first, last = browser.run(
        "(({counts, low, high, first, last}) => [counts, low, high, first, last])(distribution(document.querySelector('svg.histogram')))"
    )
    assert len(counts) == 80
    drawn = browser.run("['inside', 'outside'].map((name) => document.querySelector(`svg.histogram .${name}`).getAttribute('d'))")
    bars = [[48 - int(part.split("h")[0]) for part in path.split("V")[1:-1]] for path in drawn]
    for i in range(80):
        middle = low + (i + 0.5) * (high - low) / 80
        within, beyond = bars[0][i], bars[1][i]
        assert (within > 0, beyond > 0) == ((counts[i] > 0 and first <= middle <= last), (counts[i] > 0 and not first <= middle <= last))
    assert max(bars[0]) == 48
    assert any(bars[1])


def test_a_phone_has_the_box_on_its_screen(browser, pages):
    browser.screen(360, 800, phone=True)
    browser.open(pages["comparison"])
    assert Cursor(browser).move(0.999)[1:]
    left, _, width, _ = browser.box("document.querySelector('.tip')")
    assert left >= 0
    assert left + width <= 360
