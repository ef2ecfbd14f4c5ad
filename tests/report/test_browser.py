"""The pages in a real browser: on a phone, on a desktop and printed."""

import io
import re

import numpy as np
import pytest
import test_html
from browser import Browser, find_browser
from fake_runs import LAYERS, SETTINGS, write_comparison, write_run
from PIL import Image

from qat.cli.compare import compare
from qat.report.sensitivity import Cost, write_page

network = test_html.network  # a fixture
PHONE, DESKTOP = 390, 1200
A4 = 297 - 2 * 14  # mm between the margins

BOXES = """[...document.querySelectorAll("svg:not(.swatch)")].map(s => {
  const r = s.getBoundingClientRect(); return [r.left + scrollX, r.top + scrollY, r.width, r.height] })"""
# label by label: the size of its letters in pixels of the screen
LETTERS = """[...document.querySelectorAll("svg text")].map(t => {
  const m = t.getScreenCTM(); return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(m.a, m.b) })"""
# what sticks out at the right without a box of its own to scroll in
OUTSIDE = """[...document.body.querySelectorAll("*")].filter(e => !e.closest(".wide") && !e.closest("svg svg, g")
  && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName + "." + e.className)"""
OPEN = "document.querySelectorAll('details').forEach(d => { d.open = true })"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    find_browser()
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A page with long names, folders that were left out, and every kind of picture."""
    root = tmp_path_factory.mktemp("pages") / "sweep"
    write_comparison(
        root, ("naive", "bn_correction", "static"), SETTINGS[1:3], (0, 1), [*LAYERS[:6], "a_very_long.qualified.name_of.a_layer.conv"]
    )
    write_run(root / ("failed_run_with_a_very_long_name_" * 4), result_status="failed", result_error="RuntimeError: <no> luck " * 10)
    compare([root], root, None)
    return root / "compare.html"


@pytest.fixture
def report(tmp_path, network):
    test_html.write(tmp_path, network)
    return tmp_path / "report.html"


def pictures(browser):
    """Every plot of the page as pixels (height, width, 3)."""
    found = []
    for left, top, width, height in browser.ask(BOXES):
        found.append(np.asarray(Image.open(io.BytesIO(browser.picture(left, top, width, height))).convert("RGB")))
    return found


def check(browser, path, width):
    browser.open(path, width)
    browser.ask(OPEN)
    assert [url for url in browser.requests if not url.startswith("data:")] == [path.as_uri()]
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(OUTSIDE) == []
    plots = pictures(browser)
    for plot in plots:
        # axes alone would be a few grey lines
        assert plot.shape[0] > 60 and plot.shape[1] > 0.5 * min(width, 450)
        assert 0.005 < np.mean((plot < 200).any(-1)) < 0.9
    return plots


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_comparison_fits_the_screen(browser, comparison, width):
    plots = check(browser, comparison, width)
    # ends, curves and jitter; ranges twice; filters and three boxes; noise; worst layers: of two settings
    assert len(plots) == 2 * (3 + 2 + 4 + 1 + 1)
    coloured = [plot for plot in plots if np.mean(np.ptp(plot.astype(int), axis=-1) > 40) > 0.001]
    assert len(coloured) == len(plots)
    assert min(browser.ask(LETTERS)) >= 8


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_report_fits_the_screen(browser, report, width):
    assert len(check(browser, report, width)) >= 3


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_what_layers_cost_fits_the_screen(browser, tmp_path, width):
    names = [f"a_very_long.qualified.name_of.a_layer.{i}" for i in range(65)]
    layers = [Cost(kind, name, "4/4", 1.0, 0.5, 0.3, 0.1, 0.001) for name in names for kind in ("alone", "others")]
    whole = [Cost("unquantized", "", "", 0.2, 0.9), Cost("quantized", "", "", 1.2, 0.5)]
    write_page(tmp_path / "sensitivity.html", "recipe: sensitivity", "a/run/folder: 512 pictures", [*whole, *layers], None)
    assert len(check(browser, tmp_path / "sensitivity.html", width)) == 1
    assert min(browser.ask(LETTERS)) >= 8


def test_the_checks_see_a_page_that_is_wrong(browser, tmp_path):
    page = tmp_path / "wrong.html"
    page.write_text(
        '<body style="margin:0"><div style="width:900px;height:9px"></div><img src="http://127.0.0.1:9/a.png">'
        '<svg viewBox="0 0 900 90" width="300"><text y="50" font-size="12">small</text></svg>'
    )
    browser.open(page, PHONE)
    assert browser.ask("document.documentElement.scrollWidth") > PHONE and browser.ask("document.body.children.length") == 3
    assert "http://127.0.0.1:9/a.png" in browser.requests
    assert browser.ask(LETTERS) == [pytest.approx(4)]
    (blank,) = pictures(browser)
    assert np.mean((blank < 200).any(-1)) < 0.005


def test_a_long_table_scrolls_in_its_own_box(browser, comparison):
    browser.open(comparison, PHONE)
    widths = browser.ask("[...document.querySelectorAll('.wide')].map(w => [w.scrollWidth, w.clientWidth])")
    assert any(inner > box for inner, box in widths) and all(box <= PHONE for _, box in widths)


def test_a_printed_comparison_is_open_and_cuts_no_plot(browser, comparison):
    browser.open(comparison, 794, media="print")  # A4 at 96 dots an inch
    boxes = browser.ask(BOXES)
    page = A4 / 25.4 * 96
    assert len(boxes) == 22 and all(0 < height <= page and width > 100 for _, _, width, height in boxes)
    height = browser.ask("document.documentElement.scrollHeight")
    pdf = browser.pdf()
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    # plots move to the next page whole, so that some is left blank
    assert pdf.startswith(b"%PDF") and height / page - 1 <= pages <= 2 * height / page + 2 and pages >= 4


def test_a_printed_report(browser, report):
    browser.open(report, 794, media="print")
    pages = len(re.findall(rb"/Type\s*/Page\b", browser.pdf()))
    assert 1 <= pages <= 12
