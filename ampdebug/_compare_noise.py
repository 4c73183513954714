"""How far a level's numbers are from float32's, in units of what another seed does to float32."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ampdebug._compare_records import BaselineRuns, TrainingRun
from ampdebug._probe import _windows

# Below that a difference of two float32 losses is rounding: some ten units in the last place.
_ROUNDING = 1e-6
# A run that comes back within a tenth of the seed noise can be compared in units of the latter.
_CLOSE = 0.1

Reproducible = Literal["bitwise", "closely", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class Gap:
    """A loss curve against O0's.

    Both are cut into at most five windows of equal length and averaged there; positive is a higher loss.

    Attributes:
        largest: The largest deviation of a window, with its sign, in units of the noise there; NaN where a loss is not
            finite.
        final: That of the last window.
        final_loss: Mean loss of the last window.
    """

    largest: float
    final: float
    final_loss: float


@dataclass(frozen=True, slots=True)
class Noise:
    """What O0 does by itself in one mode.

    Attributes:
        reproducible: Two runs with the same seed gave the same losses ``"bitwise"``; ``"closely"``: less than a tenth
            of what another seed changes, or rounding; ``"no"``; ``"unknown"`` where one did not run.
        repeat: The largest relative difference of the losses of these two at one step.
        middle: O0's mean loss in each window.
        loss: Standard deviation of O0's loss over the seeds in each window: of each window and its neighbours together,
            since few runs tell little; at least what the repetition differs by there, and at least rounding.
        metric: The same of the metric after the last step; NaN where there is none.
        seconds: By how much the median step times of the two runs differ, in seconds.
        bytes: By how much their memory differs.
        seeds: How many runs with different seeds.
    """

    reproducible: Reproducible
    repeat: float
    middle: tuple[float, ...]
    loss: tuple[float, ...]
    metric: float
    seconds: float
    bytes: float
    seeds: int

    def gap(self, losses: Sequence[float]) -> Gap:
        """How far other losses of as many steps are off."""
        windows = _windows(losses)
        if not all(map(math.isfinite, (*windows, *self.middle))) or len(windows) != len(self.middle):
            return Gap(math.nan, math.nan, windows[-1] if windows else math.nan)
        units = [(w - m) / n if w != m else 0.0 for w, m, n in zip(windows, self.middle, self.loss, strict=True)]
        return Gap(max(units, key=abs), units[-1], windows[-1])


def noise_of(baseline: BaselineRuns) -> Noise:
    """What the runs at O0 tell."""
    run, repeat = baseline.run, baseline.repeat
    usable = [other for other in (run, *baseline.seeds) if other.usable]
    twice = run.status == "ok" and repeat.status == "ok"
    middle = tuple(_windows(run.losses)) if run.losses else (math.nan,)
    again = np.abs(np.subtract(_windows(repeat.losses), middle)) if twice else np.zeros(len(middle))
    spread = _spread(usable, len(middle))
    least = _ROUNDING * max((abs(m) for m in middle), default=0.0)
    loss = np.maximum.reduce([spread, again, np.full(len(middle), max(least, np.finfo(np.float64).tiny))])
    metrics = [other.metric for other in usable if math.isfinite(other.metric)]
    metric = statistics.stdev(metrics) if len(metrics) > 1 else math.nan
    if twice and math.isfinite(run.metric) and math.isfinite(repeat.metric):
        metric = max(abs(run.metric - repeat.metric), 0.0 if math.isnan(metric) else metric)
    memories = [r.memory.used for r in (run, repeat) if r.memory is not None]
    return Noise(
        _reproducible(run, repeat, bool(np.all(again <= np.maximum(_CLOSE * spread, least)))) if twice else "unknown",
        _relative(run.losses, repeat.losses) if twice else math.nan,
        middle,
        tuple(loss.tolist()),
        metric,
        abs(step_time(run) - step_time(repeat)) if twice else math.nan,
        float(abs(memories[0] - memories[1])) if len(memories) == 2 else math.nan,
        len(usable),
    )


def _spread(runs: Sequence[TrainingRun], windows: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Standard deviations over the runs, each window with its neighbours; zeros where there are not two runs."""
    if len(runs) < 2:
        return np.zeros(windows)
    variances = np.var([_windows(run.losses) for run in runs], axis=0, ddof=1)
    return np.sqrt([float(np.mean(variances[max(0, i - 1) : i + 2])) for i in range(windows)])


def _reproducible(run: TrainingRun, repeat: TrainingRun, close: bool) -> Reproducible:
    if np.array_equal(run.losses, repeat.losses, equal_nan=True):
        return "bitwise"
    if not (run.usable and repeat.usable):
        return "no"
    return "closely" if close else "no"


def _relative(one: Sequence[float], other: Sequence[float]) -> float:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if math.isfinite(a) and math.isfinite(b)]
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def step_time(run: TrainingRun) -> float:
    """Median seconds of a step, without the first, which compiles the optimizer; NaN where there is none."""
    return statistics.median(run.step_seconds[1:]) if len(run.step_seconds) > 1 else math.nan


def compile_time(run: TrainingRun) -> float:
    """What the first pass and the first step took beyond a usual pass and step, in seconds."""
    if len(run.step_seconds) < 2:
        return math.nan
    return max(0.0, run.first_seconds + run.step_seconds[0] - 2 * step_time(run))


def late_skips(run: TrainingRun) -> int:
    """Updates left out after the first that was made: before it, the loss scale was still coming down."""
    skipped = set(run.skipped)
    first = next((step for step in range(len(run.losses)) if step not in skipped), len(run.losses))
    return sum(step > first for step in skipped) if first < len(run.losses) else len(skipped)
