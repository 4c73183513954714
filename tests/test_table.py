"""The report: golden files for what it prints, and each reason on its own."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ampdebug
from ampdebug import ArgumentError, Birth, Cell, Event, Run, Site, Step, build_report
from ampdebug._summary import SiteSummary
from ampdebug.report.facts import RunFacts, gather_facts
from ampdebug.report.watchlist import judge_sites, share

Golden = Callable[[str, str], None]
Measured = Sequence[tuple[Site, np.ndarray]]

F16, F32 = np.float16, np.float32


def site(kind: Any, path: str, cell_type: str = "", slot: str = "") -> Site:
    return Site(kind, path, 0, slot, cell_type)


CELLS = (
    Cell("", "Net", ("attn", "head")),
    Cell("attn", "Attention", ("attn.softmax",), asked_dtype="float16"),
    Cell(
        "attn.softmax",
        "MySoftmax",
        asked_dtype="float16",
        compute_dtypes={"Exp": "float16"},
        compute_source="operators",
    ),
    Cell("head", "Dense", parameters={"head.weight": "float32"}, asked_dtype="float16"),
)


def forward(scores: np.ndarray, softmax: np.ndarray, head: np.ndarray) -> list[tuple[Site, np.ndarray]]:
    return [
        (site("input", "attn.softmax", "MySoftmax"), scores),
        (site("output", "attn.softmax", "MySoftmax"), softmax),
        (site("output", "attn", "Attention"), softmax),
        (site("input", "head", "Dense"), softmax),
        (site("output", "head", "Dense"), head),
        (site("output", "", "Net"), head.astype(F32)),
    ]


def healthy_steps(count: int = 3) -> list[tuple[Step, Measured]]:
    steps: list[tuple[Step, Measured]] = []
    for k in range(1, count + 1):
        rng = np.random.default_rng(k)
        values = forward(
            rng.standard_normal(64).astype(F16), rng.random(64).astype(F16), rng.standard_normal(10).astype(F16)
        )
        gradient = (rng.standard_normal(30).astype(F16)).astype(F32)
        step = Step(k, loss=2.5 / k, loss_scale=1024.0, loss_scale_after=1024.0, overflow=False, update_skipped=False)
        step.nonfinite_gradients, step.seconds, step.monitor_seconds = False, 0.02, 0.001
        steps.append((step, [*values, (site("gradient", "head.weight"), gradient)]))
    return steps


def overflow_steps() -> list[tuple[Step, Measured]]:
    steps = healthy_steps(2)
    for k in (3, 4):
        scores = np.full(64, 30.0, F16)
        bad = np.full(64, np.nan, F16)
        bad[:60] = np.inf
        birth = Birth("forward", "attn.softmax", "MySoftmax", "output", 0, "", True, False, 4, 60, 0, 64, "float16")
        late = Birth("backward", "head.weight", "", "gradient", 0, "", False, False, 30, 0, 0, 30, "float32")
        step = Step(k, loss=math.nan, loss_scale=1024.0 / 2 ** (k - 3), loss_scale_after=512.0 / 2 ** (k - 3))
        step.overflow = step.update_skipped = step.nonfinite_gradients = True
        step.forward_birth, step.backward_birth, step.seconds = birth, late, 0.02
        measured = [
            *forward(scores, bad, np.full(10, np.nan, F16)),
            (site("gradient", "head.weight"), np.full(30, np.nan, F32)),
        ]
        steps.append((step, measured))
    return steps


# --- what it prints ---------------------------------------------------------------------------------------------------


def test_an_overflow_names_the_cell_of_birth_first(record: Callable[..., Run], golden: Golden) -> None:
    event = Event(0, "sens-differs", "sens is 1024, but the optimizer's loss_scale is 1.")
    report = build_report(record(overflow_steps(), cells=CELLS, events=[event]))
    golden("report_overflow.txt", str(report))
    assert report.rows[0].path == "attn.softmax"
    assert report.rows[0].reasons[0][0] == "birth"
    assert not report.healthy


def test_a_healthy_run_says_so(record: Callable[..., Run], golden: Golden) -> None:
    report = build_report(record(healthy_steps(), cells=CELLS))
    golden("report_healthy.txt", str(report))
    assert report.healthy
    assert report.rows == ()


def test_all_rows(record: Callable[..., Run], golden: Golden) -> None:
    golden("report_all.txt", str(build_report(record(overflow_steps(), cells=CELLS), show_all=True)))


def test_the_cells_that_a_pattern_names_with_each_tensor(record: Callable[..., Run], golden: Golden) -> None:
    report = build_report(record(healthy_steps(), cells=CELLS), cells="attn*")
    golden("report_cell.txt", str(report))
    assert [(row.path, row.kind) for row in report.rows] == [
        ("attn.softmax", "input"),
        ("attn.softmax", "output"),
        ("attn", "output"),
    ]


def test_one_step(record: Callable[..., Run], golden: Golden) -> None:
    run = record(overflow_steps(), cells=CELLS)
    golden("report_step.txt", str(build_report(run, step=4)))
    assert build_report(run, step=2).healthy


def test_a_run_without_steps(record: Callable[..., Run], golden: Golden) -> None:
    golden("report_empty.txt", str(build_report(record([]))))


def test_scalars_only(record: Callable[..., Run]) -> None:
    text = str(build_report(record([(Step(1, loss=1.0), ()), (Step(2, loss=0.5), ())])))
    assert "No cell was measured in these steps." in text
    assert "1 → 0.5; finite in all 2 steps" in text


def many_bad_cells(count: int) -> list[tuple[Step, Measured]]:
    bad = np.array([np.nan, 1.0], F16)
    paths = [f"stages.{k}.blocks.attention_with_a_rather_long_name.projection_{k}" for k in range(count)]
    measured = [(site("output", path, "ProjectionLayer"), bad) for path in paths]
    return [(Step(1, loss=math.nan, loss_scale=2.0, overflow=True), measured)]


@pytest.mark.parametrize("count", [1, 5, 10, 11, 12, 13, 17, 28, 100, 500])
def test_no_more_than_a_screen_and_the_rows_add_up(record: Callable[..., Run], count: int) -> None:
    report = build_report(record(many_bad_cells(count)))
    lines = str(report).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    shown = sum("stages." in line for line in lines)
    (left_out,) = [int(m[1]) for m in map(re.compile(r"… (\d+) more rows?: ").match, lines) if m] or [0]
    assert shown + left_out == len(report.rows) == report.alarms == count
    assert left_out == 0 or len(lines) >= 36  # what there is room for is shown
    if left_out:
        assert "ampdebug report run --all" in next(line for line in lines if line.startswith("…"))
    everything = str(build_report(ampdebug.open_run("run"), show_all=True))
    assert sum("stages." in line for line in everything.splitlines()) == count
    assert "more row" not in everything


def test_numbers_are_not_reformatted(record: Callable[..., Run]) -> None:
    """A path or a number that looks like another number stays as it is (tabulate would make 100000 of 1e5)."""
    measured = [(site("parameter", "1e5"), np.array([np.inf, 6.1e-5], F16))]
    lines = str(build_report(record([(Step(1, loss=math.inf), measured)]))).splitlines()
    assert any(line.startswith("1e5  ") and "6.1e-05" in line for line in lines)


def test_to_dict_is_plain_and_html_is_escaped(record: Callable[..., Run]) -> None:
    import json

    measured = [(site("output", "a<b>", "T&T"), np.array([np.inf], F16))]
    report = build_report(record([(Step(1, loss=math.inf), measured)]))
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(data))
    assert data["healthy"] is False
    assert data["rows"][0]["path"] == "a<b>"
    assert data["rows"][0]["reasons"][0]["slug"] == "nonfinite"
    page = report._repr_html_()
    assert "a&lt;b&gt;" in page
    assert "<b>" in page
    assert "a<b>" not in page


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("order", "b"),
        ("name", "a"),
        ("absmax", "c"),
        ("nonfinite", "b"),
        ("zeros", "a"),
        ("flushed", "c"),
        ("weight", "b"),
    ],
)
def test_sort(record: Callable[..., Run], sort: Any, first: str) -> None:
    measured = [
        (site("output", "b", "B"), np.array([np.nan, 1.0], F16)),
        (site("output", "a", "A"), np.array([0.0, 2.0], F16)),
        (site("output", "c", "C"), np.array([1e-9, 3.0], F32)),
    ]
    report = build_report(record([(Step(1, loss=1.0), measured)]), show_all=True, sort=sort)
    assert report.rows[0].path == first
    assert len(report.rows) == 3


def test_bad_arguments_say_what_is_possible(record: Callable[..., Run]) -> None:
    run = record(healthy_steps())
    with pytest.raises(ArgumentError) as caught:
        build_report(run, sort="size")  # type: ignore[arg-type]
    assert "sort='size' is not known; choose one of weight, order, name, absmax" in str(caught.value)
    with pytest.raises(ArgumentError) as caught:
        build_report(run, cells="nothing.*")
    assert "cells='nothing.*' matches no measured cell or parameter" in str(caught.value)
    assert "such as 'attn.softmax'" in str(caught.value)
    with pytest.raises(ArgumentError, match="step=99 is not recorded"):
        build_report(run, step=99)


def test_progress_reaches_the_end(record: Callable[..., Run]) -> None:
    calls: list[tuple[int, int]] = []
    build_report(record(healthy_steps()), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (3, 3)


def test_a_level_that_changed_nothing(record: Callable[..., Run]) -> None:
    steps = [(Step(1, loss=1.0), [(site("output", "fc", "Dense"), np.ones(4, F32))])]
    text = str(build_report(record(steps, meta={"amp_level": "O1"})))
    assert "O1 changed nothing: no cell was seen with float16 or bfloat16" in text


def test_parameters_without_a_gradient_are_named(record: Callable[..., Run]) -> None:
    names = ("head.weight", "frozen.weight", "lost.weight")
    listed = [{"name": name, "requires_grad": name != "frozen.weight"} for name in names]
    report = build_report(record(healthy_steps(), meta={"amp_level": "O2", "parameters": listed}))
    assert dict(report.summary)["notes"] == "no gradient ever came for lost.weight"
    assert report.healthy


def test_notes_of_a_healthy_run(record: Callable[..., Run]) -> None:
    """A causal mask and a frozen backbone: both are said below the table, neither is an alarm."""
    steps = healthy_steps()
    for _, measured in steps:
        measured.append((site("output", "mask", "MaskedFill"), np.array([-np.inf, 1.0], F16)))  # type: ignore[attr-defined]
        measured.append((site("gradient", "backbone.0.weight"), np.zeros(3, F32)))  # type: ignore[attr-defined]
    report = build_report(record(steps, cells=CELLS))
    assert report.healthy
    assert dict(report.summary)["notes"] == (
        "only -inf, as a mask makes, in mask; gradient exactly 0 in every step for backbone.0.weight"
    )


# --- each reason ------------------------------------------------------------------------------------------------------


def summary(
    kind: Any, path: str, values: Any, dtype: Any = F16, *, number: int = 0, cell_type: str = "T"
) -> SiteSummary:
    """The summary of one site over one step, by an independent plain-numpy count in float64."""
    array = np.asarray(values, dtype)
    wide = array.astype(np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    size = np.abs(finite)
    single = finite.astype(F32).view(np.uint32) & 0x7FFFFF
    bits = max((23 - ((int(m) & -int(m)).bit_length() - 1) for m in single if m), default=0)
    return SiteSummary(
        number,
        Site(kind, path, cell_type=cell_type),
        rows=1,
        steps=1,
        first_step=1,
        last_step=1,
        count=wide.size,
        zeros=int((wide == 0).sum()),
        nan=int(np.isnan(wide).sum()),
        pos_inf=int((wide == np.inf).sum()),
        neg_inf=int((wide == -np.inf).sum()),
        subnormal=int(((size > 2.0**-25) & (size < 2.0**-14)).sum()),
        flushed=int(((size > 0) & (size <= 2.0**-25)).sum()),
        exceeding=int((size > 65504).sum()),
        saturated=int((size == 65504).sum()),
        mantissa_bits=bits,
        min=float(finite.min()) if finite.size else math.nan,
        max=float(finite.max()) if finite.size else math.nan,
        absmax=float(size.max()) if finite.size else math.nan,
        absmax_step=1 if finite.size else None,
        first_nonfinite_step=None if finite.size == wide.size else 1,
        dtypes=(str(array.dtype),),
    )


def slugs(
    *summaries: SiteSummary, cells: Sequence[Cell] = (), facts: RunFacts | None = None, of: int = -1
) -> list[tuple[str, bool]]:
    numbered = [replace(s, site_id=k) for k, s in enumerate(summaries)]
    judged = judge_sites(numbered, cells, facts or gather_facts([Step(1, loss=1.0, sampled=True)]))
    return [(reason.slug, reason.is_alarm) for reason in judged[of].reasons]


LEAF16 = Cell("c", "Dense", parameters={"c.weight": "float32"}, asked_dtype="float16")
LEAF32 = Cell("c", "Dense", parameters={"c.weight": "float32"}, asked_dtype="float32")


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1.0, -2.0], F16, []),
        ([16376.0], F16, []),
        ([16384.0], F16, [("near-float16-max", True)]),
        ([-65504.0], F16, [("saturated", True)]),
        ([65504.0], F32, []),  # in float32 it is a number like any other
        ([1e6], F32, [("beyond-float16", False)]),
        ([1e-6] * 3 + [1.0], F16, [("subnormal", False)]),
        ([1e-6, 1.0, 1.0], F16, []),
        ([np.nan, 1.0], F16, [("nonfinite", True)]),
        ([-np.inf, 1.0], F16, [("mask", False)]),
        ([-np.inf, np.inf], F16, [("nonfinite", True)]),
        ([], F16, []),
        ([0.0, 0.0], F16, []),  # nothing is known of its inputs
    ],
)
def test_outputs(values: list[float], dtype: Any, expected: list[tuple[str, bool]]) -> None:
    assert slugs(summary("output", "c", values, dtype)) == expected


def test_only_neg_inf_is_an_alarm_once_the_loss_is_not_finite() -> None:
    facts = gather_facts([Step(1, loss=math.nan, sampled=True)])
    assert slugs(summary("output", "c", [-np.inf, 1.0]), facts=facts) == [("nonfinite", True)]


@pytest.mark.parametrize(
    ("inputs", "output", "expected"),
    [
        ([1.0], [np.nan], [("nonfinite-made-here", True)]),
        ([np.nan], [np.nan], [("nonfinite", True)]),
        ([450.0], [0.0, 0.0], [("silent-zero", True)]),
        ([0.0], [0.0, 0.0], []),
        ([450.0], [0.0, 1.0], []),
    ],
)
def test_outputs_against_inputs(inputs: list[float], output: list[float], expected: list[tuple[str, bool]]) -> None:
    assert slugs(summary("input", "c", inputs), summary("output", "c", output)) == expected


@pytest.mark.parametrize(
    ("values", "cell", "expected"),
    [
        ([7e4, 1.0], LEAF16, [("exceeds-float16", True)]),
        ([7e4, 1.0], LEAF32, [("beyond-float16", False)]),
        ([3e4, 1.0], LEAF16, [("near-float16-max", True)]),
        ([3e4, 1.0], LEAF32, []),
        ([1e-9, 1e-9, 1.0], LEAF16, [("flushed-by-cast", True)]),
        ([1e-9, 1.0, 1.0], LEAF16, []),
        ([1e-9, 1e-9, 1.0], LEAF32, []),
        ([7e4, 1.0], replace(LEAF16, children=("c.d",)), [("beyond-float16", False)]),
    ],
)
def test_float32_inputs_are_judged_by_what_the_cell_casts_them_to(
    values: list[float], cell: Cell, expected: list[tuple[str, bool]]
) -> None:
    half = summary("output", "other", [1.0])  # float16 is at work in this run
    assert slugs(half, summary("input", "c", values, F32), cells=[cell]) == expected


@pytest.mark.parametrize(
    ("values", "cell", "expected"),
    [
        ([np.nan, 1.0], LEAF16, [("parameter-nonfinite", True)]),
        ([7e4], LEAF16, [("exceeds-float16", True)]),
        ([7e4], LEAF32, [("beyond-float16", False)]),
        ([1e-9, 0.0], LEAF16, [("flushed-by-cast", False)]),
    ],
)
def test_parameters(values: list[float], cell: Cell, expected: list[tuple[str, bool]]) -> None:
    assert slugs(summary("parameter", "c.weight", values, F32), cells=[cell]) == expected


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1.0, 2.0], F32, []),
        ([6e4, 65504.0], F16, []),  # a loss scale drives gradients to the limit by design
        ([0.0, 0.0], F32, [("zero-gradient", False)]),
        ([0.0, 2.0**-20, 2.0**-19, 1.0], F16, [("flushing", True)]),
        ([0.0, 2.0**-20, 2.0**-19, 1.0], F32, [("flushing", True)]),  # float32, but its values went through float16
        ([0.0, 1.1e-6, 1.3e-6, 1.0], F32, []),  # these did not: they have more digits than float16
        ([0.0, 2.0**-20, 1.0, 1.0], F16, [("flushing", True)]),
        ([0.0, 2.0**-20, 1.0, 1.0, 1.0], F16, []),
    ],
)
def test_gradients(values: list[float], dtype: Any, expected: list[tuple[str, bool]]) -> None:
    half = summary("output", "other", [1.0])
    assert slugs(half, summary("gradient", "c.weight", values, dtype)) == expected


def test_a_float32_run_has_no_flushing_gradients() -> None:
    assert slugs(summary("gradient", "c.weight", [2.0**-20, 2.0**-19], F32)) == []


def steps_with_overflow(bad: int, total: int, **said: Any) -> RunFacts:
    birth = Birth("backward", "x", "", "gradient", 0, "", None, False, 1, 0, 0, 2, "float32")
    fine = [Step(k, loss=1.0, sampled=True, nonfinite_gradients=False) for k in range(bad + 1, total + 1)]
    return gather_facts(
        [
            Step(k, loss=1.0, sampled=True, nonfinite_gradients=True, backward_birth=birth, **said)
            for k in range(1, bad + 1)
        ]
        + fine
    )


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (steps_with_overflow(2, 20, update_skipped=True), ("overflow-skipped", False)),
        (steps_with_overflow(2, 20, overflow=True), ("overflow-skipped", False)),
        (steps_with_overflow(1, 1, update_skipped=True), ("overflow-skipped", False)),
        (steps_with_overflow(2, 20, overflow=True, update_skipped=False), ("nonfinite-gradient", True)),
        (steps_with_overflow(2, 20), ("nonfinite-gradient", True)),
        (steps_with_overflow(19, 20, update_skipped=True), ("nonfinite-gradient", True)),
    ],
)
def test_overflows_that_the_loss_scaler_caught_are_no_alarm(facts: RunFacts, expected: tuple[str, bool]) -> None:
    assert slugs(summary("gradient", "c.weight", [np.inf, 1.0], F32), facts=facts) == [expected]


@pytest.mark.parametrize(
    ("birth", "kind", "path", "words"),
    [
        ({"inputs_finite": True}, "output", "c", ["born here", "its inputs are finite", "1 NaN"]),
        ({"inputs_finite": True, "own_code": True}, "output", "c", ["born here by the cell's own code"]),
        ({"inputs_finite": False}, "output", "c", ["was not finite either"]),
        ({"inputs_finite": None}, "output", "c", ["born here"]),
        ({"path": "", "kind": "input", "inputs_finite": None}, "input", "", ["network's own input"]),
        (
            {"kind": "input", "inputs_finite": True, "own_code": True, "seen_at": "c.d"},
            "input",
            "c.d",
            ["by the cell's own code in c"],
        ),
    ],
)
def test_births(birth: dict[str, Any], kind: str, path: str, words: list[str]) -> None:
    made = replace(Birth("forward", "c", "T", "output", 0, "", None, False, 1, 0, 0, 2, "float16"), **birth)
    facts = gather_facts([Step(1, loss=1.0, forward_birth=made), Step(2, loss=1.0, forward_birth=made)])
    judged = judge_sites([summary("output", "x", [1.0]), summary(kind, path, [np.nan, 1.0])], [], facts)
    reason = judged[1].reasons[0]
    assert reason.weight >= 94
    assert "in step 1 (and in 1 more)" in reason.text
    for word in words:
        assert word in reason.text
    assert not judged[0].reasons


@pytest.mark.parametrize(
    ("asked", "computes", "source", "expected"),
    [
        ("float16", {"MatMul": "float16"}, "operators", []),
        ("float16", {"MatMul": "float16", "BiasAdd": "float32"}, "operators", []),
        ("float16", {"MatMul": "float32"}, "operators", [("dtype", True)]),
        ("float16", {"MatMul": "float32"}, "trace", [("dtype", True)]),
        ("float16", {"MatMul": "float32"}, "flags", []),  # not seen, only concluded
        ("float32", {"ReduceMean": "float16"}, "operators", [("dtype", True)]),
        ("float32", {"ReduceMean": "float32", "Cast": "float16"}, "operators", []),
        ("float16", {"Gather": "int32"}, "operators", []),
        (None, {"MatMul": "float32"}, "operators", []),
    ],
)
def test_dtypes(asked: str | None, computes: dict[str, str], source: str, expected: list[tuple[str, bool]]) -> None:
    cell = Cell("c", "T", asked_dtype=asked, compute_dtypes=computes, compute_source=source)
    assert slugs(summary("output", "c", [1.0], F32), summary("output", "c", [1.0], F32), cells=[cell], of=0) == expected
    assert slugs(summary("output", "c", [1.0], F32), summary("output", "c", [1.0], F32), cells=[cell], of=1) == []


@pytest.mark.parametrize(
    ("dtype", "unchanged", "below", "expected"),
    [
        ("float16", 80, 0, [("update-rounds-away", True)]),
        ("float16", 40, 0, []),
        ("float32", 80, 0, []),
        ("float32", 0, 60, [("update-below-half-ulp", False)]),
        ("float32", 0, 40, []),
    ],
)
def test_updates(dtype: str, unchanged: int, below: int, expected: list[tuple[str, bool]]) -> None:
    update = replace(
        summary("update", "c.weight", []), count=100, zeros=unchanged, flushed=below, dtypes=(dtype,), absmax=math.nan
    )
    gradient = summary("gradient", "c.weight", np.ones(100), F32)
    assert slugs(gradient, update) == expected
    assert slugs(replace(gradient, zeros=100), update) == [entry for entry in expected if not entry[1]]


def test_share_is_exact_at_the_ends() -> None:
    assert [share(k, 10000) for k in (0, 1, 123, 5000, 9999, 10000)] == [
        *("0 %", "<0.1 %", "1.23 %", "50 %"),
        *(">99.9 %", "100 %"),
    ]


# --- facts ------------------------------------------------------------------------------------------------------------


def test_facts_of_many_steps() -> None:
    losses = [3.0, math.nan, 1.0, None]
    scales = [8.0, 4.0, 16.0, 8.0]
    steps = [Step(k, loss=loss, loss_scale=scale) for k, loss, scale in zip(itertools.count(5), losses, scales)]
    steps[-1].loss_scale_after = 32.0
    facts = gather_facts(steps)
    assert (facts.steps, facts.first_step, facts.last_step) == (4, 5, 8)
    assert (facts.loss.known, facts.loss.first, facts.loss.last, facts.loss.low, facts.loss.high) == (
        3,
        3.0,
        1.0,
        1.0,
        3.0,
    )
    assert (facts.loss.nonfinite, facts.loss.first_nonfinite_step, facts.loss_is_finite) == (1, 6, False)
    assert (facts.loss_scale.low, facts.loss_scale.low_step, facts.loss_scale.high) == (4.0, 6, 16.0)
    assert facts.scale_after == 32.0
    assert math.isnan(facts.seconds)


def test_facts_of_no_steps() -> None:
    facts = gather_facts([])
    assert (facts.steps, facts.first_step, facts.without_gradient) == (0, None, None)
    assert facts.loss_is_finite
