"""The report page in a real browser: offline, quiet, readable on a desk, on a phone and on paper."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.chromium import chromium
from tests.helpers.comparisons import layout_parity, several
from workbench.report.page import write_report

pytestmark = pytest.mark.browser

SIZES = {"desk": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(layout_parity(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def windows(browser):
    """With and without scripts, no network; a window costs more than three pages in it, and our pages store nothing."""
    contexts = {scripts: browser.new_context(offline=True, java_script_enabled=scripts) for scripts in (True, False)}
    for context in contexts.values():
        context.new_page()  # the window closes with its last page
    yield contexts
    for context in contexts.values():
        context.close()


@pytest.fixture
def visit(windows, report):
    """Open the report without a network; remember every request, message and error."""
    pages = []

    def open_it(path=report, *, viewport=None, scripts=True):
        page = windows[scripts].new_page()
        pages.append(page)
        page.set_viewport_size(viewport or {"width": 1280, "height": 720})
        page.heard = []
        page.requested = []
        page.on("console", lambda message: page.heard.append(message.text))
        page.on("pageerror", lambda error: page.heard.append(str(error)))
        page.on("request", lambda request: page.requested.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_it
    for page in pages:
        page.close()


def test_the_report_reads_well(visit, report):
    page = visit()
    assert page.heard == []
    assert page.requested == [report.as_uri()]
    assert page.locator("h2").count() == 9
    row = page.locator("tr.row", has_text="fault_missing_cp_factor")
    assert "different" in row.inner_text()
    assert "1 / cp" in row.inner_text()
    for (size, (width, height)), scheme in itertools.product(SIZES.items(), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        keep_picture(page, f"report-{size}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for heading in page.locator("h1, h2").all():
            assert heading.is_visible()
        for drawing in page.locator("figure svg").all():
            box = drawing.bounding_box()
            assert box["width"] > 300
            assert box["height"] > 150

        rows = page.evaluate("[...document.querySelectorAll('.scroll tr')].map(row => row.offsetHeight)")
        assert max(rows) < 160

        ink, paper = _colors(page)
        assert (_lightness(ink) > _lightness(paper)) == (scheme == "dark")
        text = page.locator("figure svg text").first
        assert text.evaluate("e => getComputedStyle(e).fill") != paper
    assert page.heard == []


def keep_picture(page, name):
    """The whole page, for whoever asks: painting it takes longer than all else."""
    if kept := os.environ.get("WORKBENCH_SCREENSHOTS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(kept) / f"{name}.png", full_page=True)


def test_the_bar_of_a_fault_ends_beyond_the_budget_and_a_correct_one_before_it(visit):
    page = visit(viewport={"width": 1280, "height": 900})
    for name, beyond in (("fault_missing_cp_factor", True), ("cp2_contiguous-float64", False)):
        row = page.locator("tr.row", has_text=name)
        fill, budget = (row.locator(part).bounding_box() for part in (".bar .fill", ".bar .budget"))
        assert (fill["x"] + fill["width"] > budget["x"]) is beyond


def test_numbers_open_at_a_click_without_a_script(visit):
    page = visit(scripts=False, viewport={"width": 1280, "height": 900})
    details = page.locator("details", has_text="fault_shift_after_shard").last
    assert not details.locator("table").is_visible()
    details.locator("summary").click()
    assert details.locator("table").is_visible()


def test_the_report_prints_dark_on_white(visit, tmp_path):
    page = visit()
    page.emulate_media(media="print", color_scheme="dark")
    ink, paper = _colors(page)
    assert _lightness(ink) < _lightness(paper)
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


TOO_NARROW = """() => {
  const measure = document.createElement("canvas").getContext("2d"), found = [];
  for (const head of document.querySelectorAll("thead th")) {
    const inner = head.querySelector("code") || head, style = getComputedStyle(inner), box = getComputedStyle(head);
    if (!head.offsetWidth || style.writingMode !== "horizontal-tb") continue;  // hidden, or upwards in print
    const copy = head.cloneNode(true), room = parseFloat(box.paddingLeft) + parseFloat(box.paddingRight);
    copy.querySelectorAll(".scale").forEach((each) => each.remove());
    measure.font = style.font;
    for (const word of copy.textContent.split(/[\\s._/-]+/))
      if (measure.measureText(word).width > head.clientWidth - room + 1) found.push(word);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Without importance ratios, whose figure takes half the time: the tests are of the table."""
    many = several(50)
    rows = [replace(c, ratios={}) for c in many.configurations]
    return write_report(replace(many, configurations=rows), tmp_path_factory.mktemp("large") / "report.html")


@pytest.mark.parametrize("media", ["screen", "print"])
def test_50_configurations_fit_700_pixels(media, visit, large):
    page = visit(large, viewport={"width": 700, "height": 900})
    page.emulate_media(media=media)
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert page.evaluate(TOO_NARROW) == []
    assert page.locator("#controls").is_visible() is (media == "screen")


def test_verdicts_are_filtered_ordered_and_grouped(visit, large):
    page = visit(large, viewport={"width": 1280, "height": 900})
    assert page.locator("tr.row").count() == 50
    page.fill("#filter", "FAULT_ different")
    assert page.inner_text("#shown") == "9 of 50 shown"
    page.fill("#filter", "")
    page.select_option("#order", "largest")
    page.select_option("#group", "verdict")
    assert page.locator("tr.group").first.inner_text() == "different (9)"
    assert "fault_local_denominator" in page.locator("tr.row").first.inner_text()
    page.select_option("#group", "=precision")
    assert page.locator("tr.group").count() == 2
    page.select_option("#order", "ablation")
    page.select_option("#group", "reference")
    assert page.locator("tr.row").count() == 50
    assert page.heard == []


def test_two_configurations_are_compared(visit):
    page = visit(viewport={"width": 1280, "height": 900})
    page.select_option("#left", label="one_rank-float64")
    page.select_option("#right", label="tp2-float32")
    rows = page.locator("#difference tbody tr")
    assert rows.all_inner_texts() == ["layout.tp\t1\t2", "precision\tfloat64\tfloat32"]
    page.select_option("#right", label="one_rank-float64")
    assert page.inner_text("#difference") == "These two have the same settings."


def test_without_a_script_all_rows_stand_and_no_control(visit):
    page = visit(scripts=False, viewport={"width": 700, "height": 900})
    assert page.locator("tr.row").count() == 15
    assert not page.locator("#controls").is_visible()
    assert not page.locator("#pair").is_visible()


def _colors(page):
    style = "getComputedStyle(document.body)"
    return page.evaluate(f"{style}.color"), page.evaluate(f"{style}.backgroundColor")


def _lightness(color):
    return sum(float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3])
