"""Each rule: it speaks where it should, and near misses leave it silent."""

from __future__ import annotations

import io
import math
import random

import pytest

from ampdebug._diagnose import Diagnosis, diagnose
from ampdebug._trace import Trace

NAN, INF = math.nan, math.inf


def log(lines: list[str]) -> Diagnosis:
    return diagnose(io.BytesIO("\n".join(lines).encode()))


def slugs(diagnosis: Diagnosis) -> list[str]:
    return [finding.slug for finding in diagnosis.findings if finding.severity != "note"]


def falling_loss(step: int, rng: random.Random, first: float = 7.0, last: float = 2.0, tau: float = 150.0) -> float:
    return (last + (first - last) * math.exp(-step / tau)) * (1 + rng.gauss(0, 0.03))


class Scaler:
    def __init__(self, scale: float, window: int = 1000) -> None:
        self.scale, self.window, self.good = scale, window, 0

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good >= self.window:
            self.scale, self.good = self.scale * 2, 0


def trace_of(
    steps: int,
    *,
    nan_from: int | None = None,
    overflow: object = None,
    scaler: Scaler | None = None,
    scale: float | None = None,
    norm: object = None,
    loss: object = None,
) -> Trace:
    rng = random.Random(0)
    trace = Trace()
    for step in range(1, steps + 1):
        value = loss(step) if callable(loss) else falling_loss(step, rng)
        if nan_from is not None and step >= nan_from:
            value = NAN
        found = bool(overflow(step)) if callable(overflow) else value != value
        used = scaler.scale if scaler is not None else scale
        trace.step(
            loss=value,
            loss_scale=used,
            overflow=found if (overflow is not None or used is not None) else None,
            grad_norm=norm(step, used) if callable(norm) else None,
        )
        if scaler is not None:
            scaler.update(found)
    return trace


# --- NaN that stays ---


def test_loss_nan_before_scale_moved() -> None:
    found = trace_of(200, nan_from=120, scaler=Scaler(65536.0)).diagnose()
    assert slugs(found) == ["loss-nan-before-scale-moved"]
    assert found.findings[0].first_step == 120


def test_scale_that_fell_before_the_nan_is_another_story() -> None:
    # Overflow in every step from 100 on, the loss NaN only from 115 on: the scale had moved long before.
    found = trace_of(200, nan_from=115, overflow=lambda s: s >= 100, scaler=Scaler(65536.0)).diagnose()
    assert "loss-nan-before-scale-moved" not in slugs(found)
    assert slugs(found)


def test_two_nan_losses_that_recover_are_no_permanent_nan() -> None:
    found = trace_of(300, loss=lambda s: NAN if s in (100, 101) else 2.0, scaler=Scaler(4096.0)).diagnose()
    assert slugs(found) == []


def test_update_applied_on_overflow_at_a_static_scale() -> None:
    found = trace_of(200, nan_from=101, overflow=lambda s: s >= 100, scale=1024.0).diagnose()
    assert slugs(found) == ["update-applied-on-overflow-static-scale"]
    assert found.findings[0].first_step == 100


def test_an_overflow_long_before_the_nan_did_not_cause_it() -> None:
    found = trace_of(300, nan_from=250, overflow=lambda s: s == 20 or s >= 250, scale=1024.0).diagnose()
    assert "update-applied-on-overflow-static-scale" not in slugs(found)


def test_nan_without_a_guard() -> None:
    found = trace_of(200, nan_from=120, overflow=lambda s: False, scale=1.0).diagnose()
    assert slugs(found) == ["nan-updates-not-skipped"]


def test_nan_of_unknown_origin() -> None:
    found = trace_of(200, nan_from=120).diagnose()
    assert slugs(found) == ["nan-permanent-params-corrupted"]
    assert trace_of(120, nan_from=121).diagnose().ok


def test_one_last_nan_is_said_with_little_confidence() -> None:
    found = trace_of(120, nan_from=120).diagnose()
    assert [(f.slug, f.confidence) for f in found.findings] == [("loss-nan-cause-unknown", "low")]


def test_nan_in_some_steps_that_recover() -> None:
    rng = random.Random(6)
    bad = set(rng.sample(range(20, 390), 12))
    found = trace_of(400, loss=lambda s: NAN if s in bad else 2.0).diagnose()
    assert slugs(found) == ["loss-nan-in-some-steps"]
    assert trace_of(400, loss=lambda s: NAN if s in (50, 200, 300) else 2.0).diagnose().ok


def test_nan_in_the_first_step() -> None:
    found = trace_of(60, nan_from=1).diagnose()
    assert slugs(found) == ["forward-overflow-scale-independent"]


def test_nan_after_resume() -> None:
    trace = trace_of(100)
    trace.resumed()
    for _ in range(20):
        trace.step(loss=NAN)
    assert slugs(trace.diagnose()) == ["nan-from-first-step-after-resume"]


def test_weights_loaded_for_fine_tuning_are_no_resume() -> None:
    lines = ["Load checkpoint from ./pretrained.ckpt"]
    scale = 2.0**16
    for step in range(1, 60):
        lines.append(f"time: 1, epoch: 1, step: {step}, loss: nan, overflow: True, loss_scale: {scale}")
        scale = max(scale / 2, 1.0)
    assert slugs(log(lines)) == ["overflow-at-every-scale-from-step-1"]


def test_nan_some_steps_after_a_resume_is_not_the_checkpoint() -> None:
    trace = trace_of(100)
    trace.resumed()
    for step in range(40):
        trace.step(loss=NAN if step > 5 else 2.0)
    assert "nan-from-first-step-after-resume" not in slugs(trace.diagnose())


def test_scale_collapse_with_an_error_at_its_end() -> None:
    lines = [f"eta: 1:00:00  iter: {20 * i}  loss: {3 - i / 10:.4f} (2.5)  lr: 0.01" for i in range(1, 9)]
    scale = 32768.0
    for i in range(9, 13):
        for _ in range(20):
            lines.append(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}")
            scale /= 2
        lines.append(f"eta: 1:00:00  iter: {20 * i}  loss: nan (nan)  lr: 0.01")
    found = log([*lines, "ZeroDivisionError: float division by zero"])
    assert slugs(found) == ["scale-collapse-loss-already-nan"]
    assert "last finite one was logged at step 160" in found.findings[0].sentence


def test_saved_checkpoints_are_told() -> None:
    lines = [f"epoch: 1 step: {i}, loss is {2.0 if i < 30 else NAN}" for i in range(1, 60)]
    found = log([*lines, "Saving model to ./a.ckpt"])
    assert found.findings[0].consequences == ("1 checkpoint(s) were saved after it (first at line 60); they hold NaN.",)


def test_the_part_of_the_loss_that_is_nan_is_named() -> None:
    lines = [
        f"Epoch 1/3, Step {i}/500, imgsize (640, 640), loss: {'nan' if i > 30 else 3.0}, lbox: 1.0, lobj: "
        f"{'nan' if i > 30 else 1.0}, lcls: 0.5, cur_lr: 0.1"
        for i in range(1, 60)
    ]
    assert log(lines).findings[0].where == "lobj"


# --- divergence ---


def climbing(step: int) -> float:
    rng = random.Random(step)
    return falling_loss(step, rng) if step < 100 else falling_loss(100, rng) * 1.06 ** (step - 100)


def test_divergence_before_nan_and_without_one() -> None:
    found = trace_of(200, nan_from=180, loss=climbing).diagnose()
    assert slugs(found) == ["divergence-learning-rate"]
    assert 85 <= (found.findings[0].first_step or 0) <= 112
    assert slugs(trace_of(180, loss=climbing).diagnose()) == ["divergence-learning-rate"]


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.4])
def test_noise_is_no_divergence(noise: float) -> None:
    rng = random.Random(3)
    assert trace_of(400, loss=lambda s: 2.0 * (1 + abs(rng.gauss(0, noise)))).diagnose().ok


def test_a_loss_that_goes_back_to_where_it_began() -> None:
    found = trace_of(400, loss=lambda s: 10.5 * math.exp(-s / 60) + 2.5 if s < 250 else 7.4 + 0.1 * (s % 3)).diagnose()
    assert slugs(found) == ["divergence-learning-rate"]


def test_a_warm_restart_of_the_rate_is_no_divergence() -> None:
    def loss(step: int) -> float:
        return 2.0 + 5.0 * math.exp(-step / 40) + (1.2 * math.exp(-(step - 250) / 40) if step >= 250 else 0.0)

    assert trace_of(300, loss=loss).diagnose().ok


def test_a_plateau_a_little_above_the_best_is_no_divergence() -> None:
    assert trace_of(400, loss=lambda s: 2.0 if s < 200 else 2.3).diagnose().ok


def test_a_spike_that_heals_is_a_note() -> None:
    found = trace_of(300, loss=lambda s: 12.0 if 150 <= s < 153 else 2.0 + 0.01 * (s % 7)).diagnose()
    assert found.ok
    assert [f.slug for f in found.findings] == ["loss-spike-recovered"]


# --- overflow ---


def test_overflow_whatever_the_scale() -> None:
    found = trace_of(200, overflow=lambda s: s >= 100, scaler=Scaler(65536.0)).diagnose()
    assert slugs(found) == ["forward-overflow-scale-independent"]


def test_overflows_that_end_are_no_finding() -> None:
    assert trace_of(300, overflow=lambda s: 100 <= s < 106, scaler=Scaler(65536.0)).diagnose().ok


def test_a_late_search_that_is_still_going_on_is_no_finding() -> None:
    assert trace_of(104, overflow=lambda s: s >= 100, scaler=Scaler(65536.0)).diagnose().ok


def test_overflow_from_the_first_step_at_every_scale() -> None:
    found = trace_of(40, overflow=lambda s: True, scaler=Scaler(2.0**24)).diagnose()
    assert slugs(found) == ["overflow-at-every-scale-from-step-1"]


@pytest.mark.parametrize("power", [16, 24, 32])
def test_a_search_for_the_first_scale_is_no_finding(power: int) -> None:
    scaler = Scaler(2.0**power)
    trace = Trace()
    for _ in range(200):
        found = scaler.scale > 2.0**11
        trace.step(loss=2.0, loss_scale=scaler.scale, overflow=found)
        scaler.update(found)
    assert trace.diagnose().ok


def test_a_search_cut_off_in_the_middle_is_no_finding() -> None:
    assert trace_of(9, overflow=lambda s: True, scaler=Scaler(2.0**24)).diagnose().ok


def test_every_update_dropped() -> None:
    found = trace_of(60, overflow=lambda s: True, scale=65536.0, loss=lambda s: 6.9).diagnose()
    assert slugs(found) == ["every-update-dropped"]
    warning = "WARNING - `global_step` of optimizer is less than 1. It seems to be a overflow at the first step."
    step = "INFO - Epoch: [1/9], batch: [{}/900], loss: 6.9{}, lr: 0.000001, time: 6.08s"
    lines = [line for i in range(1, 20) for line in (warning, step.format(i, i % 7))]
    assert slugs(log(lines)) == ["every-update-dropped"]
    # The warning at the first steps only is what a scale search looks like.
    lines = [line for i in range(1, 60) for line in (*([warning] if i < 7 else []), step.format(i, i % 7))]
    assert log(lines).ok


def windowed(window: int, top: float = 2.0**16) -> Trace:
    scaler = Scaler(top / 2, window)
    trace = Trace()
    for step in range(1, 1500):
        found = scaler.scale > top / 2
        trace.step(loss=2.0 + 0.1 * (step % 5), loss_scale=scaler.scale, overflow=found)
        scaler.update(found)
    return trace


@pytest.mark.parametrize("window", [8, 16, 30, 40])
def test_window_too_short(window: int) -> None:
    assert slugs(windowed(window).diagnose()) == ["scale-oscillates-window-too-short"]


@pytest.mark.parametrize("window", [100, 200, 500])
def test_normal_growth_is_no_finding(window: int) -> None:
    assert windowed(window).diagnose().findings == ()


def test_static_scale_that_overflows_often() -> None:
    rng = random.Random(8)
    bad = {step for step in range(400) if rng.random() < 0.08}
    found = trace_of(400, overflow=lambda s: s in bad, scale=65536.0, loss=lambda s: 2.0).diagnose()
    assert slugs(found) == ["overflow-frequent"]
    bad = set(range(0, 400, 60))
    assert trace_of(400, overflow=lambda s: s in bad, scale=65536.0, loss=lambda s: 2.0).diagnose().ok


def test_updates_applied_without_harm_so_far() -> None:
    step = "Epoch 1/30, Step {}/1600, imgsize (640, 640), loss: 3.{}, lbox: 1.0, cur_lr: 0.1"
    warning = "[WARNING] overflow, still update, loss scale adjust to 1024.0"
    few = [line for i in range(1, 60) for line in ([warning] if i == 30 else []) + [step.format(i, i % 10)]]
    assert [(f.slug, f.severity) for f in log(few).findings] == [("updates-applied-on-overflow", "note")]
    many = [line for i in range(1, 60) for line in ([warning] if i % 20 == 0 else []) + [step.format(i, i % 10)]]
    more = [line for i in range(1, 60) for line in ([warning] if i % 9 == 0 else []) + [step.format(i, i % 10)]]
    assert [f.severity for f in log(many).findings] == ["note"]
    assert slugs(log(more)) == ["updates-applied-on-overflow"]


# --- scale ---


def test_scale_below_one() -> None:
    def run(low: float) -> Diagnosis:
        scaler = Scaler(64.0)
        trace = Trace()
        for _ in range(120):
            found = scaler.scale > low
            trace.step(loss=2.0, loss_scale=scaler.scale, overflow=found)
            scaler.good = 0
            if found:
                scaler.scale /= 2
        return trace.diagnose()

    assert slugs(run(0.25)) == ["scale-below-one"]
    assert run(1.0).ok


def test_scale_never_grows_again() -> None:
    def run(steps: int, low: float, *, grow_at: int | None = None) -> Diagnosis:
        trace = Trace()
        scale = 2.0**16
        for step in range(1, steps + 1):
            found = step in range(100, 200) and scale > low
            trace.step(loss=2.0, loss_scale=scale, overflow=found)
            if found:
                scale /= 2
            if step == grow_at:
                scale *= 2
        return trace.diagnose()

    assert slugs(run(6000, 8.0)) == ["scale-never-grows"]
    assert run(2000, 8.0).ok, "a usual window may be 2000 clean steps"
    assert run(3000, 64.0).ok, "at such a scale two windows are waited for"
    assert run(6000, 2.0**14).ok, "at such a scale nothing is lost"
    assert run(6000, 8.0, grow_at=2500).ok


def test_unused_headroom() -> None:
    def run(norm: float, scale: float) -> Diagnosis:
        rng = random.Random(1)
        return trace_of(100, scale=scale, norm=lambda s, used: norm * (1 + rng.random())).diagnose()

    assert slugs(run(1e-4, 8.0)) == ["scale-too-low-headroom"]
    assert run(1.0, 128.0).ok
    assert run(1e-4, 1.0).ok, "a scale of 1 throughout is how tools print that there is no scaler"


def test_grad_norm_that_follows_the_scale() -> None:
    def run(follows: bool, steps: int = 700) -> Diagnosis:
        rng = random.Random(2)
        return trace_of(
            steps,
            scaler=Scaler(1024.0, 150),
            norm=lambda s, used: (0.8 * (used if follows else 1024.0)) * math.exp(rng.gauss(0, 0.2)),
        ).diagnose()

    assert slugs(run(True)) == ["grad-norm-proportional-to-loss-scale"]
    assert run(False).ok


def test_a_norm_that_falls_with_the_training_does_not_follow_the_scale() -> None:
    rng = random.Random(4)
    found = trace_of(
        700, scaler=Scaler(1024.0, 150), norm=lambda s, used: 900 * math.exp(-s / 200) * math.exp(rng.gauss(0, 0.2))
    ).diagnose()
    assert found.ok


# --- state ---


def resumed(restored: bool) -> Diagnosis:
    trace = Trace()
    scaler = Scaler(2.0**24, 2000)
    for part in range(2):
        if part:
            trace.resumed()
            if not restored:
                scaler = Scaler(2.0**24, 2000)
        for _ in range(200):
            found = scaler.scale > 2.0**14
            trace.step(loss=2.0, loss_scale=scaler.scale, overflow=found)
            scaler.update(found)
    return trace.diagnose()


def test_scaler_state_not_restored() -> None:
    assert slugs(resumed(False)) == ["scaler-state-not-restored"]
    assert resumed(True).ok


def test_a_new_training_in_the_same_file_has_no_state_to_restore() -> None:
    lines = []
    for _ in range(2):
        scaler = Scaler(2.0**24, 2000)
        for step in range(1, 200):
            found = scaler.scale > 2.0**14
            lines.append(f"time: 1, epoch: 1, step: {step}, loss: 2.0, overflow: {found}, loss_scale: {scaler.scale}")
            scaler.update(found)
    assert log(lines).ok


def test_resumed_log_alone() -> None:
    lines = ["Resume training from checkpoint ./out/net-5000.ckpt"]
    scaler = Scaler(2.0**24, 2000)
    for step in range(5001, 5200):
        found = scaler.scale > 2.0**14
        lines.append(f"time: 1, epoch: 1, step: {step}, loss: 2.0, overflow: {found}, loss_scale: {scaler.scale}")
        scaler.update(found)
    assert slugs(log(lines)) == ["scaler-state-not-restored"]


def test_ranks_with_different_scales() -> None:
    line = "local_rank: {}, epoch: 0, step: {}, loss is 2.5, overflow is False, loss scale is {}"
    apart = [
        line.format(rank, step, 1024.0 * (2 if rank and step > 20 else 1)) for step in range(60) for rank in (0, 1)
    ]
    assert slugs(log(apart)) == ["loss-scale-not-synchronised"]
    same = [line.format(rank, step, 1024.0 * (2 if step > 20 else 1)) for step in range(60) for rank in (0, 1)]
    assert log(same).ok


# --- zero ---


def test_zero_from_the_first_step() -> None:
    assert slugs(log([hf(0.0, "nan")] * 20)) == ["loss-0-means-nan-filtered"]
    found = trace_of(30, loss=lambda s: 0.0, norm=lambda s, used: 0.0, scale=1024.0).diagnose()
    assert slugs(found) == ["loss-denominator-overflow-loss-zero"]
    assert trace_of(30, loss=lambda s: 0.0, norm=lambda s, used: 1.0, scale=1024.0).diagnose().ok


def hf(loss: float, norm: str, rate: float = 1e-5) -> str:
    return f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': {rate}, 'epoch': 0.1}}"


def test_zero_loss_of_a_filtering_logger() -> None:
    good = [hf(2.0 - i / 50, "1.2", 1e-5 + i * 1e-7) for i in range(20)]
    assert slugs(log([*good, *[hf(0.0, "nan")] * 10])) == ["loss-0-means-nan-filtered"]
    bare = [
        f"{{'loss': {v}, 'learning_rate': 1e-05, 'epoch': 0.1}}" for v in [2.0 - i / 50 for i in range(20)] + [0.0] * 9
    ]
    assert slugs(log(bare)) == ["loss-0-means-nan-filtered"]
    assert log(good).ok


def test_a_loss_that_comes_down_to_zero_is_none() -> None:
    lines = [hf(round(2.0 * 0.6**i, 4), f"{0.9 * 0.7**i:.6f}") for i in range(40)]
    assert log(lines).ok


def test_loss_and_gradient_zero() -> None:
    trace = trace_of(
        200, loss=lambda s: 0.0 if s > 100 else 2.0, norm=lambda s, used: 0.0 if s > 100 else 1.0, scale=1024.0
    )
    assert slugs(trace.diagnose()) == ["loss-denominator-overflow-loss-zero"]
    trace = trace_of(200, loss=lambda s: 0.0 if s > 100 else 2.0, norm=lambda s, used: 1.0, scale=1024.0)
    assert "loss-denominator-overflow-loss-zero" not in slugs(trace.diagnose())


# --- periodic ---


def epochs(length: int, bad: object) -> list[str]:
    return [
        f"epoch {epoch}, step {step}, lr 0.00001, loss {'nan' if bad(epoch, step) else 0.5}, loss scale "
        "4096, "  # type: ignore[operator]
        "global_step 1"
        for epoch in range(1, 7)
        for step in range(1, length + 1)
    ]


def test_same_batch_of_each_epoch() -> None:
    found = log([line.replace(", global_step 1", "") for line in epochs(40, lambda e, s: s == 23)])
    assert slugs(found) == ["periodic-nan-same-batch"]
    assert found.findings[0].where == "step 23 of the epoch"


def test_nan_at_other_places_is_not_one_batch() -> None:
    rng = random.Random(5)
    places = {epoch: rng.randrange(1, 40) for epoch in range(1, 7)}
    found = log([line.replace(", global_step 1", "") for line in epochs(40, lambda e, s: s == places[e])])
    assert "periodic-nan-same-batch" not in slugs(found)


def test_the_rhythm_of_growth_is_no_batch() -> None:
    # A window as long as the epoch: the overflow comes at the same place of each, right after the scale grew.
    lines = []
    scaler = Scaler(2.0**15, 199)
    for epoch in range(1, 9):
        for step in range(1, 201):
            found = scaler.scale > 2.0**15
            lines.append(
                f"epoch: [{epoch}/99] step: [{step}/200], lr: 0.1, loss: 2.0, overflow: {found}, scale: "
                f"{int(scaler.scale)}, a"
            )
            scaler.update(found)
    assert log(lines).ok


def test_a_scale_that_jumps_back_to_its_beginning_without_a_word() -> None:
    trace = Trace()
    scale = 2.0**24
    for step in range(1, 500):
        if step == 300:
            scale = 2.0**24  # started again, and nothing says so
        overflow = scale > 2.0**15
        trace.step(loss=2.0, loss_scale=scale, overflow=overflow, grad_norm=1.0)
        scale = scale / 2 if overflow else scale
    found = trace.diagnose().findings
    assert found[0].slug == "scaler-state-not-restored"
    assert found[0].first_step == 300


def test_growth_by_doubling_is_no_restart() -> None:
    trace = Trace()
    scale = 2.0**10
    for step in range(1, 2000):
        trace.step(loss=2.0, loss_scale=scale, overflow=False, grad_norm=0.1)
        scale = scale * 2 if step % 100 == 0 and scale < 2.0**14 else scale
    assert trace.diagnose().ok


def test_growth_to_the_first_scale_is_no_restart() -> None:
    trace = Trace()
    scale, clean = 2.0**16, 0
    for step in range(1, 400):
        overflow = scale > 2.0**15
        trace.step(loss=3.0 - step * 0.001, loss_scale=scale, overflow=overflow, grad_norm=0.5)
        clean = 0 if overflow else clean + 1
        scale = scale / 2 if overflow else scale * 2 if clean % 20 == 0 else scale
    slugs = [finding.slug for finding in trace.diagnose().findings]
    assert "scaler-state-not-restored" not in slugs
    assert slugs[0] == "scale-oscillates-window-too-short"
