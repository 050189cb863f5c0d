"""The pages of reports in Chromium: nothing is cut off, nothing is loaded, and paper shows all of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.load.records import record
from support.load.reports import report_of

from scripts.load_tester.analysis.compare import add_verdicts, changes_of
from scripts.load_tester.reporting.charts import comparison_charts
from scripts.load_tester.reporting.comparison_report import Pair, comparison_page
from scripts.load_tester.reporting.html_report import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMINGS = {"prefill_queue_s": 0.1, "prefill_s": 0.3, "decode_queue_s": 0.02, "transfer_s": 0.05, "join_s": 0.1}
LONG = "a/very-long-name-" * 12
#: Elements whose right edge lies beyond the window, and text of charts outside of its chart.
CUT_OFF = """() => {
  const width = document.documentElement.clientWidth, found = [];
  document.querySelectorAll("details").forEach((one) => (one.open = true));
  if (document.documentElement.scrollWidth > width) found.push("page " + document.documentElement.scrollWidth);
  for (const one of document.querySelectorAll("main *:not(thead *)")) {
    const box = one.getBoundingClientRect();
    if (one.closest("svg") && one.tagName !== "text") continue;
    if (box.right > width + 1 || box.left < -1) found.push(one.tagName + " " + one.textContent.slice(0, 40));
    if (one.tagName !== "text" || getComputedStyle(one).display === "none") continue;
    const chart = one.closest("svg").getBoundingClientRect();
    const isBeside = box.right > chart.right + 2 || box.left < chart.left - 2;
    if (isBeside || box.bottom > chart.bottom + 2 || box.top < chart.top - 2)
      found.push("text of a chart: " + one.textContent + " " + [box.left, box.right, box.bottom] + " of "
        + [chart.left, chart.right, chart.bottom]);
  }
  return found;
}"""
#: Texts of a chart that overlap each other.
OVERLAPS = """() => {
  const found = [];
  for (const chart of document.querySelectorAll("svg")) {
    const texts = [...chart.querySelectorAll("text")].filter((one) => getComputedStyle(one).display !== "none");
    const boxes = texts.map((one) => one.getBoundingClientRect());
    for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
      const [a, b] = [boxes[i], boxes[j]];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) found.push(texts[i].textContent + " and " + texts[j].textContent);
    }
  }
  return found;
}"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=180_000)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with everything, one without any answer, a search, and a comparison; some have long names."""
    good = [
        record(at + 0.5 + at / 40, at + 0.7 + at / 40, at + 1.3, at=float(at), index=at, timings=TIMINGS,
               tenant=LONG + str(at % 2), class_name="ab"[at % 2])
        for at in range(45)
    ]  # fmt: skip
    failed = [record(at=46.0, index=46, error="http_500", message=LONG)]
    run = report_of([*good, *failed], slo_ttft="800ms", slo_itl="250ms", mix="a:input=3; b:input=4")
    run.server["model"] = LONG
    run.scrape = {
        f'baton_node_{name}{{node="{node}"}}': [[float(at), at * 1234.5] for at in range(20)]
        for node in ("prefill-0", LONG) for name in ("running", "prompt_tokens_computed_total")
    }  # fmt: skip
    empty = report_of(failed, slo_ttft="1s")
    before, after = run.to_dict(), report_of(good, slo_ttft="700ms").to_dict()
    (changes,) = add_verdicts([changes_of(before, after)], 0.05)
    compared = comparison_page(
        ["before", LONG], [Pair("", before, after, changes)], comparison_charts({"before": before, LONG: after}),
        reasons=["too late"], threshold=0.05,
    )  # fmt: skip
    written = {
        "run": page([run]),
        "empty": page([empty]),
        "search": page([run, report_of(good, slo_ttft="800ms", rate="4")], found=["found " + LONG], best_rate=4.0),
        "comparison": compared,
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, html in written.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in written}


@pytest.mark.parametrize("name", ["run", "empty", "search", "comparison"])
def test_nothing_is_cut_off(browser: Any, pages: dict[str, Path], name: str) -> None:
    shown = browser.new_page()
    shown.goto(pages[name].as_uri())
    for width in (360, 390, 768, 1280):
        shown.set_viewport_size({"width": width, "height": 800})
        assert shown.evaluate("innerWidth") == width
        assert shown.evaluate(CUT_OFF) == [], width
        assert shown.evaluate(OVERLAPS) == [], width
    shown.close()


@pytest.mark.parametrize("name", ["run", "search", "comparison"])
def test_a_page_loads_nothing_and_says_nothing_on_the_console(browser: Any, pages: dict[str, Path], name: str) -> None:
    shown = browser.new_page()
    asked: list[str] = []
    said: list[str] = []
    shown.on("request", lambda request: asked.append(request.url))
    shown.on("console", lambda message: said.append(message.text))
    shown.goto(pages[name].as_uri())
    assert asked == [pages[name].as_uri()] and said == []
    shown.close()


def test_verdict_and_tiles_are_seen_without_scrolling(browser: Any, pages: dict[str, Path]) -> None:
    shown = browser.new_page(viewport={"width": 1280, "height": 800})
    shown.goto(pages["run"].as_uri())
    bottoms = shown.evaluate(
        "() => [...document.querySelectorAll('.tile')].map((t) => t.getBoundingClientRect().bottom)"
    )
    assert len(bottoms) == 8 and max(bottoms) <= 800
    shown.close()


def test_paper_shows_what_is_folded_on_the_screen(browser: Any, pages: dict[str, Path]) -> None:
    shown = browser.new_page()
    shown.goto(pages["run"].as_uri())
    visible = "() => document.querySelector('details table').checkVisibility({contentVisibilityAuto: true})"
    assert not shown.evaluate(visible)
    shown.emulate_media(media="print")
    shown.wait_for_function(visible)
    shown.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Any, pages: dict[str, Path], scheme: str) -> None:
    """WCAG AA asks for 4.5 between text and what is behind it."""
    shown = browser.new_page(color_scheme=scheme)
    shown.goto(pages["run"].as_uri())
    ratios = shown.evaluate("""() => {
      const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
          .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const behind = (one) => {
        for (; one; one = one.parentElement) {
          const colour = getComputedStyle(one).backgroundColor;
          if (!colour.endsWith(", 0)")) return colour;
        }
      };
      return [...document.querySelectorAll("h1, h2, p, li, .tile *, th, td, small")].map((one) => {
        const [a, b] = [light(getComputedStyle(one).color), light(behind(one))];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      });
    }""")
    assert len(ratios) > 100 and min(ratios) >= 4.5
    shown.close()
