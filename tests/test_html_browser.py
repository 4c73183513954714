"""The HTML page in a real browser without a window: it opens, says what the store says, and obeys mouse and keyboard.

Needs playwright's Python package and a Chromium of the system (Debian: ``apt-get install chromium-headless-shell`` or
``chromium``), or the one that ``AMPDEBUG_CHROMIUM`` names; nothing is downloaded. Skipped where either is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ampdebug
from ampdebug import Run, open_run, write_html
from ampdebug.report.watchlist import share

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright (pip install playwright; its browsers are not needed)"
)

WIDTHS = (1280, 390)
CELLS = "#cells-table tbody tr"


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


html_run = load("html_run")


def chromium() -> str:
    named = os.environ.get("AMPDEBUG_CHROMIUM")
    found = (
        named or shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    if not found:
        pytest.skip(
            "needs a Chromium (Debian: apt-get install chromium-headless-shell); AMPDEBUG_CHROMIUM=FILE names another"
        )
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # CI runs as root
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with open_run(html_run.write_run(tmp_path_factory.mktemp("html") / "run")) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_html(run, tmp_path_factory.mktemp("page") / "report.html")


class Opened:
    """A page in the browser; everything that it complained of or asked the network for is an error in the end."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.complaints.append(request.url) if self.foreign(request) else None)
        self.file = file
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def foreign(self, request: Any) -> bool:
        url: str = request.url
        return url.split("#")[0] != self.file.as_uri()

    def close(self) -> None:
        hit = self.page.evaluate("window.hit === undefined ? 'no' : String(window.hit)")
        self.page.close()
        assert self.complaints == []
        assert hit == "no", "a text of the run was executed"


@pytest.fixture
def open_page(browser: Any, file: Path) -> Iterator[Callable[..., Any]]:
    opened: list[Opened] = []

    def make(path: Path = file, width: int = 1280, **options: Any) -> Any:
        opened.append(Opened(browser, path, viewport={"width": width, "height": 900}, **options))
        return opened[-1].page

    yield make
    for page in opened:
        page.close()


def wait_for(page: Any, expression: str) -> None:
    """Until it is true; wait_for_function does that with an eval, which the page's policy forbids."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never true: {expression}")


def names(page: Any) -> list[str]:
    found: list[str] = page.locator(f"{CELLS} td.name button").all_text_contents()
    return found


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_says_what_the_store_says(open_page: Callable[..., Any], run: Run, width: int) -> None:
    page = open_page(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out sideways
    rows = page.locator(CELLS)
    report = ampdebug.build_report(run, show_all=True)
    assert rows.count() == len(report.rows)
    for index, row in enumerate(report.rows):
        cells = rows.nth(index).locator("td")
        text = cells.all_text_contents()
        bad = row.nan + row.pos_inf + row.neg_inf
        assert text[0].startswith(row.path or "(network)")
        assert text[1] == " ".join(
            [row.kind.replace("_", " "), *([f"call {row.call}"] if row.call else []), *([row.slot] if row.slot else [])]
        )
        assert text[2] == row.dtype
        assert text[4:8] == [
            share(bad, row.count) if bad else "",
            share(row.zeros, row.count),
            share(row.flushed, row.count),
            str(row.steps),
        ]
        assert text[8] == "; ".join(text for _, text in row.reasons[:2])
        exact = [cells.nth(k).get_attribute("data-value") for k in (3, 4, 5, 6)]
        assert [float(e) if e != "NaN" else None for e in exact] == [
            row.absmax if row.absmax == row.absmax else None,
            bad,
            row.zeros,
            row.flushed,
        ]
        assert float(text[3]) == float(f"{row.absmax:.5g}")


def test_the_page_decodes_what_python_packed(open_page: Callable[..., Any], run: Run) -> None:
    """The map and the histograms, through the page's own code by way of what it draws and says."""
    page = open_page()
    heat = run.heatmap(240)
    (site,) = [k for k, s in enumerate(run.sites) if (s.kind, s.path, s.call) == ("output", "attn.softmax", 0)]
    page.locator(CELLS, has_text="attn.softmax").first.click()
    bars = page.locator("dialog .graph").first.locator("rect.bar")
    assert bars.count() == heat.lowest.shape[1]
    crosses = page.locator("dialog .graph").first.locator("path.mark")
    assert crosses.count() == int(heat.nonfinite[site].sum()) == html_run.STEPS - html_run.BAD + 1
    select = page.locator("dialog .graph select")
    for step in (1, 3, html_run.STEPS):
        select.select_option(label=f"step {step}")
        found = run.tensors(step)
        (row, *_) = np.flatnonzero(found.site_ids == site)
        shown = page.evaluate(
            "[...document.querySelectorAll('dialog .histogram rect')].map(b => [b.dataset.exponent, b.dataset.count])"
        )
        counts = found.exponents[row]
        assert [(int(e), int(n)) for e, n in shown] == [(int(b) - 127, int(counts[b])) for b in np.flatnonzero(counts)]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_chart_says_each_step(open_page: Callable[..., Any], width: int) -> None:
    page = open_page(width=width)
    page.locator("#chart").focus()
    page.keyboard.press("Home")
    assert page.locator("#chart-said").text_content() == "step 1: loss 4 · loss scale 65536"
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert (
        page.locator("#chart-said").text_content()
        == "step 3: loss 1.3333 · loss scale 65536 · overflow · update skipped"
    )
    page.keyboard.press("End")
    assert page.locator("#chart-said").text_content() == "step 60: loss NaN · loss scale 64 · overflow · update skipped"
    assert page.locator("#chart path.mark").count() == html_run.STEPS - html_run.BAD + 1
    page.locator("#chart").hover(position={"x": width // 2, "y": 60})
    assert "loss 0.1" in page.locator("#chart-said").text_content()


# --- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_on_the_map_shows_the_right_cell(open_page: Callable[..., Any], run: Run, width: int) -> None:
    page = open_page(width=width)
    heat = run.heatmap(240)
    outputs = [k for k, site in enumerate(run.sites) if site.kind == "output"]
    page.locator("#map-view").scroll_into_view_if_needed()
    canvas = page.locator("#map-canvas").bounding_box()
    area = page.locator("#map-space").bounding_box()
    height = area["height"] / len(outputs)
    label = round(min(290, canvas["width"] * (0.36 if canvas["width"] < 600 else 0.27)))
    columns = heat.lowest.shape[1]
    for row, column in ((0, columns - 1), (3, 5), (len(outputs) - 1, 0)):
        x = label + (column + 0.5) * (canvas["width"] - label - 8) / columns
        page.locator("#map-canvas").click(position={"x": x, "y": (row + 0.5) * height})
        site = run.sites[outputs[row]]
        assert page.locator("#detail-title").text_content().startswith(site.path or "(network)")
        said = page.locator("#detail-column").text_content()
        assert f"step {heat.first_steps[column]}" in said
        if heat.nonfinite[outputs[row], column]:
            assert "NaN or infinity" in said
        zeros = page.locator("#detail-numbers tr[data-field=zeros] td[aria-selected=true]")
        assert zeros.get_attribute("data-value") == str(run.summary()[outputs[row]].zeros)
        page.keyboard.press("Escape")
        assert not page.locator("dialog").is_visible()


def test_the_map_obeys_the_keyboard(open_page: Callable[..., Any], run: Run) -> None:
    page = open_page()
    page.locator("#map-compact").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "map-view"
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("#map-said").text_content().startswith("attn.softmax call 1 · step 3 (overflow)")
    page.keyboard.press("Enter")
    assert page.locator("#detail-title").text_content() == "attn.softmax MySoftmax"
    assert page.evaluate("document.activeElement.textContent") == "Close"
    page.keyboard.press("Enter")
    assert not page.locator("dialog").is_visible()
    assert page.evaluate("document.activeElement.id") == "map-view"
    page.locator("#map-kind").select_option("gradient")
    page.locator("#map-which").select_option("lowest")
    assert page.locator("#map-said").text_content().startswith("1 row.")
    page.locator("#map-filter").fill("nothing")
    assert page.locator("#map-said").text_content() == "Nothing matches."


def test_the_map_in_another_order_and_compact(open_page: Callable[..., Any], run: Run) -> None:
    page = open_page()
    page.locator("#map-order").select_option("look")
    page.locator("#map-compact").check()
    rank = {row.path: k for k, row in enumerate(ampdebug.build_report(run, show_all=True).rows) if row.cell_type}
    outputs = [site for site in run.sites if site.kind == "output"]
    expected = sorted(outputs, key=lambda site: rank[site.path])
    assert expected != outputs
    for k, site in enumerate(expected):
        page.locator("#map-canvas").click(position={"x": 600, "y": 5 * k + 2})
        assert page.locator("#detail-title").text_content() == f"{site.path or '(network)'} {site.cell_type}"
        assert page.locator("dialog .chips button[aria-pressed=true]").count() == 1
        page.keyboard.press("Escape")


@pytest.mark.parametrize("width", WIDTHS)
def test_sorting(open_page: Callable[..., Any], run: Run, width: int) -> None:
    page = open_page(width=width)
    report = ampdebug.build_report(run, show_all=True)
    assert names(page) == [row.path or "(network)" for row in report.rows]
    header = page.locator("#cells-table th", has_text="absmax")
    header.locator("button").focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    values = page.locator(f"{CELLS} td:nth-child(4)").all_text_contents()
    assert [float(v) for v in values] == sorted((float(f"{row.absmax:.5g}") for row in report.rows), reverse=True)
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    assert page.locator(f"{CELLS} td:nth-child(4)").all_text_contents() == values[::-1] or len(set(values)) < len(
        values
    )
    page.locator("#cells-table th button").first.click()
    assert header.get_attribute("aria-sort") == "none"
    assert names(page) == sorted(names(page), key=str.lower)
    result = page.locator("article.result table", has_text="blocks.0")
    result.locator("th", has_text="bytes").locator("button").click()
    sizes = result.locator("tbody td:nth-child(2)").all_text_contents()
    assert sizes == ["8000", "1000", "600", "300", "90", "50", "20", "7", "4"]


def test_searching(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.locator("#cells-search").fill("softmax FLOAT16")
    assert names(page) == ["attn.softmax"]
    assert page.locator("#cells-count").text_content() == "1 of 6"
    page.locator("#cells-search").fill("<img")
    assert names(page) == [html_run.HOSTILE]
    page.locator("#cells-search").fill("")
    page.locator("#cells-alarm").check()
    assert 0 < len(names(page)) < 6
    result = page.locator("article.result", has=page.locator("h3", has_text="audit"))
    result.locator("input[type=search]").fill("blocks.7")
    assert result.locator("tbody tr").count() == 1


def test_a_row_opens_by_keyboard_and_leads_to_its_parameters(open_page: Callable[..., Any], run: Run) -> None:
    page = open_page()
    page.locator(f"{CELLS} td.name button", has_text="head.weight").focus()
    page.keyboard.press("Enter")
    assert page.locator("#detail-title").text_content() == "head.weight"
    assert page.locator("dialog .chips button").all_text_contents() == ["gradient, float32", "parameter, float32"]
    numbers = {s.site.kind: s for s in run.summary() if s.site.path == "head.weight"}
    for field in ("min", "max", "absmax", "neg_inf", "subnormal", "flushed"):
        shown = page.locator(f"#detail-numbers tr[data-field={field}] td").evaluate_all(
            "e => e.map(d => d.dataset.value)"
        )
        assert [float(v) for v in shown] == [getattr(numbers[kind], field) for kind in ("gradient", "parameter")]
    zeros = page.locator("#detail-numbers tr[data-field=zeros] td").all_text_contents()
    assert zeros == [share(numbers[kind].zeros, numbers[kind].count) for kind in ("gradient", "parameter")]
    assert zeros[1] == "0.944 %"
    page.locator("dialog .chips button").last.click()
    assert "parameter" in page.locator("dialog .graph h3").first.text_content()
    page.locator("dialog .graph select").select_option(label=f"step {html_run.STEPS}")
    assert page.locator("dialog .histogram p").text_content() == "30,000 elements of float32, <0.1 % zero"
    drawn = page.locator("dialog .histogram rect").evaluate_all("bars => bars.map(bar => Number(bar.dataset.count))")
    assert sum(drawn) == 29_995
    page.keyboard.press("Escape")
    page.locator(f"{CELLS} td.name button").get_by_text("head", exact=True).click()
    page.locator("dialog button.link", has_text="head.weight").click()
    assert page.locator("#detail-title").text_content() == "head.weight"


# --- where it is read -------------------------------------------------------------------------------------------------


def test_hostile_names_in_the_details(browser: Any, file: Path) -> None:
    opened = Opened(browser, file)
    page = opened.page
    page.locator(f"{CELLS} td.name button", has_text="<img").click()
    assert page.locator("#detail-title").text_content() == f"{html_run.HOSTILE} {html_run.HOSTILE}"
    assert page.locator("img").count() == 0
    assert opened.complaints == []
    # Even what got in would not run: this is what "no complaint" is worth.
    script = "document.createElement('script'), {textContent: 'window.hit = 3'}"
    page.evaluate(f"document.body.append(Object.assign({script}))")
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/'}))")
    page.wait_for_timeout(100)
    errors = [said for said in opened.complaints if said.startswith("error: ")]
    assert len(errors) == 2
    assert all("Content Security Policy" in said for said in errors), errors
    opened.complaints.clear()
    opened.close()


def test_it_prints_whole_in_light_colours(open_page: Callable[..., Any]) -> None:
    page = open_page(color_scheme="dark")
    # Copied first: a canvas that is read back again and again earns a warning.
    top = """(() => {
        const copy = new OffscreenCanvas(60, 16).getContext('2d');
        copy.drawImage(document.getElementById('map-canvas'), -9, 0);
        return [...copy.getImageData(0, 0, 60, 16).data];
    })()"""

    def labels_are_light() -> bool:
        return bool(np.array(page.evaluate(top)).reshape(-1, 4)[:, :3].max() > 200)

    assert labels_are_light()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # a browser draws for paper before it changes the medium
    assert not labels_are_light()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert labels_are_light()
    page.emulate_media(media="print", color_scheme="dark")
    wait_for(page, "getComputedStyle(document.getElementById('map-view')).overflowY === 'visible'")
    wait_for(page, "!document.querySelector('details:not([open])')")
    assert not labels_are_light()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    page.emulate_media(media="screen")
    wait_for(page, "!!document.querySelector('details:not([open])')")


def test_without_scripts_the_words_are_there(browser: Any, file: Path, run: Run) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    text = page.locator("body").text_content()
    assert page.locator("noscript table").first.is_visible()
    context.close()
    assert "makes 3 +inf of 64 elements" in text
    assert "need JavaScript, which is off here" in text
    assert "first non-finite value of the forward pass" in text
    assert "Kept in float32, these are enough" in text


def test_many_cells_open_quickly(browser: Any, tmp_path: Path) -> None:
    """A tenth of the size that benchmarks/html_page.py measures; loose limits, since CI is shared."""
    with open_run(html_run.write_run(tmp_path / "run", steps=16, copies=60, results=False)) as small:
        path = write_html(small, tmp_path / "page.html")
        assert path.stat().st_size < 2_000_000
        opened = Opened(browser, path, viewport={"width": 1280, "height": 900})
        page = opened.page
        ready = page.evaluate("performance.now()")
        assert ready < 5000
        assert page.locator(CELLS).count() == 100
        assert page.locator("#cells-count").text_content() == "360 of 360, the first 100 shown"
        page.locator("#cells-more").click()
        assert page.locator(CELLS).count() == 360
        page.locator("#map-view").evaluate("view => view.scrollTo(0, view.scrollHeight)")
        page.locator("#map-view").focus()
        page.keyboard.press("End")
        page.keyboard.press("PageDown")
        page.locator("#map-filter").fill("copy59.head")
        assert page.locator("#map-said").text_content().startswith("1 row.")
        page.locator("#map-canvas").click(position={"x": 500, "y": 8})
        assert page.locator("#detail-title").text_content() == "copy59.head Dense"
        opened.close()
