"""What the scalars of a run's steps amount to: loss, loss scale, overflows, updates, births. One streaming pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ampdebug._records import Birth, Step


@dataclass(slots=True)
class BirthCount:
    """Where first non-finite values appeared again and again: the first of them, and how many steps had the like."""

    first_step: int
    birth: Birth
    steps: int = 1


@dataclass(slots=True)
class Extent:
    """First, last, smallest and largest of a number over the steps in which it was known."""

    known: int = 0
    first: float = math.nan
    last: float = math.nan
    low: float = math.nan
    low_step: int = 0
    high: float = math.nan
    nonfinite: int = 0
    first_nonfinite_step: int | None = None

    def add(self, step: int, value: float | None) -> None:
        """Take one step's value; None is unknown and changes nothing."""
        if value is None:
            return
        if not self.known:
            self.first = value
        self.known += 1
        self.last = value
        if not math.isfinite(value):
            self.nonfinite += 1
            self.first_nonfinite_step = self.first_nonfinite_step or step
            return
        if not value >= self.low:  # also where low is NaN
            self.low, self.low_step = value, step
        if not value <= self.high:
            self.high = value


@dataclass(slots=True)
class RunFacts:
    """The steps of a run in numbers.

    Attributes:
        steps: How many were recorded.
        first_step: Number of the first, None for none.
        last_step: Number of the last.
        sampled: How many have statistics of the cells.
        loss: The unscaled loss.
        loss_scale: The scale used.
        scale_after: The scale that the last step which told it left behind.
        overflows: Steps that the training loop called overflowed; ``overflow_known``: steps in which it said anything.
        overflow_known: See ``overflows``.
        nonfinite_gradients: Steps whose gradients were not finite by the monitor's own check.
        applied_nonfinite: Of these, how many are not known to have been skipped.
        skipped: Steps whose update was skipped.
        skip_known: Steps of which that is known.
        without_gradient: Most parameters without a gradient in any step, None if unknown.
        births: By phase, cell path, kind and origin, in the order of their first step.
        seconds: Mean wall time of a step, NaN if unknown.
        monitor_share: The monitor's share of it, NaN if unknown.
    """

    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    sampled: int = 0
    loss: Extent = field(default_factory=Extent)
    loss_scale: Extent = field(default_factory=Extent)
    scale_after: float | None = None
    overflows: int = 0
    overflow_known: int = 0
    nonfinite_gradients: int = 0
    applied_nonfinite: int = 0
    skipped: int = 0
    skip_known: int = 0
    without_gradient: int | None = None
    births: dict[tuple[str, str, str, bool | None], BirthCount] = field(default_factory=dict)
    seconds: float = math.nan
    monitor_share: float = math.nan

    @property
    def loss_is_finite(self) -> bool:
        """No step is known to have had a loss that is not finite."""
        return self.loss.nonfinite == 0


def gather_facts(steps: Iterable[Step]) -> RunFacts:
    """Read the steps once and return what they amount to."""
    facts = RunFacts()
    time = shared_time = monitor_time = 0.0
    timed = 0
    for step in steps:
        facts.steps += 1
        facts.first_step = step.step if facts.first_step is None else facts.first_step
        facts.last_step = step.step
        facts.sampled += step.sampled
        facts.loss.add(step.step, step.loss)
        facts.loss_scale.add(step.step, step.loss_scale)
        facts.scale_after = facts.scale_after if step.loss_scale_after is None else step.loss_scale_after
        if step.overflow is not None:
            facts.overflow_known += 1
            facts.overflows += step.overflow
        if step.update_skipped is not None:
            facts.skip_known += 1
            facts.skipped += step.update_skipped
        bad = bool(step.nonfinite_gradients) or step.backward_birth is not None
        if bad:
            facts.nonfinite_gradients += 1
            # A loop that says "overflow" skips the update, unless it is known not to have.
            facts.applied_nonfinite += not (step.overflow if step.update_skipped is None else step.update_skipped)
        if step.parameters_without_gradient is not None:
            facts.without_gradient = max(facts.without_gradient or 0, step.parameters_without_gradient)
        for birth in (step.forward_birth, step.backward_birth):
            if birth is not None:
                key = (birth.phase, birth.path, birth.kind, birth.inputs_finite)
                if key in facts.births:
                    facts.births[key].steps += 1
                else:
                    facts.births[key] = BirthCount(step.step, birth)
        if step.seconds is not None:
            timed += 1
            time += step.seconds
            if step.monitor_seconds is not None:
                shared_time += step.seconds
                monitor_time += step.monitor_seconds
    if timed:
        facts.seconds = time / timed
        facts.monitor_share = monitor_time / shared_time if shared_time > 0 else math.nan
    return facts
