"""Logs so long that plain lines are only counted: what is kept of them, and what is counted, is still right.

Reading cost is what these logs are about (``benchmarks/logs.py``); here it is shown that nothing is lost for it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable

import pytest

from ampdebug.logs import read_log
from ampdebug.rules import History

STEPS = 36_000
# Every second plain line is kept from 30,000 on, so each kind of event comes at odd and at even places.
BAD = frozenset((35_001, 35_003))  # the loss is NaN
OVERFLOWS = frozenset((20_000, 33_333, 33_335, *BAD))
OTHER_KEY = frozenset((34_000, 34_001))


def loss(step: int) -> float:
    """As printed."""
    return math.nan if step in BAD else 2.0 + step % 97 / 100


def mindone(step: int) -> str:
    missed = sum(overflow < step + 1 for overflow in OVERFLOWS)
    return (
        f"[2024-05-10] INFO: epoch {step}, step 1, lr 0.0000100, loss {loss(step):.6f}, loss scale 4096, global_step "
        f"{step - missed}, step_time(ms) 817.8"
    )


def megatron(step: int) -> str:
    text = "" if step in BAD else f"lm loss: {loss(step):.6E} | "
    skipped = step in OVERFLOWS and step not in BAD
    return (
        f" [2025-01-02] iteration {step:8d}/ 8000000 | elapsed time per iteration (ms): 812.4 | {text}loss scale: "
        f"65536.0 | grad norm: 1.021 | number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
    )


def bar(step: int) -> str:
    text = f"Steps:  25%|█████     | {step}/90000 [00:05<2:01:07,  5.02s/it, lr=1e-5, step_loss={loss(step):.3f}]"
    first = text if step in BAD else text.replace(f"{loss(step):.3f}", "9.999")
    return first + "\r" + text  # drawn again: the last print counts


def keras(step: int) -> str:
    return f"{(step - 1) % 500 + 1:4d}/500 [==>.....] - ETA: 10s - loss: {loss(step):.4f} - accuracy: 0.1123"


def generic(step: int) -> str:
    flag = float(step in OVERFLOWS)
    epoch, within = divmod(step - 1, 100)
    return f"Epoch {epoch + 1} | Loss {loss(step):.4f} | Step {within + 1} | found_inf={flag} | Scale 4096.0"


def json_line(step: int) -> str:
    values = {
        "train/global_step": step,
        "train/loss": loss(step),
        "train/overflow": step in OVERFLOWS,
        "lr_1": 0.5,
    }  # only lr_0 is a learning rate
    key = "lr_2" if step in OTHER_KEY else "lr_0"
    return json.dumps({**values, key: 0.25, "train/loss_scale": 1024.0, "epoch": step / 7})


def ranked(step: int) -> str:
    flag = step in OVERFLOWS
    return f"[rank0]: rank_0 epoch 1 step {step}, loss is {loss(step)}, scale sense is 1024.0, overflow is {flag}"


def table(step: int) -> str:
    head = "epoch,step,train_loss,overflow,val_loss\n" if step == 1 else ""
    return f"{head}{step // 100}.5,{step},{loss(step):.4f},{step in OVERFLOWS},"


FORMATS: tuple[Callable[[int], str], ...] = (mindone, megatron, bar, keras, generic, json_line, ranked, table)


def read(text: str) -> History:
    return read_log(io.BytesIO(text.encode()))[0]


@pytest.mark.parametrize("line", FORMATS, ids=lambda line: line.__name__)
def test_a_long_log(line: Callable[[int], str]) -> None:
    text = "\n".join(map(line, range(1, STEPS + 1))) + "\n"
    history, coverage = read_log(io.BytesIO(text.encode()))
    assert not history.exact
    lines = text.encode().split(b"\n")
    totals = history.totals
    assert (totals.records, totals.logged, totals.losses, totals.bad_losses) == (STEPS, STEPS, STEPS, len(BAD))
    assert (totals.first_step, totals.last_step) == (1, STEPS)
    assert coverage.lines == len(lines) - 1
    assert coverage.matched == STEPS * (2 if line is bar else 1)
    assert history.segment == 0
    for record in history.records:
        step = record.step.step
        assert record.line == step + (line is table)
        assert lines[record.line - 1].startswith(record.text)
        assert math.isclose(record.step.loss or 0.0, loss(step), abs_tol=1e-9) or (step in BAD and record.bad_loss)
    kept = {record.step.step: record for record in history.records}
    assert {step - back for step in BAD for back in (0, 1)} <= kept.keys()
    if totals.overflow_known:
        assert totals.overflow_known == STEPS
        overflows = OVERFLOWS - BAD if line is megatron else OVERFLOWS
        assert {step for step, record in kept.items() if record.step.overflow} == overflows
        assert totals.overflows == len(overflows)
    if line is mindone:
        assert {step for step, record in kept.items() if record.step.update_skipped} == OVERFLOWS & kept.keys()
    if line is json_line:
        for record in history.records:
            assert record.step.learning_rate == (None if record.step.step in OTHER_KEY else 0.25)
    if line is ranked:
        assert {record.rank for record in history.records} == {0}


def test_lines_of_ranks_without_a_label_are_no_restarts() -> None:
    text = "".join(2 * f"epoch: 1 step: {step}, loss is 2.5\n" for step in range(1, STEPS))
    history = read(text)
    assert history.segment == 0
    assert history.totals.logged == STEPS - 1


@pytest.mark.parametrize("steps", [STEPS, STEPS + 1])
def test_a_rank_ahead_of_the_first_one_is_another_rank(steps: int) -> None:
    line = "[rank{}]: epoch 1, step {}, loss is 2.5\n"
    text = "".join(line.format(0, step) + line.format(1, step + 1) for step in range(1, steps))
    text += "".join(line.format(1, steps + more) for more in range(1, 9))
    totals = read(text).totals
    assert (totals.logged, totals.last_step) == (steps - 1, steps - 1)


def test_the_step_before_a_restart_is_of_the_segment_before() -> None:
    line = "iter {}: loss 2.5000, time 312.40ms, mfu 31.20%\n"
    text = "".join(line.format(step) for step in range(STEPS)) + "".join(line.format(step) for step in range(90, 120))
    history = read(text.replace("iter 90: loss 2.5000", "iter 90: loss nan"))
    segments = [(record.segment, record.step.step) for record in history.records]
    assert segments == sorted(segments)
    assert (0, STEPS) in segments
    assert (1, 91) in segments


LINE = "epoch: [1/285] step: [{}/90000], lr: 0.1, loss: 2.5, overflow: False, scale: {}, avg step time: 3ms\n"


def test_every_change_of_the_scale_is_kept() -> None:
    text = "".join(LINE.format(step, 1024 << (step > 35_000) << (step > 35_003)) for step in range(1, STEPS))
    kept = [(record.step.step, record.scale) for record in read(text).records if record.remarkable]
    assert (35_001, 2048.0) in kept
    assert (35_004, 4096.0) in kept


def test_a_scale_that_a_message_moved_and_a_line_moved_back_is_seen() -> None:
    message = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0\n"
    after = (35_007, 35_009, 35_012)
    text = "".join(LINE.format(step, 1024) + (message if step in after else "") for step in range(1, STEPS))
    records = read(text).records
    places = [(record.step.step, record.between, record.scale) for record in records]
    for step in after:
        assert (step, False, 1024.0) in places
        at = places.index((step, True, 512.0)) + 1
        assert places[at] == (step + 1, False, 1024.0)
        assert records[at].remarkable


def test_epochs_that_fall_without_end() -> None:
    history = read("".join(f"Epoch {epoch} | Step 3 | Loss 2.5\n" for epoch in range(12_000, 0, -1)))
    assert history.totals.logged > 0


def test_lines_that_are_all_unlike_are_read_with_bounded_memory() -> None:
    lines = [f"iter {i}: loss 2.5{'0' * (i % 4000)}, time 3ms {'-' * (i // 4000)}\n" for i in range(12_000)]
    assert read("".join(lines)).totals.logged == 12_000
