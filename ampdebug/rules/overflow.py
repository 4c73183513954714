"""Rules about overflow that does not end, or comes too often."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import pairwise

from ampdebug.rules._facts import Facts, octaves
from ampdebug.rules._finding import Finding, power, rows, show_mark
from ampdebug.rules._history import Record
from ampdebug.rules._story import nan_story

_WATCH = "ampdebug.AMPMonitor or ampdebug.watch over these steps: the birthplace names the cell, forward or backward"
_DROPPED_EXPLAINS = (
    "forward-overflow-scale-independent",
    "scale-oscillates-window-too-short",
    "overflow-frequent",
    "scale-below-one",
    "scale-never-grows",
    "loss-spike-recovered",
    "updates-applied-on-overflow",
)


def _finite(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else "all"


def _steps_of(chain: list[Record]) -> tuple[int, int]:
    return chain[0].step.step, chain[-1].step.step


def every_update_dropped(facts: Facts) -> Iterator[Finding]:
    """The optimizer never makes a step."""
    reason, why, records, marks = "", "", [], []
    never = facts.marks("never-stepped")
    logged = facts.logged
    if len(never) >= 5 and logged and facts.history.mark_count("never-stepped") >= 0.8 * facts.history.totals.logged:
        reason = "the tool warns at every logged step that the optimizer's own step counter is below 1"
        marks = never
        records = [logged[0], logged[-1]]
    elif (counted := [r for r in logged if "optimizer_step" in r.step.extra]) and len(counted) >= 8:
        values = {r.step.extra["optimizer_step"] for r in counted}
        if len(values) == 1 and counted[-1].step.step - counted[0].step.step >= 8:
            reason = f"the optimizer's own step counter stands at {values.pop()} while the steps go on"
            records = [counted[0], counted[-1]]
    else:
        judged = [r for r in logged if r.step.overflow is not None]
        if len(judged) >= 10 and facts.static and all(r.step.overflow and not r.applied for r in judged):
            if len(judged) < 0.5 * len(logged):
                return
            reason = "every judged step overflowed, at one and the same loss scale"
            records = [judged[0], judged[1], judged[-1]]
        elif (
            facts.static and len(facts.overflows) >= 10 and not facts.clean and any(r.between for r in facts.overflows)
        ):
            reason = "there is an overflow message for every step, at one and the same loss scale"
            records = [facts.overflows[0], logged[0] if logged else facts.overflows[1], facts.overflows[-1]]
        elif run := _static_tail(facts):
            reason = f"the last {len(run)} logged steps all overflowed, at one and the same loss scale"
            records = [run[0], run[1], run[-1]]
        elif run := _norm_tail(facts):
            reason = f"the gradient norm is not finite in the last {len(run)} logged steps, and the loss stays finite"
            why = "in every logged step the gradients overflow, and the loss stays finite, so all updates are dropped."
            if len({r.step.learning_rate for r in run} - {None}) == 1:
                why += " The learning rate stands still, as it does when no update is made."
            records = [run[0], run[1], run[-1]]
    story = nan_story(facts)
    if (
        not reason
        or story in ("resume", "divergence", "not-guarded", "applied")
        or (story == "first-step" and not never)
    ):
        return
    if facts.history.facts.get("level") == "O0" and not facts.overflows and not never:
        return
    losses = [r.step.loss for r in facts.losses if r.step.loss is not None and math.isfinite(r.step.loss)]
    stays = ""
    if len(losses) >= 8 and never:
        half = len(losses) // 2
        if abs(statistics.fmean(losses[:half]) - statistics.fmean(losses[half:])) < 0.02 * abs(
            statistics.fmean(losses)
        ):
            stays = f" The loss stays at {statistics.fmean(losses):.3g}, where it began."
    first, last = records[0].step.step, records[-1].step.step
    scale = facts.scales[-1] if facts.scales else None
    fixed = f" (fixed at {power(scale)})" if scale is not None and facts.static else ""
    why = (
        why
        or f"every step is judged as overflowed and dropped, and a fixed loss scale{fixed} cannot recover from that."
    )
    yield Finding(
        "every-update-dropped",
        f"No update was made from step {first} to {last}: {why}{stays}",
        "error",
        "high",
        reason,
        first,
        last,
        "",
        (*(show_mark(m) for m in (marks[:1] + marks[-1:])), *rows(records)),
        "Use a dynamic loss scale (DynamicLossScaleManager; mindcv: loss_scale_type dynamic) or a much smaller fixed "
        "one. If it overflows at scale 1 too, the forward pass overflows in the first step: find that layer.",
        "ampdebug.check(net, *inputs, loss_fn=..., optimizer=...): one step names the tensor that overflows",
        (),
        (*_DROPPED_EXPLAINS, "nan-permanent-params-corrupted"),
    )


def _static_tail(facts: Facts) -> list[Record]:
    """The run of overflowed, dropped steps at one scale that the record ends with (loss finite)."""
    if not facts.static or facts.onset is not None:
        return []
    run: list[Record] = []
    for record in reversed(facts.logged):
        if record.step.overflow is not True or record.applied:
            break
        run.append(record)
    run.reverse()
    return run if len(run) >= 20 else []


def _norm_tail(facts: Facts) -> list[Record]:
    """The finite losses beside a norm that is not finite that the record ends with, where no scale is printed."""
    if facts.scales or facts.onset is not None:
        return []
    run: list[Record] = []
    for record in reversed(facts.logged):
        norm = record.step.grad_norm
        if norm is None or math.isfinite(norm) or record.bad_loss or record.step.loss in (None, 0.0):
            break
        run.append(record)
    run.reverse()
    return run if len(run) >= 20 or (len(run) == len(facts.logged) and len(run) >= 10) else []


def overflow_at_every_scale(facts: Facts) -> Iterator[Finding]:
    """From the first step on every step overflows, at every scale that was tried."""
    chain = facts.falling
    if len(chain) < 8 or facts.static or facts.clean_before(chain[0]):
        return
    if nan_story(facts) in ("resume", "divergence", "not-guarded"):
        return
    if not _from_start(facts, chain):
        return
    high, low = _range(facts, chain)
    if high <= 0.0:
        return
    floor = low <= 1.0 or facts.marks("scale-floor") or facts.marks("zero-division") or _at_floor(chain)
    if not floor and len(chain) < 40:
        return
    first, last = _steps_of(chain)
    bad = any(r.bad_loss for r in facts.tail)
    loss = " The loss itself is NaN in these steps." if bad else ""
    yield Finding(
        "overflow-at-every-scale-from-step-1",
        f"Every step from the first on overflowed ({facts.overflow_count} in all) while the loss scale went from "
        f"{power(high)} to {low:g}; no scale ever worked and no update was ever made.{loss} The overflow is in the "
        "forward pass or in the loss.",
        "error",
        "high" if floor else "medium",
        f"{len(chain)} overflows over {_finite(octaves(high, low))} halvings without one good step",
        first,
        last,
        "",
        (*rows([*chain[:3], *chain[-2:]]), *(show_mark(m) for m in facts.marks("scale-floor")[:1])),
        "Do not tune the scaler. Run one batch in float32 and one in float16 and find the first non-finite layer; "
        "keep it in float32 (cell.to_float(ms.float32)), or use bfloat16.",
        "ampdebug.check(net, *inputs, loss_fn=...): one instrumented step names the operator",
        (),
        (*_DROPPED_EXPLAINS, "every-update-dropped", "nan-permanent-params-corrupted"),
    )


def _from_start(facts: Facts, chain: list[Record]) -> bool:
    first = facts.history.totals.first_step
    return facts.history.counts_lines or first is None or first <= max(10, 2 * facts.interval)


def _range(facts: Facts, chain: list[Record]) -> tuple[float, float]:
    scales = [r.step.loss_scale for r in chain] + [r.step.loss_scale_after for r in chain]
    # A message may leave out the scale that the lines around it print.
    scales += [r.scale for r in facts.records[facts.place(chain[0]) : facts.place(chain[-1]) + 1] if not r.between]
    known = [s for s in scales if s is not None]
    before = facts.scale_before(chain[0])
    high = max([*known, before or 0.0]) if known or before else 0.0
    return high, min(known, default=high)


def _at_floor(chain: list[Record]) -> bool:
    """The last several overflows all left the same scale: it has nowhere to go."""
    scales = [r.scale for r in chain if r.scale is not None]
    return len(scales) >= 13 and len(set(scales[-6:])) == 1


def overflow_at_any_scale(facts: Facts) -> Iterator[Finding]:
    """After good steps, overflow in every step down to the smallest scales; the loss, where printed, is finite."""
    if facts.onset is not None:
        return
    chain = facts.falling
    if len(chain) >= 6 and not facts.static and not (_from_start(facts, chain) and not facts.clean_before(chain[0])):
        high, low = _range(facts, chain)
        first, last = _steps_of(chain)
        floor = low <= 1.0 or facts.marks("scale-floor") or _at_floor(chain)
        # The overflows must be dense: with good steps between them the scale is merely finding its level.
        dense = (high > 0.0 and facts.interval > 1) or (last - first + 1) <= 2 * facts.overflow_count + 2
        if high > 0.0 and dense and (floor or octaves(high, low) >= 8):
            yield Finding(
                "forward-overflow-scale-independent",
                f"From step {first} on every step overflows although the loss scale fell from {power(high)} to {low:g} "
                f"({_finite(octaves(high, low))} halvings): what overflows does not depend on the scale, so it is in "
                "the forward pass (or NaN has reached the parameters).",
                "error",
                "high" if floor else "medium",
                f"{len(chain)} overflows in a row over {_finite(octaves(high, low))} halvings of the scale",
                first,
                last,
                "",
                (*rows([*chain[:3], *chain[-2:]]), *(show_mark(m) for m in facts.marks("scale-floor")[:1])),
                "Do not tune the scaler: find the first layer whose output is not finite and keep it in float32 or "
                "use bfloat16; check that the checkpoint of the last good step is finite.",
                _WATCH,
                (),
                _DROPPED_EXPLAINS,
            )
            return
    yield from _floor_bounce(facts)


def _floor_bounce(facts: Facts) -> Iterator[Finding]:
    """The scale lives at the bottom (4 and below) and still overflows again and again."""
    later = facts.later_overflows
    low = [r for r in later if r.scale is not None and r.scale <= 4.0]
    if len(low) < 10 or facts.static:
        return
    first, last = low[0].step.step, low[-1].step.step
    count = sum(max(r.count, 1) for r in low)
    span = max(last - first + 1, 1)
    if count / span < 0.02:
        return
    yield Finding(
        "forward-overflow-scale-independent",
        f"{count} steps between {first} and {last} overflowed although the loss scale was 4 or less: no scaling of the "
        "loss makes numbers that large, so the forward pass overflows on some of the batches.",
        "error",
        "high" if count / span >= 0.05 else "medium",
        f"{100 * count / span:.1f} % of the steps overflow at a scale that leaves the gradients as they are",
        first,
        last,
        "",
        rows([low[0], low[1], low[-1]]),
        "Find the layer that overflows and keep it in float32, or use bfloat16.",
        _WATCH,
        (),
        _DROPPED_EXPLAINS,
    )


def scale_oscillates(facts: Facts) -> Iterator[Finding]:
    """Overflow after every growth: the scale is raised sooner than the gradients allow."""
    if facts.onset is not None or not facts.dynamic:
        return
    if facts.falling and len(facts.falling) >= 6:
        return
    later = facts.later_overflows
    count = sum(max(r.count, 1) for r in later)
    sampled = (
        facts.interval > 1 and not any(r.between or r.count > 1 for r in later) and not facts.exact_overflow_steps()
    )
    if len(later) < (5 if sampled else 8):
        return
    first = later[0].step.step
    last = facts.history.totals.last_step or later[-1].step.step
    span = last - first + 1
    if span <= 0 or facts.history.counts_lines:
        return
    if sampled:
        # Overflow is only seen on the steps that are logged: their share is the share of the logged ones.
        logged = sum(1 for r in facts.logged if r.step.step >= first)
        share = len(later) / max(logged, 1)
    else:
        share = count / span
    changes = sum(a != b for a, b in zip(facts.scales, facts.scales[1:], strict=False))
    # An overflow that leaves the scale as the line before printed it: it grew in between.
    changes += 2 * sum(r.step.loss_scale is None and r.scale == facts.scale_before(r) for r in later[:100])
    if share < 0.02 or (sampled and ((share < 0.03 and len(later) < 8) or changes < 8)):
        return
    scales = sorted({s for r in later for s in (r.scale,) if s is not None and s > 0})
    if not scales or scales[-1] <= 4.0:
        return
    logs = [math.log2(r.scale) for r in later if r.scale]
    half = len(logs) // 2
    if half < 2:
        return
    drift = abs(statistics.fmean(logs[:half]) - statistics.fmean(logs[half:]))
    width = statistics.quantiles(logs, n=10)[-1] - statistics.quantiles(logs, n=10)[0]
    places = sorted(r.step.step for r in later)
    gap = statistics.median(b - a for a, b in pairwise(places)) if len(places) > 2 else 0
    gap = max(gap, round(1 / share)) if facts.interval > 1 else gap
    if drift > 2.5 or width > 5:
        slug, what = "overflow-frequent", "and the scale finds no level"
        action = (
            "Look at the steps that overflow: single batches with large gradients (clip the gradient norm, check the "
            "data) or a layer whose outputs come near the range of float16."
        )
    else:
        slug = "scale-oscillates-window-too-short"
        what = (
            f"about every {gap:.0f} steps, and the scale bounces between neighbouring powers of two "
            f"({', '.join(power(s) for s in scales[-3:])}): the gradients are steady, the growth window is too short "
            "for them"
        )
        action = (
            "Raise the growth window to 1000-2000 steps (DynamicLossScaler(scale_window=2000), fairseq "
            "--fp16-scale-window 2000, GradScaler(growth_interval=2000), DeepSpeed loss_scale_window: 1000)."
        )
    yield Finding(
        slug,
        f"{count} of {span} steps ({100 * share:.1f} %) overflow and are skipped, {what}.",
        "warning",
        "high" if share >= 0.03 and slug != "overflow-frequent" else "medium",
        f"{len(later)} overflows spread over the run at an unchanged level of the scale"
        if slug != "overflow-frequent"
        else "the overflows follow neither the growth of the scale nor an epoch",
        first,
        places[-1],
        "",
        rows([*later[:3], *later[-2:]]),
        action,
        "ampdebug.simulate_scale with the recorded gradient extremes: it counts the skipped steps for other windows",
        (),
        ("loss-spike-recovered", "scale-too-low-headroom"),
    )


def static_overflow_frequent(facts: Facts) -> Iterator[Finding]:
    """A static scale that overflows again and again; training goes on between."""
    if facts.onset is not None or not facts.static or not facts.overflows:
        return
    judged = [r for r in facts.logged if r.step.overflow is not None] if facts.history.prints_overflow else facts.logged
    dropped = [r for r in facts.overflows if not r.applied]
    if len(dropped) < 8 or not facts.clean or any(r.bad_loss for r in dropped[:3]):
        return
    share = len(dropped) / max(len(judged), 1)
    if facts.exact_overflow_steps():
        # Counted over all steps and not only seen on the logged ones, so their share is that of all steps. The scale
        # may well have moved in between: one that grows and overflows at once is printed as if it stood still.
        totals = facts.history.totals
        share = facts.overflow_count / max((totals.last_step or 0) - (totals.first_step or 0) + 1, 1)
    if share < 0.05:
        return
    scale = facts.scales[-1] if facts.scales else None
    at = f" of {power(scale)}" if scale is not None else ""
    yield Finding(
        "overflow-frequent",
        f"{len(dropped)} of {len(judged)} logged steps ({100 * share:.0f} %) overflow at a loss scale{at} that does "
        "not move.",
        "warning",
        "medium",
        "the scale cannot adapt, and the loss is finite in these steps",
        dropped[0].step.step,
        dropped[-1].step.step,
        "",
        rows([*dropped[:3], dropped[-1]]),
        "Use a dynamic loss scale, or a smaller fixed one.",
        _WATCH,
    )


def applied_without_harm(facts: Facts) -> Iterator[Finding]:
    """Updates made on overflow, with finite losses so far."""
    if facts.onset is not None:
        return
    applied = [r for r in facts.overflows if r.applied]
    if not applied:
        return
    yield Finding(
        "updates-applied-on-overflow",
        f"{len(applied)} overflowed steps (first: {applied[0].step.step}) were applied to the weights; the losses "
        "after them are still finite, as they are on devices that saturate instead of making inf.",
        "note" if len(applied) < 3 else "warning",
        "medium",
        "the log says that the update was made",
        applied[0].step.step,
        applied[-1].step.step,
        "",
        rows([*applied[:2], applied[-1]]),
        "Skip the update on overflow (mindyolo: overflow_still_update: False) and use a dynamic loss scale.",
        _WATCH,
    )
