"""Rules about a loss scale that is too low: never raised again, below one, or with unused range."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from ampdebug.rules._facts import Facts, octaves
from ampdebug.rules._finding import Finding, power, rows
from ampdebug.rules._history import Record

FLOAT16_MAX = 65504.0
LONGEST_USUAL_WINDOW = 2000
"""Growth windows in use are 100 to 2000 clean steps (PyTorch and apex 2000, MindSpore 1000-2000, DeepSpeed 1000)."""


def _last_change(facts: Facts) -> tuple[Record, Record] | None:
    """The last two neighbouring records between which the scale changed."""
    scaled = facts.scaled
    for before, after in zip(reversed(scaled[:-1]), reversed(scaled[1:]), strict=False):
        if before.scale != after.scale:
            return before, after
    return None


def never_grows(facts: Facts) -> Iterator[Finding]:
    """The scale fell far below what once worked, and thousands of clean steps later it is still there."""
    if facts.onset is not None or not facts.dynamic or facts.falling:
        return
    change = _last_change(facts)
    if change is None or facts.history.counts_lines:
        return
    before, after = change
    low = facts.scales[-1]
    if low <= 0 or (before.scale or 0.0) < low:
        return  # it grew last, so it can grow
    last = facts.history.totals.last_step or 0
    clean = last - max(after.step.step, facts.overflows[-1].step.step if facts.overflows else 0)
    windows = _growth_windows(facts)
    window = statistics.median(windows) if windows else None
    worked = [r.scale for r in facts.clean if r.scale is not None and r.segment == after.segment]
    high = max(worked, default=low)
    # At 16 and below small gradients are surely lost, so that one window of the longest usual kind is enough.
    longest = 1.05 * LONGEST_USUAL_WINDOW if low <= 16 else 2 * LONGEST_USUAL_WINDOW
    patience = max(3 * window, 200) if window is not None else longest
    # Where no growth was ever seen the scale must also be low enough to cost something.
    if low <= 16 and window is None:
        high = max(facts.scales)  # so low a scale is to be tried higher now and then, whatever worked before
    if clean < patience or (window is None and low > 128) or octaves(high, low) < 2:
        return
    yield Finding(
        "scale-never-grows",
        f"The loss scale fell from {power(high)} to {power(low)} by step {after.step.step} and has not grown since, "
        f"over {clean} steps without overflow: small gradients are flushed to zero for no reason.",
        "warning",
        "high" if window is not None else "medium",
        f"earlier it grew after about {window:.0f} clean steps"
        if window is not None
        else f"usual growth windows are at most {LONGEST_USUAL_WINDOW} clean steps",
        after.step.step,
        last,
        "",
        rows([before, after, facts.scaled[-1]]),
        "Check the growth window (scale_window / growth_interval 1000-2000) and that the scaler's adjust/update is "
        "called in every step, not only on overflow.",
        "ampdebug.AMPMonitor: it shows the share of gradients flushed at this scale",
        (),
        ("scale-too-low-headroom", "scale-below-one"),
    )


def _growth_windows(facts: Facts) -> list[int]:
    """Clean steps from one change of the scale to the next growth."""
    result = []
    last_change: Record | None = None
    previous: Record | None = None
    for record in facts.scaled:
        if previous is not None and record.scale != previous.scale and record.segment == previous.segment:
            if (record.scale or 0) > (previous.scale or 0) and last_change is not None:
                result.append(record.step.step - last_change.step.step)
            last_change = record
        elif record.bad_gradient:
            last_change = record
        previous = record
    return [w for w in result if w > 0]


def headroom(facts: Facts) -> Iterator[Finding]:
    """Bits between the largest scaled gradient there can be and the end of float16's range that are never used."""
    if facts.onset is not None or not facts.scales:
        return
    if facts.history.facts.get("bfloat16") or facts.history.facts.get("level") == "O0":
        return
    if set(facts.scales) == {1.0} and not facts.history.facts.get("level"):
        return  # a scale of 1 throughout is how tools print "no scaler"
    tail = [
        r
        for r in facts.logged[-2000:]
        if r.scale and r.step.grad_norm is not None and math.isfinite(r.step.grad_norm) and r.step.grad_norm > 0
    ]
    if len(tail) < 20:
        return
    # No element is larger than the norm, so the norm bounds the largest scaled gradient from above.
    top = math.log2(FLOAT16_MAX)
    bits = [top - math.log2(r.step.grad_norm) - math.log2(r.scale) for r in tail if r.step.grad_norm and r.scale]
    spare = min(bits)
    if spare < 20 or statistics.median(bits) < 22:
        return
    recent = facts.overflows and facts.overflows[-1].step.step > tail[0].step.step
    if recent:
        return
    scale = tail[-1].scale or 1.0
    better = 2.0 ** min(math.floor(math.log2(scale) + spare - 3), 127)
    yield Finding(
        "scale-too-low-headroom",
        f"At the loss scale {power(scale)} even the whole gradient norm leaves {spare:.0f} bits to the end of "
        "float16's range: small gradients are flushed to zero for no reason. The record supports a scale of "
        f"{power(better)}.",
        "warning",
        "medium",
        "computed from the printed gradient norm, which no gradient element exceeds",
        tail[0].step.step,
        tail[-1].step.step,
        "",
        rows([tail[0], tail[-1]]),
        f"Start with a loss scale of {better:g} (3 bits of reserve), or use a dynamic one.",
        "ampdebug.AMPMonitor: it shows the share of gradients flushed at this scale",
    )


def below_one(facts: Facts) -> Iterator[Finding]:
    """The scaler works at a scale below 1."""
    if facts.onset is not None or not facts.scales:
        return
    chain = facts.falling
    if len(chain) >= 6 and chain[-1].step.step - chain[0].step.step <= 2 * len(chain):
        return  # overflow in step after step is another matter
    low = [r for r in facts.scaled if r.scale is not None and 0 <= r.scale < 1]
    if len(low) < 5 or facts.scales[-1] >= 1:
        return
    lowest = min((r.scale for r in low if r.scale), default=0.0)
    shown = f"lowest {lowest:g}" if lowest else "printed without decimals, as 0"
    yield Finding(
        "scale-below-one",
        f"From step {low[0].step.step} on the loss scale is below 1 ({shown}): "
        "the loss is scaled down, which makes more gradients vanish, not fewer.",
        "warning",
        "medium",
        "the scale is printed in these steps and the training goes on",
        low[0].step.step,
        low[-1].step.step,
        "",
        rows([low[0], low[-1]]),
        "Set the scaler's minimum to 1 and find what overflows at a scale of 1: it is the forward pass, a loss that "
        "is summed instead of averaged, or gradients accumulated without dividing by their number.",
        "ampdebug.AMPMonitor over these steps",
    )
