"""Which level to take, and why: the rules of docs/compare.md over what a comparison measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ampdebug._bisect import Criterion
from ampdebug._compare_noise import Noise, late_skips, step_time
from ampdebug._compare_records import Kernel, Measured, Mode, TrainingRun

NetKind = Literal["conv/dense", "attention", "custom-operator", "other"]

# Of several levels that are as good as each other the first is taken; the reasons are in docs/compare.md.
PREFERENCE: dict[NetKind, tuple[str, ...]] = {
    "conv/dense": ("O2", "auto", "O1", "O3"),
    "attention": ("auto", "O1", "O2", "O3"),
    "custom-operator": ("O1", "auto", "O2", "O3"),
    "other": ("auto", "O2", "O1", "O3"),
}
_WHY: dict[NetKind, str] = {
    "conv/dense": "convolutions and dense layers bear float16 well, and O2 keeps the batch norms in float32",
    "attention": "in attention auto and O1 keep softmax, norms and losses in float32 by their lists, and O2 does not",
    "custom-operator": "O2 and O3 ask float16 of operators of your own too, and O1 and auto only of those they list",
    "other": "auto converts no more than what its lists name",
}

NEAR_CEILING = 0.02  # of a metric that ends at 1 (or 100)
_WORTH = 0.05  # a smaller part of time or memory is no reason to change
_LOSS_UNITS = 3.0  # standard deviations of the seed noise: what another seed hardly does
_TIE = 0.05
_BUSY = 2.0  # load average per processor; a training by itself comes to about 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of one run.

    Attributes:
        fits: It can be recommended as far as its numbers go.
        problems: Why not.
        cautions: What to know although it can.
    """

    fits: bool
    problems: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommendation for one mode.

    Attributes:
        mode: The mode.
        level: What to take on this device; None where O0 itself gave nothing to go by.
        elsewhere: What to take on a device that accelerates float16; None where no level fits.
        reasons: Sentences.
    """

    mode: Mode
    level: str | None
    elsewhere: str | None
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"mode": self.mode, "level": self.level, "elsewhere": self.elsewhere, "reasons": list(self.reasons)}


def net_kind(kinds: Mapping[str, int]) -> NetKind:
    """What a network is made of, by how often its operators occur (``Share.kinds``)."""
    if any(kind.startswith("custom") for kind in kinds):
        return "custom-operator"
    products = kinds.get("matmul", 0)
    by_hand = all(kinds.get(kind) for kind in ("exp", "div"))
    fused = any("attention" in kind for kind in kinds)
    if fused or (products >= 2 and (by_hand or any("softmax" in kind for kind in kinds))):
        return "attention"
    if any(kind.startswith(("conv", "dense", "matmul")) for kind in kinds):
        return "conv/dense"
    return "other"


def near_ceiling(metric: float, better: Literal["higher", "lower"]) -> bool:
    """A metric that ends at 1 or 100 (or, the lower the better, at 0) has little room left to tell levels apart."""
    if not math.isfinite(metric):
        return False
    if better == "lower":
        return metric == 0.0
    return any((1 - NEAR_CEILING) * end <= metric <= end for end in (1.0, 100.0))


def criterion_of(measured: Measured, mode: Mode, noise: Noise) -> Criterion:
    """What counts as good: the metric within the tolerance; without a metric, the final loss."""
    run = measured.baselines[mode].run
    if measured.has_metric:
        spread = noise.metric if math.isfinite(noise.metric) else 0.0
        return Criterion.beside(run.metric, spread, measured.tolerance, None, measured.better, "metric")
    return Criterion.beside(noise.middle[-1], noise.loss[-1], measured.tolerance, None, "lower", "final loss")


def judge_run(run: TrainingRun, measured: Measured, noise: Noise) -> Verdict:
    """Whether a level's numbers are good enough, in the user's terms."""
    if run.status != "ok":
        return Verdict(False, (run.reason,))
    problems, cautions = [], []
    bad = [step for step, loss in enumerate(run.losses) if not math.isfinite(loss)]
    if bad:
        problems.append(f"the loss is not finite in {len(bad)} of {len(run.losses)} steps, first in step {bad[0]}")
    skips, allowed = late_skips(run), len(run.losses) // 20
    if skips > allowed:
        problems.append(f"{skips} of {len(run.losses)} updates were skipped for overflow, and {allowed} would be usual")
    gap = noise.gap(run.losses)
    criterion = criterion_of(measured, run.mode, noise)
    value = run.metric if measured.has_metric else gap.final_loss
    if run.metric_reason:
        problems.append(f"no metric: {run.metric_reason}")
    elif not bad and not criterion.judge(value).passed:
        problems.append(
            f"{'metric' if measured.has_metric else 'final loss'} {value:.6g}, and {criterion.words} is asked"
        )
    away = math.isfinite(gap.largest) and abs(gap.largest) > _LOSS_UNITS
    if away:
        said = f"its loss leaves O0's by {gap.largest:+.2g} times the seed noise"
        ceiling = measured.has_metric and near_ceiling(measured.baselines[run.mode].run.metric, measured.better)
        if ceiling and gap.largest > 0:
            problems.append(f"{said}, where the metric is too near its ceiling to show it")
        else:
            cautions.append(said)
    if run.share is not None and run.share.low_operators == 0.0:
        problems.append("every operator runs in float32: this level converted nothing here")
    return Verdict(not problems, tuple(problems), tuple(cautions))


@dataclass(frozen=True, slots=True)
class _Gain:
    """What a level saves against O0, as parts of what O0 takes; 0 where it is within the noise of the measurement."""

    time: float
    memory: float


def _gain(run: TrainingRun, base: TrainingRun, noise: Noise) -> _Gain:
    theirs, ours = step_time(base), step_time(run)
    time = _saved(theirs, ours, noise.seconds)
    if time and _quartile(run, 3) >= theirs:  # most of its steps, not only half of them, are quicker
        time = 0.0
    memory = 0.0
    if run.memory is not None and base.memory is not None:
        memory = _saved(base.memory.used, run.memory.used, noise.bytes)
    return _Gain(time, memory)


def _saved(before: float, after: float, noise: float) -> float:
    if not (math.isfinite(before) and math.isfinite(after)) or before <= 0:
        return 0.0
    saved = before - after
    counts = saved >= _WORTH * before and saved > 2 * (noise if math.isfinite(noise) else 0.0)
    return saved / before if counts else 0.0


def _quartile(run: TrainingRun, which: int) -> float:
    times = run.step_seconds[1:]
    return statistics.quantiles(times, n=4, method="inclusive")[which - 1] if len(times) > 1 else math.inf


def advise(measured: Measured, mode: Mode, noise: Noise) -> Advice:
    """The recommendation for one mode."""
    base = measured.baselines[mode].run
    if not base.usable:
        why = base.reason or "its loss is not finite"
        return Advice(mode, None, None, (f"O0 itself does not train in this mode ({why}): nothing can be compared",))
    left_out, steps = late_skips(base), len(base.losses)
    if left_out > steps // 20:
        return Advice(
            mode,
            None,
            None,
            (
                f"O0 itself leaves out {left_out} of {steps} updates, since its gradients are not finite: precision is "
                "not the cause. `ampdebug check` names the operator",
            ),
        )
    runs = [run for run in measured.runs if run.mode == mode]
    fitting = [run for run in runs if judge_run(run, measured, noise).fits]
    kind = net_kind(_kinds(measured, mode))
    order = PREFERENCE[kind]
    reasons = list(_of_trust(measured, mode, noise))
    if not fitting:
        seen = ", ".join(run.level for run in runs)
        hint = next((run.level for run in sorted(runs, key=lambda r: order.index(r.level)) if run.status == "ok"), None)
        reasons.insert(0, f"none of {seen} fits" if runs else "no other level was asked for")
        if hint is not None:
            reasons.append(f"`ampdebug bisect --level {hint}` finds the operators that must stay in float32 for it")
        return Advice(mode, "O0", None, tuple(reasons))
    fitting.sort(key=lambda run: order.index(run.level))
    names = ", ".join(run.level for run in fitting)
    reasons.insert(0, f"within the tolerance ({criterion_of(measured, mode, noise).words}): {names}")
    gains = {run.level: _gain(run, base, noise) for run in fitting}
    doubt = _times_in_doubt(measured)
    if doubt:
        quicker = any(gain.time for gain in gains.values())
        reasons.append(doubt + ("; shorter steps do not count" if quicker else ""))
        gains = {level: replace(gain, time=0.0) for level, gain in gains.items()}
    elsewhere = fitting[0].level
    by_time = _best(fitting, {level: gain.time for level, gain in gains.items()})
    by_memory = _best(fitting, {level: gain.memory for level, gain in gains.items()})
    if by_time is not None:
        level = by_time
        reasons.append(f"{level} takes {gains[level].time:.0%} less time a step than O0 on this device")
    elif by_memory is not None:
        level = by_memory
        faster = "" if doubt else "no level is faster here; "
        reasons.append(f"{faster}{level} takes {gains[level].memory:.0%} less memory than O0")
    else:
        level = "O0"
        what = "memory" if doubt else "time or memory"
        reasons.append(f"no level saves {what} here beyond what two runs of O0 differ by")
    tied = [run.level for run in fitting if run.level != level]
    if tied or level == "O0":
        reasons.append(f"for a {kind} network the order of choice is {', '.join(order)}: {_WHY[kind]}")
    if level != elsewhere:
        reasons.append(f"on a device that accelerates float16 take {elsewhere}")
    chosen = next((run for run in fitting if run.level == level), None)
    if chosen is not None:
        reasons += judge_run(chosen, measured, noise).cautions
    return Advice(mode, level, elsewhere, tuple(reasons))


def _kinds(measured: Measured, mode: Mode) -> Mapping[str, int]:
    """Operators of the network at O0: in PyNative mode if that ran, since a compiled graph does not tell all."""
    seen: tuple[Mode, ...] = ("pynative", mode)
    shares = (measured.baselines[m].run.share for m in seen if m in measured.baselines)
    return next((share.kinds for share in shares if share is not None), {})


def _best(fitting: Sequence[TrainingRun], gains: Mapping[str, float]) -> str | None:
    """The level that saves most; of those that save about as much the first, since they come in order of preference."""
    most = max(gains.values())
    return next((run.level for run in fitting if 0 < gains[run.level] >= most - _TIE), None)


def _of_trust(measured: Measured, mode: Mode, noise: Noise) -> list[str]:
    """What limits the answer."""
    told = []
    base = measured.baselines[mode].run
    if noise.reproducible == "no":
        told.append(
            f"O0 is not reproducible: with the same seed its losses differ by up to {noise.repeat:.2g} of their size, "
            "so gaps below that say nothing (something draws random numbers without the seed?)"
        )
    if noise.seeds < 2:
        told.append("the seed noise is unknown, since no run with another seed went to its end")
    if len(noise.middle) > 1 and noise.middle[0] - noise.middle[-1] <= _LOSS_UNITS * noise.loss[-1]:
        told.append(
            f"in {measured.steps} steps O0's loss falls by no more than the noise: it has not learned yet, and a gap "
            "may still come; give more steps"
        )
    if measured.has_metric and near_ceiling(base.metric, measured.better):
        told.append(f"the metric is near its ceiling ({base.metric:.4g} at O0), so levels are judged by their loss too")
    return told


def _times_in_doubt(measured: Measured) -> str:
    """Why step times are no reason to choose a level, ``""`` where they are."""
    busy = ""
    if measured.load > _BUSY:
        busy = f"the machine is busy (load average {measured.load:.2g} per processor), so that times tell little"
    return "; ".join(filter(None, (_not_accelerated(measured.kernels), busy)))


def _not_accelerated(kernels: Sequence[Kernel]) -> str:
    slow = [kernel for kernel in kernels if not kernel.accelerated]
    if not slow or len(slow) < len(kernels):
        return ""
    told = ", ".join(
        f"{kernel.name} {kernel.problem or f'takes {kernel.ratio:.2g} times as long as in float32'}" for kernel in slow
    )
    return f"float16 is not accelerated on this device ({told}): memory is all there is to win"
