"""The HTML page without a browser: what is in it, that it is what the store holds, and that no text can act in it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import math
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ampdebug
from ampdebug import ArgumentError, Event, Run, Site, Step, open_run, write_html
from ampdebug._cli import main
from ampdebug._records import KINDS
from ampdebug.report import html_blocks, html_results
from ampdebug.report.html_data import leb128
from ampdebug.report.html_steps import StepBins


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


html_run = load("html_run")


class Page(HTMLParser):
    """What a parser sees: elements with their attributes, the text outside of scripts and styles, the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.text = text
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag == "style":
            self.styles.append("")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        if where == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif where == "style":
            self.styles[-1] += data
        else:
            self.words.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict[str, Any]:
        (data,) = [text for attributes, text in self.scripts if attributes.get("id") == "data"]
        found: dict[str, Any] = json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with open_run(html_run.write_run(tmp_path_factory.mktemp("html") / "run")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = write_html(run, tmp_path_factory.mktemp("page") / "report.html")
    return Page(path.read_text(encoding="utf-8"))


def page_of(run: Run, path: str = "report.html") -> Page:
    return Page(write_html(run, path).read_text(encoding="utf-8"))


# --- it stands alone and nothing in it can act ------------------------------------------------------------------------


def test_it_refers_to_nothing_outside(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "audio", "video")
        assert not {"src", "srcset", "action", "style"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert (attributes.get("href") or "#").startswith("#"), tag
    code = page.styles[0] + "".join(text for attributes, text in page.scripts if attributes.get("id") != "data")
    assert set(re.findall(r"[a-z]+://[^\"'` ]*", code)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert "@import" not in code
    assert not re.search(
        r"\burl\(|\bfetch\(|XMLHttpRequest|innerHTML|outerHTML|insertAdjacent|\beval\b|document\.write", code
    )


def test_its_policy_allows_its_own_script_and_style_and_nothing_else(page: Page) -> None:
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    (script,) = [text for attributes, text in page.scripts if "type" not in attributes]

    def hash_of(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    assert policy is not None
    assert dict(part.split(" ", 1) for part in policy.split("; ")) == {
        "default-src": "'none'",
        "script-src": hash_of(script),
        "style-src": hash_of(page.styles[0]),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    first = next(tag for tag, a in page.elements if tag in ("script", "style") or "http-equiv" in a)
    assert first == "meta"  # it rules only what comes after it


def test_hostile_texts_stay_texts(page: Page) -> None:
    assert len(page.scripts) == 2
    assert page.text.count("<script") == 2
    assert html_run.HOSTILE.replace("\u2028", " ") in page.said  # the event; the parser has undone the escapes
    assert html_run.HOSTILE in page.data["sites"]["path"]
    raw = page.text[page.text.index('id="data">') :]
    raw = raw[: raw.index("</script>")]
    assert raw.isascii()
    assert not set("<>&") & set(raw[len('id="data">') :])
    assert "\\ud800 " in page.text  # UTF-8 has no form for half a surrogate pair


def test_a_placeholder_in_a_text_is_not_filled(page: Page) -> None:
    assert page.text.count('"kinds":') == 1
    assert "{{data}}" in page.text


# --- the numbers are those of the store -------------------------------------------------------------------------------


def test_the_places_and_their_numbers(run: Run, page: Page) -> None:
    sites, summary = page.data["sites"], run.summary()
    assert len(sites["path"]) == len(summary)
    for number, s in enumerate(summary):
        assert (KINDS[sites["kind"][number]], sites["path"][number]) == (s.site.kind, s.site.path)
        assert (sites["call"][number], sites["slot"][number]) == (s.site.call, s.site.slot)
        assert sites["dtypes"][number] == list(s.dtypes)
        for name in sorted(set(sites) - {"kind", "path", "call", "slot", "type", "shape", "dtypes"}):
            value = getattr(s, name)
            shown = sites[name][number]
            if isinstance(value, float):
                assert (math.isnan(value) and shown == "nan") or float(shown) == value
            else:
                assert shown == value
    assert sites["shape"] == [list(shape or ()) for shape in run.shapes]


def test_the_rows_are_those_of_the_report(run: Run, page: Page) -> None:
    report = ampdebug.build_report(run, show_all=True)
    sites = page.data["sites"]
    assert len(page.data["rows"]) == len(report.rows) == report.considered
    for row, expected in zip(page.data["rows"], report.rows, strict=True):
        site = row["site"]
        assert (sites["path"][site], KINDS[sites["kind"][site]]) == (expected.path, expected.kind)
        assert (row["alarm"], row["reasons"]) == (expected.alarm, [list(reason) for reason in expected.reasons])
    for subject, sentence in report.summary:
        assert subject in page.words
        assert sentence in "".join(page.words)
    assert report._verdict() in page.said


def bits(data: str, shape: tuple[int, int]) -> np.ndarray:
    values = np.unpackbits(np.frombuffer(base64.b64decode(data), np.uint8), bitorder="little")
    return values[: shape[0] * shape[1]].reshape(shape).astype(bool)


def test_the_map_is_the_run_s(run: Run, page: Page) -> None:
    heat, data = run.heatmap(240), page.data["map"]
    shape = heat.lowest.shape
    assert data["first"] == heat.first_steps.tolist()
    assert data["last"] == heat.last_steps.tolist()
    low, high = (np.frombuffer(base64.b64decode(data[k]), np.uint8).reshape(shape) for k in ("lowest", "highest"))
    some = heat.highest != heat.EMPTY
    assert np.array_equal(low <= high, some)
    assert np.array_equal(low[some] - 127.0, heat.lowest[some])
    assert np.array_equal(high[some] - 127.0, heat.highest[some])
    assert np.array_equal(bits(data["nonfinite"], shape), heat.nonfinite)
    assert np.array_equal(bits(data["seen"], shape), heat.seen)
    assert heat.nonfinite.any()
    assert not some.all()


def integers(data: bytes) -> list[int]:
    """LEB128 by its definition."""
    result, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            result.append(value)
            value = shift = 0
    return result


@given(st.lists(st.integers(0, (1 << 63) - 1)))
def test_integers_of_any_size_survive(values: list[int]) -> None:
    assert integers(leb128(np.array(values, np.int64))) == values


def test_the_histograms_are_those_of_their_steps(run: Run, page: Page) -> None:
    snapshots = page.data["snapshots"]
    assert [s["step"] for s in snapshots][:: len(snapshots) - 1] == [1, html_run.STEPS]
    assert any(s["step"] == 3 for s in snapshots)  # the first in which anything was not finite
    for snapshot in snapshots:
        found = run.tensors(snapshot["step"])
        values = integers(base64.b64decode(snapshot["data"]))
        at = 10 * snapshot["rows"]
        assert snapshot["rows"] == len(found)
        for k in range(len(found)):
            site, dtype, count, zeros, nan, pos_inf, neg_inf, flushed, first, length = values[10 * k : 10 * k + 10]
            stats = found.rows[k]
            assert (site, found.dtype_names[dtype]) == (found.site_ids[k], found.dtypes[k])
            names = ("count", "zeros", "nan", "pos_inf", "neg_inf", "flushed")
            assert (count, zeros, nan, pos_inf, neg_inf, flushed) == tuple(stats[name] for name in names)
            counts = np.zeros(256, int)
            counts[first : first + length] = values[at : at + length]
            at += length
            assert np.array_equal(counts, found.exponents[k])
        assert at == len(values)


def test_the_steps_of_a_short_run_stand_for_themselves(run: Run, page: Page) -> None:
    steps = page.data["steps"]
    assert steps["per_bin"] == 1
    for k, step in enumerate(run.steps()):
        assert steps["first"][k] == steps["last"][k] == step.step
        assert step.loss is not None
        assert float(steps["loss_last"][k]) == step.loss or math.isnan(step.loss)
        assert steps["loss_nonfinite"][k] == (not math.isfinite(step.loss))
        assert steps["scale_low"][k] == steps["scale_high"][k] == steps["scale_last"][k] == step.loss_scale
        assert steps["overflow"][k] == steps["marked"][k] == step.overflow
    assert page.data["map"]["overflows"] == [int(step.overflow or 0) for step in run.steps()]


step_values = st.none() | st.floats(width=32)


@given(
    st.lists(st.tuples(step_values, step_values, st.sampled_from([None, False, True])), max_size=50), st.integers(1, 20)
)
def test_no_spike_and_no_overflow_gets_lost(values: list[tuple[Any, Any, Any]], bins: int) -> None:
    made = StepBins(len(values), bins=bins)
    for number, (loss, scale, overflow) in enumerate(values, 1):
        made.add(Step(number, loss=loss, loss_scale=scale, overflow=overflow))
    found = made.to_dict()
    assert len(found["first"]) <= bins
    assert sum(found["steps"]) == len(values)
    assert sum(found["overflow"]) == sum(bool(overflow) for *_, overflow in values)
    for column, name in enumerate(("loss", "scale")):
        start = 0
        for k, size in enumerate(found["steps"]):
            assert (found["first"][k], found["last"][k]) == (start + 1, start + size)
            known = [v[column] for v in values[start : start + size] if v[column] is not None]
            finite = [v for v in known if math.isfinite(v)]
            assert found[f"{name}_low"][k] == min(finite, default=None)
            assert found[f"{name}_high"][k] == max(finite, default=None)
            last = found[f"{name}_last"][k]
            if not known:
                assert last is None
            else:
                assert float(last) == known[-1] or math.isnan(known[-1])
            start += size


def test_overflows_of_steps_that_were_not_measured_count_in_the_column_before(tmp_path: Path) -> None:
    with open_run(html_run.write_run(tmp_path / "run", steps=20, every=5)) as run:
        data = page_of(run, str(tmp_path / "page.html")).data
    assert data["map"]["first"] == [1, 6, 11, 16]
    assert data["map"]["overflows"] == [1, 1, 0, 0]  # in steps 3 and 7


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    steps = 1300
    with open_run(html_run.write_run(tmp_path / "run", steps=steps, every=2, results=False)) as run:
        page = page_of(run, str(tmp_path / "page.html"))
        heat = run.heatmap(240)
    assert len(page.data["map"]["first"]) == heat.lowest.shape[1] <= 240
    assert page.data["steps"]["per_bin"] == 3
    assert sum(page.data["steps"]["marked"]) == 2 + steps - html_run.BAD + 1 == sum(page.data["map"]["overflows"])
    assert "The chart groups 3 neighbouring steps" in page.said
    assert f"The map shows 650 measured steps in {heat.lowest.shape[1]} columns" in page.said


# --- runs of every kind -----------------------------------------------------------------------------------------------


def test_a_run_without_steps(record: Callable[..., Run]) -> None:
    page = page_of(record([]))
    assert page.data["rows"] == []
    assert "No cell was measured in these steps." in page.said
    assert "There is no diagnosis" not in page.said or "no line of a training step" in page.said


def test_scalars_only(record: Callable[..., Run]) -> None:
    page = page_of(record([(Step(1, loss=1.0), ()), (Step(2, loss=0.5), ())]))
    assert page.data["steps"]["loss_last"] == [1.0, 0.5]
    assert page.data["map"]["first"] == []
    assert "1 → 0.5; finite in all 2 steps" in page.said


def test_a_healthy_run_says_so(record: Callable[..., Run]) -> None:
    site = Site("output", "fc", 0, "", "Dense")
    steps = [(Step(k, loss=1 / k), [(site, np.ones(4, np.float16))]) for k in range(1, 12)]
    page = page_of(record(steps))
    assert "Nothing is wrong" in page.said
    assert "Healthy: none of 1 cells and parameters stands out." in page.said
    assert ("p", {"class": "verdict ok"}) in page.elements


def test_a_sick_run_begins_with_the_cause(page: Page) -> None:
    assert ("p", {"class": "verdict error"}) in page.elements
    before = page.said[: page.said.index("Summary")]
    assert "makes 3 +inf of 64 elements in float16 out of finite inputs" in before


def test_the_diagnosis_is_there_with_its_evidence(run: Run, page: Page) -> None:
    found = ampdebug.diagnose(run)
    said = page.said[page.said.index(" Summary ") :]
    assert found.findings
    for finding in found.findings:
        rows = (finding.slug, finding.sentence, finding.action, finding.confidence_reason, *finding.consequences)
        for words in (*rows, *map(str, finding.evidence)):
            assert " ".join(words.split()) in said
    for sentence in (*found.looked_at, *found.unknown):
        assert " ".join(sentence.split()) in said


def test_a_damaged_step_is_left_out_and_named(record: Callable[..., Run]) -> None:
    site = Site("output", "fc", 0, "", "Dense")
    run = record([(Step(k, loss=1 / k), [(site, np.full(4, k, np.float16))]) for k in range(1, 9)])
    run.close()
    with sqlite3.connect(run.path) as connection:
        connection.execute("UPDATE tensors SET data = x'00' WHERE step = 8")
        connection.execute("DELETE FROM aggregates")
    connection.close()
    with open_run("run") as damaged:
        page = page_of(damaged)
    assert page.data["sites"]["absmax"] == [7.0]
    assert "Left out: damaged" in page.said
    assert "the statistics of step 8" in page.said


def test_many_events_are_counted(record: Callable[..., Run]) -> None:
    events = [Event(k, "said", f"sentence {k}") for k in range(310)]
    page = page_of(record([(Step(1, loss=1.0), ())], events=events))
    assert "sentence 299" in page.said
    assert "sentence 300" not in page.said
    assert "10 more events are left out here." in page.said


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_bisection_in_its_own_words(page: Page) -> None:
    assert "O2 : Kept in float32, these are enough, and each of them is needed." in page.said
    assert "9 of at most" not in page.said
    assert "12 of at most 14, 0 more from the journal" in page.said
    for words in ("train.py:workload", "could not be compiled here", "What the ranking saw"):
        assert words in page.said
    assert "of another version" in page.said  # a result of another shape is shown all the same
    assert page.said.index("bisect (2 of 2)") < page.said.index("bisect (1 of 2), older")


def test_unknown_results_are_tables(page: Page) -> None:
    assert "bytes" in page.words
    values = [a["data-value"] for tag, a in page.elements if tag == "td" and a.get("data-value")]
    assert {"300", "8000"} <= set(values)
    assert "pin-lost" in page.words  # findings of any analysis are shown as those of the diagnosis
    assert ("article", {"class": "finding warning"}) in page.elements
    assert f"step 4: {html_run.HOSTILE}" in page.words


def test_a_long_list_is_folded() -> None:
    page = Page(html_results.result("audit", {"operators": [{"n": k} for k in range(21)], "few": [{"n": 1}]}))
    assert [tag for tag, _ in page.elements].count("details") == 1
    assert "operators: 21" in page.words
    assert "few" in page.words


def test_a_damaged_result_does_not_hide_the_run(record: Callable[..., Run]) -> None:
    run = record([(Step(1, loss=1.0), ())])
    run.close()
    with sqlite3.connect(run.path) as connection:
        connection.execute("INSERT INTO results VALUES (0, 'audit', '{')")
    connection.close()
    with open_run("run") as damaged:
        assert "It cannot be read" in page_of(damaged).said


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, st.sampled_from(["bisect", "audit", "<b>"]))
def test_any_result_is_shown_and_none_acts(value: Any, kind: str) -> None:
    page = Page(html_results.result(kind, value))
    known = {
        "p",
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
        "div",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "h4",
        "pre",
    }
    assert {tag for tag, _ in page.elements} <= known | {"details", "summary", "b"}
    for _, attributes in page.elements:
        assert set(attributes) <= {"class", "scope", "data-value"}


def test_a_deep_or_long_result_is_cut_and_says_so() -> None:
    deep: Any = "core"
    for _ in range(90):
        deep = {"in": [deep]}
    assert "…" in Page(html_results.result("x", deep)).said
    said = Page(html_results.result("x", {"rows": [{"n": k} for k in range(html_blocks.ROWS + 5)]})).said
    assert "5 more rows are left out here." in said


# --- writing ----------------------------------------------------------------------------------------------------------


def test_the_path_must_be_a_file_that_is_not_the_run(record: Callable[..., Run]) -> None:
    run = record([(Step(1, loss=1.0), ())])
    before = run.path.read_bytes()
    with pytest.raises(ArgumentError, match="is the run itself; give the page another name"):
        write_html(run, "run/../run/ampdebug-rank0.sqlite")
    assert run.path.read_bytes() == before
    with pytest.raises(ArgumentError, match=r"'run' is a directory; give a file name, such as 'run/report\.html'"):
        write_html(run, "run")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_html(run, "nowhere/page.html")


def test_an_older_page_stays_until_the_new_one_is_whole(record: Callable[..., Run]) -> None:
    run = record([(Step(1, loss=1.0), ())])
    Path("page.html").write_text("old")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_html(run, "page.html", progress=stop)
    assert Path("page.html").read_text() == "old"
    assert write_html(run, "page.html") == Path("page.html")
    assert Path("page.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in Path().iterdir()) == ["page.html", "run"]


def test_progress_only_grows_and_reaches_the_end(run: Run, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_html(run, tmp_path / "page.html", progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, total in calls if done >= total] == [calls[-1][1]]


def test_the_command(record: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    record([(Step(1, loss=1.0), ())])
    assert main(["report", "run", "--html", "page.html"]) == 0
    assert capsys.readouterr() == ("page.html\n", "")
    assert "<title>run · ampdebug</title>" in Path("page.html").read_text()
    assert main(["report", "run", "--html", "other.html", "--step", "1"]) == 2
    assert "--step 1 does not go with --html" in capsys.readouterr().err
    assert not Path("other.html").exists()
    assert main(["report", "run", "--html", "nowhere/page.html"]) == 1
    assert "nowhere" in capsys.readouterr().err
