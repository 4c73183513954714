"""The judge of a comparison, fed with runs made by hand; numbers are checked against arithmetic written out here."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdebug._compare import ComparisonReport, judge_comparison
from ampdebug._compare_advice import near_ceiling, net_kind
from ampdebug._compare_noise import compile_time, late_skips, noise_of, step_time
from ampdebug._compare_records import BaselineRuns, Kernel, Measured, Memory, Share, TrainingRun

STEPS = 20
MB = 10**6


def losses(offset: float = 0.0, scale: float = 1.0) -> tuple[float, ...]:
    return tuple(float(2.0 * scale * 0.9**step + offset) for step in range(STEPS))


def run(level: str = "O0", seed: int = 0, **parts: Any) -> TrainingRun:
    given: dict[str, Any] = {
        "losses": losses(),
        "metric": 0.9,
        "step_seconds": (1.0, *[0.1] * (STEPS - 1)),
        "first_seconds": 3.0,
        "warm_up_seconds": 0.5,
        "memory": Memory(500 * MB, 600 * MB, "process"),
        "share": Share({"float32": 4}, {"float32": 400}, {"conv2d": 2, "dense": 1}),
    }
    if level != "O0":
        given["share"] = Share(
            {"float16": 3, "float32": 1}, {"float16": 150, "float32": 100}, {"conv2d": 2, "dense": 1}
        )
    return TrainingRun(level, parts.pop("mode", "pynative"), seed, **{**given, **parts})


def baseline(**parts: Any) -> BaselineRuns:
    kept = {name: parts.pop(name) for name in ("repeat", "seeds") if name in parts}
    base = run(**parts)
    seeds = (run(seed=1, losses=losses(0.02), metric=0.91), run(seed=2, losses=losses(-0.02), metric=0.89))
    return BaselineRuns(base, kept.get("repeat", base), kept.get("seeds", seeds))


def judged(*runs: TrainingRun, base: BaselineRuns | None = None, **parts: Any) -> ComparisonReport:
    given: dict[str, Any] = {"better": "higher", "has_metric": True, "tolerance": None, **parts}
    return judge_comparison(Measured("Net", STEPS, baselines={"pynative": base or baseline()}, runs=runs, **given))


# --- noise and gaps ---------------------------------------------------------------------------------------------------


def test_a_gap_is_in_standard_deviations_of_the_seeds() -> None:
    noise = noise_of(baseline())
    # Losses of the three seeds are off by 0, 0.02 and -0.02 at every step: a standard deviation of 0.02.
    assert noise.loss == pytest.approx([0.02] * 5)
    assert noise.metric == pytest.approx(0.01)
    gap = noise.gap(losses(0.05))
    assert (gap.largest, gap.final) == (pytest.approx(2.5), pytest.approx(2.5))
    assert gap.final_loss == pytest.approx(np.mean(losses(0.05)[-4:]))


def test_the_largest_gap_keeps_its_sign_and_need_not_be_the_final_one() -> None:
    lower = [loss - (0.1 if 4 <= step < 8 else 0.0) for step, loss in enumerate(losses())]
    gap = noise_of(baseline()).gap(lower)
    assert (gap.largest, gap.final) == (pytest.approx(-5.0), 0.0)


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=10, max_size=10), min_size=2, max_size=5))
def test_the_noise_of_each_window_is_that_of_it_and_its_neighbours(seeds: list[list[float]]) -> None:
    runs = [run(seed=k, losses=tuple(values)) for k, values in enumerate(seeds)]
    noise = noise_of(BaselineRuns(runs[0], runs[0], tuple(runs[1:])))
    means = np.array(seeds, np.float64).reshape(len(seeds), 5, 2).mean(axis=2)
    variance = ((means - means.mean(axis=0)) ** 2).sum(axis=0) / (len(seeds) - 1)
    for window in range(5):
        near = [variance[k] for k in (window - 1, window, window + 1) if 0 <= k < 5]
        expected = max(math.sqrt(sum(near) / len(near)), 1e-6 * means[0].max())
        assert noise.loss[window] == pytest.approx(expected, rel=1e-9)


def test_without_any_spread_the_unit_is_rounding() -> None:
    noise = noise_of(BaselineRuns(run(), run(), (run(seed=1),)))
    assert noise.loss == pytest.approx([1e-6 * np.mean(losses()[:4])] * 5)


def test_a_loss_that_is_not_finite_has_no_gap() -> None:
    assert math.isnan(noise_of(baseline()).gap([math.nan, *losses()[1:]]).largest)


@pytest.mark.parametrize(
    ("change", "expected"),
    [(0.0, "bitwise"), (1e-7, "closely"), (1e-4, "closely"), (0.01, "no")],
)
def test_reproducible(change: float, expected: str) -> None:
    noise = noise_of(baseline(repeat=run(losses=losses(change))))
    assert noise.reproducible == expected
    assert noise.repeat == pytest.approx(change / (losses()[-1] + change), rel=1e-3)


def test_rounding_is_close_where_seeds_change_nothing() -> None:
    same = (run(seed=1),)
    assert noise_of(BaselineRuns(run(), run(losses=losses(1e-7)), same)).reproducible == "closely"
    assert noise_of(BaselineRuns(run(), run(losses=losses(1e-5)), same)).reproducible == "no"


def test_what_a_repetition_changes_is_noise_too() -> None:
    noise = noise_of(baseline(repeat=run(losses=losses(0.5), metric=0.7)))
    assert noise.loss == pytest.approx([0.5] * 5)
    assert noise.metric == pytest.approx(0.2)
    report = judged(run("O2", losses=losses(0.5)), base=baseline(repeat=run(losses=losses(0.5))))
    assert "O0 is not reproducible: with the same seed its losses differ by up to" in str(report)
    assert report.row("O2").gap is not None
    assert report.row("O2").gap.largest == pytest.approx(1.0)  # type: ignore[union-attr]


def test_times_leave_compiling_out() -> None:
    one = run(step_seconds=(5.0, 0.1, 0.3, 0.2), first_seconds=3.0)
    assert step_time(one) == pytest.approx(0.2)
    assert compile_time(one) == pytest.approx(5.0 + 3.0 - 0.4)


def test_skips_count_from_the_first_update_on() -> None:
    assert late_skips(run(skipped=(0, 1, 7))) == 1
    assert late_skips(run(skipped=tuple(range(STEPS)))) == STEPS


def test_shares() -> None:
    share = Share({"float16": 3, "float32": 1}, {"float16": 150, "float32": 450}, {})
    assert (share.low_operators, share.low_bytes) == (0.75, 0.25)
    assert math.isnan(Share({"float16": 3}, {}, {}).low_bytes)


# --- the recommendation -----------------------------------------------------------------------------------------------


def quick(level: str, seconds: float = 0.05, **parts: Any) -> TrainingRun:
    return run(level, step_seconds=(1.0, *[seconds] * (STEPS - 1)), **parts)


def advised(*runs: TrainingRun, **parts: Any) -> Any:
    return judged(*runs, **parts).advice[0]


def test_the_fastest_level_that_fits_is_taken() -> None:
    advice = advised(quick("O1", 0.08), quick("O2", 0.05), quick("O3", 0.03, metric=0.5))
    assert advice.level == "O2"
    assert "O2 takes 50% less time a step than O0 on this device" in advice.reasons


def test_equally_fast_levels_are_told_apart_by_the_kind_of_network() -> None:
    levels = [quick("O1", 0.05), quick("O2", 0.05), quick("O3", 0.049), quick("auto", 0.05)]
    assert advised(*levels).level == "O2"
    attention = Share({"float32": 4}, {}, {"matmul": 4, "softmax": 1, "layernorm": 1})
    assert advised(*levels, base=baseline(share=attention)).level == "auto"
    custom = Share({"float32": 4}, {}, {"conv2d": 4, "custom": 1})
    assert advised(*levels, base=baseline(share=custom)).level == "O1"


def test_a_saving_within_the_noise_of_two_baselines_is_none() -> None:
    base = baseline(repeat=quick("O0", 0.07))
    advice = advised(quick("O2", 0.06), base=base)
    assert advice.level == "O0"
    assert "no level saves time or memory here beyond what two runs of O0 differ by" in advice.reasons
    assert advice.elsewhere == "O2"


def test_a_level_that_is_quick_in_half_of_its_steps_only_is_not_faster() -> None:
    seconds = (1.0, *[0.05] * (STEPS // 2), *[0.2] * (STEPS // 2 - 1))
    assert advised(run("O2", step_seconds=seconds)).level == "O0"


def test_memory_decides_where_no_level_is_faster() -> None:
    small = run("O2", memory=Memory(500 * MB, 560 * MB, "process"))
    advice = advised(small, kernels=(Kernel("matmul", 2.0), Kernel("conv", 1.2)))
    assert advice.level == "O2"
    assert "O2 takes 40% less memory than O0" in advice.reasons
    assert any(reason.endswith("memory is all there is to win") for reason in advice.reasons)
    assert "no level is faster here; O2 takes 40% less memory than O0" in advised(small).reasons


def test_shorter_steps_do_not_count_where_they_cannot_come_from_float16() -> None:
    slow = (Kernel("matmul", 2.0), Kernel("conv", math.nan, "does not work: no kernel"))
    advice = advised(quick("O2"), kernels=slow)
    assert (advice.level, advice.elsewhere) == ("O0", "O2")
    assert any(reason.endswith("all there is to win; shorter steps do not count") for reason in advice.reasons)
    assert advised(quick("O2"), kernels=(Kernel("matmul", 2.0), Kernel("conv", 0.5))).level == "O2"


def test_shorter_steps_do_not_count_on_a_busy_machine() -> None:
    advice = advised(quick("O2"), load=2.5)
    assert advice.level == "O0"
    assert (
        "the machine is busy (load average 2.5 per processor), so that times tell little; shorter steps do not count"
        in (advice.reasons)
    )
    assert advised(quick("O2"), load=1.5).level == "O2"


def test_an_accelerated_device_is_not_warned_of() -> None:
    advice = advised(quick("O2"), kernels=(Kernel("matmul", 0.4), Kernel("conv", 0.5)))
    assert not any("accelerated on" in reason for reason in advice.reasons)


@pytest.mark.parametrize(
    ("tolerance", "metric", "fits"), [(None, 0.88, True), (None, 0.86, False), (0.05, 0.86, True), (0.01, 0.88, False)]
)
def test_the_tolerance_is_in_the_unit_of_the_metric(tolerance: float | None, metric: float, fits: bool) -> None:
    # Without one: the larger of 2 % of 0.9 and three times the noise of 0.01.
    report = judged(quick("O2", metric=metric), tolerance=tolerance)
    assert report.row("O2").verdict.fits is fits
    assert (report.advice[0].level == "O2") is fits


def test_a_metric_that_is_better_lower() -> None:
    report = judged(quick("O2", metric=0.93), quick("O3", metric=0.5), better="lower", tolerance=0.02)
    assert (report.row("O2").verdict.fits, report.row("O3").verdict.fits) == (False, True)


def test_without_a_metric_the_final_loss_is_judged() -> None:
    report = judged(quick("O2", losses=losses(0.05)), quick("O3", losses=losses(0.07)), has_metric=False)
    # Three times the noise of 0.02, which is more than 2 % of the loss of 0.3.
    assert (report.row("O2").verdict.fits, report.row("O3").verdict.fits) == (True, False)
    assert "final loss <=" in str(report)


def test_near_its_ceiling_a_metric_does_not_outweigh_the_loss() -> None:
    far = quick("O2", losses=losses(0.2), metric=0.99)
    caution = judged(dataclasses.replace(far, metric=0.9)).row("O2").verdict
    assert caution.fits
    assert caution.cautions == ("its loss leaves O0's by +10 times the seed noise",)
    seeds = (run(seed=1, losses=losses(0.02), metric=0.99), run(seed=2, losses=losses(-0.02), metric=0.99))
    report = judged(far, base=baseline(metric=0.99, seeds=seeds))
    assert not report.row("O2").verdict.fits
    assert "where the metric is too near its ceiling to show it" in report.row("O2").verdict.problems[0]
    assert "the metric is near its ceiling (0.99 at O0), so levels are judged by their loss too" in str(report).replace(
        "\n    ", " "
    )


@pytest.mark.parametrize(
    ("metric", "better", "expected"),
    [(0.981, "higher", True), (0.97, "higher", False), (98.5, "higher", True), (42.0, "higher", False),
     (0.0, "lower", True), (0.01, "lower", False), (math.nan, "higher", False), (1.5, "higher", False)],
)  # fmt: skip
def test_near_ceiling(metric: float, better: Any, expected: bool) -> None:
    assert near_ceiling(metric, better) is expected


def test_a_level_that_converts_nothing_does_not_fit() -> None:
    nothing = Share({"float32": 4}, {"float32": 400}, {})
    verdict = judged(quick("O1", share=nothing)).row("O1").verdict
    assert verdict.problems == ("every operator runs in float32: this level converted nothing here",)


def test_overflows_of_a_scale_that_has_settled_do_not_fit() -> None:
    assert judged(quick("O2", skipped=(0, 1, 2, 9))).row("O2").verdict.fits
    assert judged(quick("O2", skipped=(3, 9))).row("O2").verdict.problems == (
        "2 of 20 updates were skipped for overflow, and 1 would be usual",
    )


def test_a_loss_that_is_not_finite_does_not_fit() -> None:
    bad = (*losses()[:7], math.nan, math.inf, *losses()[9:])
    row = judged(quick("O3", losses=bad, metric=math.nan)).row("O3")
    assert row.verdict.problems[0] == "the loss is not finite in 2 of 20 steps, first in step 7"


def test_levels_that_do_not_run_are_rows_with_their_reason() -> None:
    failures = [
        TrainingRun("O1", "pynative", status="failed", reason="converting the network to O1 raised NameError: x"),
        TrainingRun("O2", "pynative", status="timeout", reason="it took longer than 3 s and was ended"),
        TrainingRun("O3", "pynative", status="crashed", reason="the worker process died with signal 11"),
    ]
    report = judged(*failures)
    text = str(report)
    for one in failures:
        assert report.row(one.level).run.status == one.status
        assert one.reason in text
    assert report.advice[0].level == "O0"
    assert report.advice[0].reasons[0] == "none of O1, O2, O3 fits"
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["rows"][2]["step_seconds"] == "nan"


def test_a_level_that_ran_and_does_not_fit_is_one_for_bisect() -> None:
    failed = TrainingRun("auto", "pynative", status="failed", reason="x")
    assert (
        "`ampdebug bisect --level O3` finds the operators that must stay in float32 for it"
        in advised(failed, quick("O3", metric=0.1)).reasons
    )


def test_a_baseline_whose_own_gradients_fail_is_no_case_for_bisect() -> None:
    skipped = tuple(range(STEPS))
    advice = judged(run("O2", skipped=skipped), base=baseline(skipped=skipped)).advice[0]
    assert advice.level is None
    assert advice.reasons == (
        f"O0 itself leaves out {STEPS} of {STEPS} updates, since its gradients are not finite: precision is not the "
        "cause. `ampdebug check` names the operator",
    )
    healthy = judged(run("O2", skipped=skipped), base=baseline(skipped=(0, 1))).advice[0]
    assert any("ampdebug bisect --level O2" in reason for reason in healthy.reasons)


def test_a_baseline_that_does_not_train_recommends_nothing() -> None:
    broken = TrainingRun("O0", "pynative", status="failed", reason="training step 3 raised RuntimeError: no kernel")
    report = judged(run("O2"), base=BaselineRuns(broken, broken))
    assert report.advice[0].level is None
    assert "training step 3 raised RuntimeError: no kernel" in report.advice[0].reasons[0]
    json.dumps(report.to_dict(), allow_nan=False)
    nan = dataclasses.replace(run(), losses=(math.nan,) * STEPS)
    assert judged(run("O2"), base=BaselineRuns(nan, nan)).advice[0].level is None


def test_a_run_too_short_to_learn_says_so() -> None:
    flat = tuple([2.0] * STEPS)
    seeds = (run(seed=1, losses=tuple([2.02] * STEPS)),)
    said = " ".join(advised(quick("O2", losses=flat), base=baseline(losses=flat, seeds=seeds)).reasons)
    assert "it has not learned yet" in said


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"conv2d": 3, "batchnorm": 3, "dense": 1}, "conv/dense"),
        ({"matmul": 1, "softmax": 1}, "conv/dense"),
        ({"matmul": 2, "softmax": 1}, "attention"),
        ({"matmul": 2, "exp": 1, "sum": 1, "div": 1}, "attention"),
        ({"flashattentionscore": 1, "dense": 4}, "attention"),
        ({"custom": 1, "matmul": 2, "softmax": 1}, "custom-operator"),
        ({"add": 3}, "other"),
        ({}, "other"),
    ],
)
def test_net_kind(kinds: dict[str, int], expected: str) -> None:
    assert net_kind(kinds) == expected


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_table_shows_what_was_measured() -> None:
    text = str(judged(quick("O2", losses=losses(0.01), metric=0.895)))
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("pynative")}
    assert lines["O0"].split()[2:4] == ["baseline", "0.9"]
    for part in ("fits", "+0.5", "0.895", "50 ms (0.50×)", "3.9 s", "100 MB", "0 of 20", "75% / 60%"):
        assert part in lines["O2"]
    assert "two runs with one seed give the same losses, bit by bit" in text


def test_both_modes_have_a_baseline_of_their_own() -> None:
    other = baseline(mode="graph", losses=losses(1.0))
    report = judge_comparison(
        Measured(
            "Net", STEPS, "higher", True, {"pynative": baseline(), "graph": other},
            (run("O2"), run("O2", mode="graph", losses=losses(1.0))),
        )
    )  # fmt: skip
    assert [report.row("O2", mode).gap.largest for mode in ("pynative", "graph")] == [0.0, 0.0]  # type: ignore[union-attr, arg-type]
    assert [advice.mode for advice in report.advice] == ["pynative", "graph"]
    with pytest.raises(KeyError):
        report.row("O3")


def test_html_escapes() -> None:
    measured = Measured("<Net>", STEPS, "higher", True, {"pynative": baseline()}, ())
    assert "&lt;Net&gt;" in judge_comparison(measured)._repr_html_()
