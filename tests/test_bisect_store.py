"""A bisection's result beside what a monitor recorded: stored, told of in the report, shown in TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ampdebug import Step, build_report, open_run, write_tensorboard
from ampdebug._bisect_result import BisectResult, Check, Culprit, Unit
from ampdebug._bisect_store import RankingTaker, store_bisection
from ampdebug._errors import FormatError, StoreError
from ampdebug._lowering import LoweringResult
from ampdebug._sites import OperatorSite, SiteScore
from ampdebug._store import RunWriter, run_file
from ampdebug._store_result import append_result, check_appendable
from ampdebug.report.bisection import bar_lengths, bisection_markdown, describe_bisection, draw_ranking

NAMES = ["Exp", "Div", "MatMul"]


def unit(name: str) -> Unit:
    line = f"net.py:{10 + NAMES.index(name)}"
    site = OperatorSite("head", name, line, 0)
    return Unit(site.key, (site,), name, "head", "/src/net.py", line, f"y = {name.lower()}(x | y)")


def score(value: float) -> SiteScore:
    return SiteScore(value, 100, 7 if math.isinf(value) else 0, 0, 9.0, 1.0, 0.01)


def ranking(count: int = 3) -> RankingTaker:
    taker = RankingTaker()
    units = [unit(NAMES[k]) if k < 3 else Unit(f"more{k}", (), "Add", "tail") for k in range(count)]
    taker(units, {units[0].sites[0]: score(math.inf), units[1].sites[0]: score(0.01)})
    return taker


def result(**fields: Any) -> BisectResult:
    given: dict[str, Any] = {
        "status": "found",
        "culprits": (Culprit(unit("Exp"), 1, score(math.inf), None, "verified"),),
        "sufficient": True,
        "level": "O3",
        "mode": "real",
        "criterion": "gradient error <= 0.05",
        "reference": 0.0,
        "low": math.nan,
        "noise": 0.0,
        "units": 3,
        "probes": 4,
        "bound": 9,
        "reused": 0,
        "seconds": 1.5,
        "checks": (Check("deterministic", True, "bitwise"), Check("other", None, "not here")),
        "notes": ("tail is compiled",),
        "history": (),
    }
    return BisectResult(**{**given, **fields})


def stored(path: Path) -> list[dict[str, Any]]:
    with open_run(path) as run:
        return run.results("bisect")


# --- storing ----------------------------------------------------------------------------------------------------------


def test_into_a_new_directory(tmp_path: Path) -> None:
    path = store_bisection(tmp_path / "new" / "run", result(), ranking(), "net.py:task")
    assert path == run_file(tmp_path / "new" / "run", 0)
    (data,) = stored(tmp_path / "new" / "run")
    assert data["task"] == "net.py:task"
    assert {key: data[key] for key in result().to_dict()} == result().to_dict()
    assert [(row["rank"], row["operator"], row["score"], row["kind"]) for row in data["ranking"]] == [
        (1, "Exp", "inf", "overflow"),
        (2, "Div", 0.01, "rounding"),
        (3, "MatMul", None, ""),
    ]


def test_the_head_of_a_long_ranking_is_kept() -> None:
    assert len(ranking(250).rows) == 100


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_beside_a_recorded_run_which_stays_as_it_ended(tmp_path: Path, status: Any) -> None:
    writer = RunWriter(tmp_path)
    writer.put_step(Step(1, loss=2.5))
    writer.close(status)
    store_bisection(tmp_path, result(), ranking(), "task")
    store_bisection(tmp_path, result(level="O2"), ranking(), "task")
    with open_run(tmp_path) as run:
        assert [segment.status for segment in run.segments] == [status]
        assert [step.loss for step in run.steps()] == [2.5]
        assert [data["level"] for data in run.results("bisect")] == ["O3", "O2"]


def test_of_several_ranks_the_lowest_takes_it(tmp_path: Path) -> None:
    for rank in (3, 2):
        RunWriter(tmp_path, rank=rank).close()
    assert append_result(tmp_path, "bisect", {}) == run_file(tmp_path, 2)


def test_a_run_that_is_being_recorded_or_is_none(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "live"), pytest.raises(StoreError, match="is being written by another monitor"):
        check_appendable(tmp_path / "live")
    check_appendable(tmp_path / "live")
    check_appendable(tmp_path / "new")
    assert stored(tmp_path / "live") == stored(tmp_path / "new") == []
    with (
        RunWriter(tmp_path / "live", append=True),
        pytest.raises(StoreError, match="is being written by another monit"),
    ):
        append_result(tmp_path / "live", "bisect", {})
    (tmp_path / "other").mkdir()
    run_file(tmp_path / "other", 0).write_bytes(b"no database at all, but long enough to be looked at" * 9)
    with pytest.raises(FormatError, match="is not a run of ampdebug"):
        append_result(tmp_path / "other", "bisect", {})


# --- the report -------------------------------------------------------------------------------------------------------


def lines(path: Path) -> dict[str, str]:
    with open_run(path) as run:
        return dict(build_report(run).summary)


def test_the_report_tells_of_the_newest_three(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    assert not any("bisect" in subject for subject in lines(tmp_path))
    store_bisection(tmp_path, result(), ranking(), "net.py:task")
    assert lines(tmp_path)["bisect"] == (
        "net.py:task O3: keep in float32 Exp in head at net.py:10 (4 probes, each verified to be needed); good is "
        "gradient error <= 0.05"
    )
    for level in ("O1", "O2", "auto"):
        store_bisection(tmp_path, result(level=level), ranking(), "task")
    found = lines(tmp_path)
    assert [subject for subject in found if "bisect" in subject] == ["bisect 2", "bisect 3", "bisect 4"]
    assert found["bisect 4"].startswith("task auto: ")
    with open_run(tmp_path) as run:
        assert "keep in float32 Exp" in str(build_report(run))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"status": "nothing-to-find", "culprits": ()}, "t O3: passes as it is: nothing to find"),
        ({"status": "precision-innocent", "culprits": ()}, "t O3: fails in float32 too: precision is not the cause"),
        ({"status": "not-found", "culprits": ()}, "t O3: no set of known operators in float32 is enough"),
        ({"status": "max-probes", "culprits": ()}, "t O3: no answer yet (max-probes)"),
        ({"status": "max-probes"}, "search max-probes"),
        ({"culprits": (Culprit(unit("Exp"), 1, None, None, "unknown"),) * 6}, "; and 2 more (4 probes, search found)"),
    ],
)
def test_every_kind_of_answer_has_its_sentence(fields: dict[str, Any], words: str) -> None:
    assert words in describe_bisection({**result(**fields).to_dict(), "task": "t"})


def test_the_other_direction_says_how_many_may_go_down() -> None:
    down = LoweringResult.of(result(level="O0"), [unit(name) for name in NAMES], "float16")
    assert [one.operator for one in down.lowered] == ["Div", "MatMul"]
    words = describe_bisection({**down.to_dict(), "task": "t"})
    assert words.startswith("t O0 down, 2 of 3 units may go to float16: keep in float32 Exp in head at net.py:10")
    everything = LoweringResult.of(result(status="nothing-to-find", culprits=(), sufficient=False), [unit("Exp")], "x")
    assert describe_bisection({**everything.to_dict(), "task": "t"}).endswith("may go to x (nothing-to-find)")
    cut = LoweringResult.of(result(status="max-probes", culprits=(), sufficient=False), [unit("Exp")], "x")
    assert cut.lowered == ()
    assert "Stopped early (max-probes)" in str(cut)
    assert "all in float16 nan" in str(down)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0})
    found.Reload()
    return found


def test_tensorboard_has_text_and_picture_beside_the_curves(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.put_step(Step(5, loss=2.5))
    store_bisection(tmp_path / "run", result(), ranking(), "net.py:task")
    with open_run(tmp_path / "run") as run:
        write_tensorboard(run, tmp_path / "one")
    one = events(tmp_path / "one")
    assert one.Tags()["images"] == ["bisect/ranking"]
    assert "loss" in one.Tags()["scalars"]
    (text,) = one.Tensors("bisect/result/text_summary")
    words = text.tensor_proto.string_val[0].decode()
    assert "| 1 | Exp | head | net.py:10 | y = exp(x \\| y) | overflow" in words
    assert text.step == 5
    store_bisection(tmp_path / "run", result(), RankingTaker(), "again")
    with open_run(tmp_path / "run") as run:
        write_tensorboard(run, tmp_path / "two")
    two = events(tmp_path / "two")
    assert two.Tags()["images"] == ["bisect-1/ranking"]
    assert {"bisect-1/result/text_summary", "bisect-2/result/text_summary"} <= set(two.Tags()["tensors"])


def test_the_text_says_all_of_it() -> None:
    text = bisection_markdown({**result().to_dict(), "task": "t", "ranking": ranking().rows})
    for words in (
        "| 2 | Div | head |",
        "check deterministic: ok",
        "check other: not checked",
        "note: tail is compiled",
    ):
        assert words in text


def test_the_bars() -> None:
    longest = bar_lengths([math.inf, 1.0, 0.1, 0.01, 0.0, math.nan])
    assert longest == sorted(longest, reverse=True)
    assert longest[0] > longest[1] > longest[2] > longest[3] > 0 == longest[4] == longest[5]
    assert bar_lengths([5.0])[0] > 0
    assert bar_lengths([0.0, math.nan]) == [0, 0]
    assert bar_lengths([]) == []


def test_the_picture_marks_what_must_stay() -> None:
    data: Mapping[str, Any] = {**result().to_dict(), "task": "t", "ranking": ranking(40).rows}
    picture = draw_ranking(data)
    assert picture is not None
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3

    def rows_of(colour: tuple[int, int, int]) -> set[int]:
        return set((np.flatnonzero((picture == colour).all(axis=2).sum(axis=1) > 30) // 9).tolist())

    assert rows_of((213, 94, 0)) == {2}, "the culprit, ranked first, below the title"
    assert rows_of((86, 180, 233)) == {3}, "Div has a score and need not stay; the rest has none"
    assert draw_ranking(result().to_dict()) is None


def test_what_a_file_holds_may_be_anything() -> None:
    strange: list[Any] = [
        {},
        {"status": 3, "culprits": "many", "ranking": 7, "checks": {}, "notes": None},
        {"culprits": [None, {"unit": 3}, {"rank": []}], "ranking": [{}, {"score": "x"}, {"score": True}, 3]},
        {"culprits": [{"unit": {"name": ["a"], "path": 5}}], "checks": [{"passed": "yes"}, {"passed": [1]}]},
    ]
    for data in strange:
        assert describe_bisection(data)
        assert bisection_markdown(data)
        draw_ranking(data)
