"""How a permanent NaN came about, as far as step records can tell: one word, on which the rules of ``nan.py`` agree.

A NaN that stays has many possible causes and each of them has its rule; deciding once keeps them from contradicting
each other.
"""

from __future__ import annotations

import math
from typing import Literal

from ampdebug.rules._facts import Facts, octaves
from ampdebug.rules._history import Record

Story = Literal[
    "none",
    "resume",
    "first-step",
    "overflow-from-start",
    "divergence",
    "applied",
    "not-guarded",
    "collapse",
    "before-scale",
    "permanent",
]


def nan_story(facts: Facts) -> Story:
    """Which of the stories fits the permanent NaN of this history, ``"none"`` where there is none."""
    onset = facts.onset
    if onset is None:
        return "none"
    if facts.resume_before_onset is not None:
        return "resume"
    if not facts.before:
        if facts.dynamic and facts.falling and not facts.clean:
            return "overflow-from-start"
        started = facts.history.totals.first_step
        if started is not None and started <= 2 * facts.interval and not facts.history.facts.get("cut"):
            return "first-step"
    if facts.rising is not None:
        return "divergence"
    if applied_before_onset(facts):
        return "applied"
    if not_guarded(facts):
        return "not-guarded"
    if scaler_reacts(facts):
        if facts.marks("zero-division") or facts.marks("scale-floor"):
            return "collapse"
        if scale_unmoved_at_onset(facts):
            return "before-scale"
        if fallen(facts) >= 3:
            return "collapse"
    return "permanent"


def applied_before_onset(facts: Facts) -> list[Record]:
    """Overflows before the permanent NaN whose update was made: said so, or to be concluded from a static scale."""
    onset = facts.onset
    if onset is None:
        return []
    end = facts.place(onset)
    earlier = [r for r in facts.overflows if facts.place(r) <= end and r.segment == onset.segment]
    said = [r for r in earlier if r.applied]
    if said:
        return said
    if not facts.static or any(r.step.update_skipped for r in earlier):
        return []
    # The overflow came first, with a finite loss, at a scale that stayed as it was; then the weights were NaN.
    finite = [r for r in earlier if not r.bad_loss and r.step.loss is not None]
    near = [r for r in finite if onset.step.step - r.step.step <= 3 * facts.interval]
    return finite if near else []


def not_guarded(facts: Facts) -> list[Record]:
    """Records of the NaN tail that say that no overflow was seen or that an update was made."""
    return [
        r
        for r in facts.tail
        if r.bad_loss and (r.step.overflow is False or r.step.update_skipped is False) and not r.applied
    ]


def scaler_reacts(facts: Facts) -> bool:
    """There is a scaler, and it saw overflow in the NaN tail."""
    return any(r.step.overflow for r in facts.tail) or _moved_in_tail(facts)


def _moved_in_tail(facts: Facts) -> bool:
    scales = {r.scale for r in facts.tail if r.scale is not None}
    good = facts.last_good
    if good is not None and good.scale is not None:
        scales.add(good.scale)
    return len(scales) > 1


def fallen(facts: Facts) -> float:
    """Halvings from the last scale before the trouble to the lowest one in the NaN tail."""
    onset, good = facts.onset, facts.last_good
    if onset is None:
        return 0.0
    start = facts.place(good) if good is not None else 0
    scales = [r.scale for r in facts.records[start:] if r.scale is not None and r.segment == onset.segment]
    before = [r.scale for r in facts.records[: start + 1] if r.scale is not None and r.segment == onset.segment]
    if not scales:
        return 0.0
    high = before[-1] if before else scales[0]
    if high is None:
        return 0.0
    return max(0.0, octaves(high, min(scales)))


def scale_unmoved_at_onset(facts: Facts) -> bool:
    """When the loss was first NaN the scale was still what it had been: the NaN is no work of the scale.

    A tool that prints the scale after the update shows one halving already in the step of the first NaN.
    """
    onset, good = facts.onset, facts.last_good
    if onset is None or facts.static:
        return False
    end = facts.place(onset)
    start = facts.place(good) + 1 if good is not None else 0
    between = [r for r in facts.records[start:end] if r.bad_gradient and r.segment == onset.segment]
    # Overflows in good steps just before: the scaler was at work before the loss went.
    recent = [
        r
        for r in facts.overflows
        if r.segment == onset.segment and facts.place(r) < start and onset.step.step - r.step.step <= 2 * facts.interval
    ]
    before = [r.scale for r in facts.records[:start] if r.scale is not None and r.segment == onset.segment]
    at = onset.scale
    if at is None and between:
        at = between[-1].scale
    if at is None:
        after = [r.scale for r in facts.tail if r.scale is not None]
        at = after[0] if after else None
    if at is None:
        return False
    if not before:
        # Nothing is known of the scale before: the first one seen must be a usual one, not the end of a fall.
        return at >= 1024 and len(between) <= 1 and not recent
    previous = before[-1] or 0.0
    allowed = 1.0 if onset.step.loss_scale_after is not None or between else 0.0
    return math.isfinite(previous) and octaves(previous, at) <= allowed + 0.01 and len(between) <= 1 and not recent
