"""Healthy kinds of loss that look like a fault, each with the fault beside it."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable

import pytest

from ampdebug._diagnose import Diagnosis, diagnose
from ampdebug.rules._climb import climb

NAN = math.nan


def log(lines: list[str]) -> Diagnosis:
    return diagnose(io.BytesIO("\n".join(lines).encode()))


def slugs(diagnosis: Diagnosis) -> list[str]:
    return [finding.slug for finding in diagnosis.findings if finding.severity != "note"]


def of(losses: list[float]) -> Diagnosis:
    return log([f"step {step}/100000 | loss {loss:.4f} | lr 0.000100" for step, loss in enumerate(losses, 1)])


# --- losses that climb ------------------------------------------------------------------------------------------------


def wandering(rng: random.Random, steps: int) -> list[float]:
    """As of a GAN's discriminator: it walks about its level, with a memory of ten steps."""
    value, result = 1.5, []
    for _ in range(steps):
        value = 1.5 + 0.9 * (value - 1.5) + rng.gauss(0, 0.15)
        result.append(abs(value) + 0.05)
    return result


def policy(rng: random.Random, steps: int) -> list[float]:
    return [rng.gauss(0, 0.05) for _ in range(steps)]


@pytest.mark.parametrize("kind", [wandering, policy])
def test_a_loss_that_wanders_is_no_divergence(kind: Callable[[random.Random, int], list[float]]) -> None:
    wrong = [seed for seed in range(40) if slugs(of(kind(random.Random(seed), 600)))]
    assert len(wrong) <= 1, wrong


def test_a_loss_that_wanders_and_then_diverges() -> None:
    losses = wandering(random.Random(1), 300) + [1.5 * 1.05**step for step in range(80)]
    assert slugs(of(losses)) == ["divergence-learning-rate"]


def likelihood(step: int) -> float:
    return 2.0 - 4.0 * (1 - math.exp(-step / 60))


def test_a_loss_below_zero() -> None:
    rng = random.Random(2)
    falling = [likelihood(step) + rng.gauss(0, 0.1) for step in range(300)]
    assert slugs(of(falling)) == []
    assert slugs(of(falling + [-2.0 + 0.4 * step for step in range(60)])) == ["divergence-learning-rate"]


def test_climb_says_where_it_began() -> None:
    found = climb([3.0 - 0.02 * i for i in range(50)] + [2.0 + 0.2 * i for i in range(40)], before_nan=False)
    assert found is not None
    assert 46 <= found[0] <= 54
    assert found[1] == pytest.approx(2.0, abs=0.1)
    assert climb([1.0, 2.0, 3.0], before_nan=True) is None


# --- losses of exactly 0 ----------------------------------------------------------------------------------------------


def test_a_loss_with_a_hinge_is_often_zero() -> None:
    rng = random.Random(3)
    assert slugs(of([max(0.0, rng.gauss(0.3 * math.exp(-step / 200), 0.15)) for step in range(300)])) == []
    one_in_ten = [0.0 if step % 10 == 7 else rng.gauss(3.0, 0.3) for step in range(300)]
    assert slugs(of(one_in_ten)) == ["loss-denominator-overflow-loss-zero"]


def test_the_last_mean_before_the_zeros_may_be_small() -> None:
    lines = [
        f"{{'loss': {v}, 'learning_rate': 1e-05, 'epoch': 0.1}}" for v in [2.01, 1.95, 2.03, 1.9, 0.12] + [0.0] * 9
    ]
    assert slugs(log(lines)) == ["loss-0-means-nan-filtered"]


def test_a_loss_of_a_few_printed_units_rounds_to_zero() -> None:
    rng = random.Random(4)
    assert slugs(of([abs(rng.gauss(0, 0.0002)) for _ in range(200)])) == []


def trainer(loss: float, norm: str) -> str:
    return f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 1e-06, 'epoch': 0.1}}"


def test_a_zero_loss_with_gradients_is_meant_to_be_zero() -> None:
    assert slugs(log([trainer(0.0, f"0.{20 + i}") for i in range(30)])) == []
    assert slugs(log([trainer(0.0, "nan")] * 30)) == ["loss-0-means-nan-filtered"]
    assert slugs(log([trainer(0.0, "0.0")] * 30)) == ["loss-denominator-overflow-loss-zero"]


# --- restarts ---------------------------------------------------------------------------------------------------------


def monitor(epoch: int, step: int, loss: float) -> str:
    return f"epoch: {epoch} step: {step}, loss is {loss}"


def test_a_checkpoint_loaded_just_before_the_first_nan() -> None:
    good = [monitor(1, step, 2.3 - step / 100) for step in range(1, 101)]
    bad = [monitor(2, step, NAN) for step in range(1, 60)]
    load = "[INFO] load checkpoint ./ckpt/net-1_100.ckpt"
    found = log([*good, load, *bad])
    assert slugs(found) == ["nan-from-first-step-after-resume"]
    assert [row.line for row in found.findings[0].evidence][:2] == [101, 100]
    # Loaded before the training, or some steps before the NaN, or again and again for an evaluation: nothing is known.
    assert slugs(log([load, *good, *bad])) == ["nan-permanent-params-corrupted"]
    assert slugs(log([*good[:90], load, *good[90:], *bad])) == ["nan-permanent-params-corrupted"]
    assert slugs(log([*good[:50], load, *good[50:], load, *bad])) == ["nan-permanent-params-corrupted"]


def arcface(step: int, loss: float, scale: float) -> str:
    return (
        f"Training: 2023-03-14 09:08:43,293-Speed 2178.40 samples/sec   Loss {loss:.4f}   LearningRate 0.001000   "
        f"Epoch: 0   Global Step: {step}   Fp16 Grad Scale: {scale:6.0f}   Required: 194 hours"
    )


def test_a_restart_that_nothing_tells_but_the_scale() -> None:
    before = [arcface(step, 40 - step / 200, 65536 if step < 100 else 1024) for step in range(20, 3000, 20)]
    jump = [arcface(step, 25.0, max(1024, 65536 / 2 ** ((step - 2980) // 20))) for step in range(3000, 5000, 20)]
    assert slugs(log([*before, *jump])) == ["scaler-state-not-restored"]
    # It stays where it jumped to: a scaler may be set anew by hand, and nothing is skipped for it.
    assert slugs(log([*before, *[arcface(step, 25.0, 65536) for step in range(3000, 5000, 20)]])) == []


# --- scales below one -------------------------------------------------------------------------------------------------


def test_a_scale_that_sinks_below_one_while_the_training_goes_on() -> None:
    lines, scale = [], 4.0
    for step in range(100, 3000, 100):
        if step % 200 == 0:
            scale /= 2
            lines.append(f"| WARNING: overflow detected, setting loss scale to: {scale}")
        lines.append(
            f"| epoch 001:   {step} / 13740 loss={14 - step / 500:.3f}, num_updates={step - step // 200}, lr=1e-06, "
            f"gnorm=3.901, loss_scale={scale:.3f}, wall=1061"
        )
    assert slugs(log(lines)) == ["scale-below-one"]


def test_a_scale_printed_as_zero_is_below_one() -> None:
    assert slugs(log([arcface(step, 45.0 + step % 3, 0.25) for step in range(20, 800, 20)])) == ["scale-below-one"]
    assert slugs(log([arcface(step, 45.0 + step % 3, 1.0) for step in range(20, 800, 20)])) == []


def low_scale(scale: float, steps: int) -> Diagnosis:
    lines = []
    for step in range(1, steps, 5):
        first = step < 20
        if first:
            lines.append(f"[2024-05-10 08:00:23] WARNING: overflow detected in epoch 1 step {step}")
        lines.append(
            f"[2024-05-10 08:00:23] INFO: epoch 1, step {step}, lr 0.00001, loss {0.5 + step % 7 / 100:.6f}, "
            f"loss scale {65536 if first else scale}, global_step {0 if first else step}, step_time(ms) 817.8"
        )
    return log(lines)


def test_a_scale_that_the_search_left_very_low_is_to_grow() -> None:
    assert slugs(low_scale(2, 4600)) == ["scale-never-grows"]
    assert slugs(low_scale(2, 2000)) == []  # within one growth window
    assert slugs(low_scale(1024, 4600)) == []  # the search found it, and it costs nothing


def swings(window: int, steps: int) -> list[tuple[int, float, float, bool]]:
    """``(step, scale used, scale after, overflow)``; 65536 is one halving too high."""
    rows, scale, clean = [], 32768.0, 0
    for step in range(steps):
        used, clean = scale, clean + 1
        if used >= 65536:
            scale, clean = used / 2, 0
        elif clean >= window:
            scale, clean = used * 2, 0
        rows.append((step, used, scale, used >= 65536))
    return rows


def swin(step: int, scale: float, overflow: bool) -> str:
    return (
        f"[2022-11-04 03:02:15 vit] (main.py 221): INFO Train: [{step // 1251}/300][{step % 1251}/1251]\teta 0:14:10 "
        f"lr 0.0005\t wd 0.0500\ttime 0.3468 (0.3500)\tloss {6.5 - step / 2000:.4f} (6.5)\t"
        f"grad_norm {math.inf if overflow else 1.1:.4f} (inf)\tloss_scale {scale:.4f} (40000.0)\tmem 9134MB"
    )


@pytest.mark.parametrize(("window", "expected"), [(32, ["scale-oscillates-window-too-short"]), (250, [])])
def test_epochs_that_are_no_multiple_of_the_interval(window: int, expected: list[str]) -> None:
    rows = [row for row in swings(window, 5000) if row[0] % 1251 % 10 == 0]
    assert slugs(log([swin(step, after, overflow) for step, _, after, overflow in rows])) == expected


# --- gradients and losses that say it without a scale -----------------------------------------------------------------


def test_a_norm_that_is_never_finite_beside_finite_losses() -> None:
    lines = [trainer(2.3 + i % 3 / 100, "nan") for i in range(40)]
    found = log(lines)
    assert slugs(found) == ["every-update-dropped"]
    assert "The learning rate stands still" in found.findings[0].sentence
    assert slugs(log([trainer(2.3 - i / 100, "1.5") for i in range(40)] + lines)) == ["every-update-dropped"]
    # The first steps are often skipped, and a few in a row are a scaler at work.
    healthy = [trainer(2.3 - i / 100, "nan" if i < 4 or 20 <= i < 24 else "1.5") for i in range(60)]
    assert slugs(log(healthy)) == []


def test_a_loss_at_the_largest_number_of_float16() -> None:
    found = of([900 - step for step in range(40)] + [65504.0] * 20)
    assert slugs(found) == ["values-pinned-at-fp16-max"]
    assert found.findings[0].first_step == 41
    assert slugs(of([9.0 - step / 20 for step in range(40)] + [4.0] * 20)) == []


# --- last words -------------------------------------------------------------------------------------------------------


def falling(steps: int) -> list[str]:
    return [f"iter {step}: loss {4 - step / 100:.4f}, time 312.40ms, mfu 31.20%" for step in range(steps)]


@pytest.mark.parametrize(
    "words",
    [
        "Loss is nan, stopping training",
        "FloatingPointError: Loss became infinite or NaN at iteration=101!",
        "ValueError: The loss returned in `training_step` is nan.",
        "AssertionError: Rank 0: found NaN in local forward loss calculation. Device: 0, node: host",
    ],
)
def test_the_nan_is_only_told_by_the_last_words(words: str) -> None:
    found = log([*falling(100), words, words])
    assert slugs(found) == ["nan-permanent-params-corrupted"]
    finding = found.findings[0]
    assert (finding.first_step, finding.confidence) == (101, "low")
    assert "or else the batch of this very step" in finding.sentence
    assert [row.line for row in finding.evidence] == [100, 101]


def test_gradients_that_end_the_program() -> None:
    words = "RuntimeError: Function 'SoftmaxBackward0' returned nan values in its 0th output."
    found = log([*falling(100), words])
    assert slugs(found) == ["gradients-nan-cause-unknown"]
    assert found.findings[0].where == "SoftmaxBackward0"
    megatron = "AssertionError: Rank 3: found NaN in local grad norm in backwards pass. Device: 3, node: host"
    assert slugs(log([*falling(100), megatron])) == ["gradients-nan-cause-unknown"]
    assert slugs(log(falling(100))) == []


def test_a_message_about_a_skipped_step_of_any_program() -> None:
    lines = []
    for step in range(1, 200):
        lines.append(f"step {step} | loss {4 - step / 100:.4f} | scale {65536 >> min(16, max(0, step - 150))}")
        if step >= 150:
            lines.append("[04/22/23 15:38:12] INFO     colossalai - colossalai - INFO: Found overflow. Skip step")
    assert slugs(log(lines)) == ["forward-overflow-scale-independent"]
