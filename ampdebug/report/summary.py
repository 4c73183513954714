"""The lines below the table of a report: loss, loss scale, overflows, updates, births, parameters, events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ampdebug._records import Birth
from ampdebug.report.bisection import bisection_lines
from ampdebug.report.facts import Extent, RunFacts
from ampdebug.report.watchlist import Judgement, describe_nonfinite, plural

if TYPE_CHECKING:
    from ampdebug._run import Run

_NAMED = 3  # how many names a line lists before it says how many more there are
_LEVELS_WITH_CASTS = ("O1", "O2", "O3", "AUTO")


def shorten(text: str, width: int) -> str:
    """Cut the middle out: paths of one network differ at either end."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def describe_run(run: Run, facts: RunFacts, step: int | None) -> str:
    """The title: where it lies, which steps, on what it ran, whether it ended."""
    parts = [str(run.path.parent)]
    ranks = run.ranks
    if len(ranks) > 1:
        parts.append(f"rank {run.this_rank} of {len(ranks)}")
    if step is not None:
        parts.append(f"step {step} only")
    elif facts.steps:
        parts.append(
            f"{facts.steps} steps ({facts.first_step} to {facts.last_step}), cells measured in {facts.sampled}"
        )
    else:
        parts.append("no step recorded yet")
    meta: Mapping[str, Any] = run.meta
    parts += [str(meta[name]) for name in ("amp_level", "mode", "device") if meta.get(name)]
    if meta.get("mindspore"):
        parts.append(f"MindSpore {meta['mindspore']}")
    if run.segments:
        parts.append(run.segments[-1].status)
    return " · ".join(parts)


def summary_lines(
    run: Run,
    facts: RunFacts,
    judgements: Sequence[Judgement],
    *,
    uses_float16: bool,
    problems: Sequence[str],
    step: int | None,
) -> Iterator[tuple[str, str]]:
    """Yield ``(subject, sentence)`` of each line; subjects are unique."""
    if facts.loss.known:
        yield "loss", _loss(facts)
    if facts.loss_scale.known:
        yield "loss scale", _loss_scale(facts)
    gradients = _gradients(facts)
    if gradients:
        yield "overflow", gradients
    if facts.skip_known:
        yield "updates", f"{facts.skip_known - facts.skipped} applied, {facts.skipped} skipped"
    for phase in ("forward", "backward"):
        births = _births(facts, phase)
        if births:
            yield phase, births
    if not math.isnan(facts.seconds):
        monitor = "" if math.isnan(facts.monitor_share) else f", the monitor's share {100 * facts.monitor_share:.1f} %"
        yield "step time", f"{1000 * facts.seconds:.3g} ms on average{monitor}"
    level = str(run.meta.get("amp_level") or "").upper()
    if level in _LEVELS_WITH_CASTS and judgements and not uses_float16 and not _uses_bfloat16(run, judgements):
        yield "level", f"{level} changed nothing: no cell was seen with float16 or bfloat16 values or operators"
    notes = "; ".join([*_notes(judgements), *_without_gradient(run, facts, judgements)])
    if notes:
        yield "notes", notes
    if step is None:
        yield from bisection_lines(run)
        yield from _events(run)
    if problems:
        yield "damaged", f"{plural(len(problems), 'step')} could not be read, left out: {problems[0]}"


def _span(extent: Extent) -> str:
    if extent.known == 1 or (extent.first == extent.last == extent.low == extent.high and not extent.nonfinite):
        return f"{extent.last:.6g}"
    return f"{extent.first:.6g} → {extent.last:.6g}"


def _loss(facts: RunFacts) -> str:
    loss = facts.loss
    text = _span(loss)
    if loss.nonfinite:
        often = f"in {loss.nonfinite} of {plural(loss.known, 'step')}"
        return f"{text}; not finite {often}, first in step {loss.first_nonfinite_step}" if loss.known > 1 else text
    return f"{text}; finite in all {loss.known} steps" if loss.known > 1 else text


def _loss_scale(facts: RunFacts) -> str:
    scale = facts.loss_scale
    text = _span(scale)
    if scale.low < min(scale.first, scale.last):
        text += f"; lowest {scale.low:.6g} in step {scale.low_step}"
    if scale.high > max(scale.first, scale.last):
        text += f"; highest {scale.high:.6g}"
    if facts.scale_after is not None and facts.scale_after != scale.last:
        text += f"; {facts.scale_after:.6g} for the next step"
    return text


def _gradients(facts: RunFacts) -> str:
    parts = []
    if facts.overflow_known:
        parts.append(f"{facts.overflows} of {plural(facts.overflow_known, 'step')} by the loop's own word")
    if facts.nonfinite_gradients:
        text = f"gradients not finite in {plural(facts.nonfinite_gradients, 'step')}"
        if facts.applied_nonfinite:
            text += f", {facts.applied_nonfinite} of these not known to have been skipped"
        parts.append(text)
    elif facts.overflow_known:
        parts.append("no gradient found that is not finite" if not facts.overflows else "")
    return "; ".join(part for part in parts if part)


def _births(facts: RunFacts, phase: str) -> str:
    found = [count for (of_phase, *_), count in facts.births.items() if of_phase == phase]
    if phase == "backward" and any(of_phase == "forward" for of_phase, *_ in facts.births):
        found = [
            count for count in found if count.birth.inputs_finite is not False
        ]  # the rest follows from the forward
    if not found:
        return ""
    texts = [
        f"step {count.first_step}: {describe_birth(count.birth)}"
        + (f" (and in {plural(count.steps - 1, 'more step')})" if count.steps > 1 else "")
        for count in found[:2]
    ]
    if len(found) > 2:
        texts.append(f"… {len(found) - 2} more places")
    return "first not finite in " + "; ".join(texts)


def describe_birth(birth: Birth) -> str:
    """One clause on where a first non-finite value appeared."""
    what = describe_nonfinite(birth.nan, birth.pos_inf, birth.neg_inf)
    if birth.phase == "forward" and birth.path == "" and birth.kind == "input":
        return f"{what} in the network's own input"
    type_ = f" ({birth.cell_type})" if birth.cell_type else ""
    kind = birth.kind.replace("_", " ")
    place = f"{shorten(birth.path or '(network)', 40)}{type_}, {kind}"
    if birth.seen_at:
        place += f" seen at {shorten(birth.seen_at, 40)}"
    if birth.own_code:
        place += ", by the cell's own code"
    went_in = {True: ", inputs finite", False: ", inputs not finite", None: ""}[birth.inputs_finite]
    return f"{what} in {place}{went_in}"


def _uses_bfloat16(run: Run, judgements: Sequence[Judgement]) -> bool:
    return any("bfloat16" in j.summary.dtypes for j in judgements) or any(
        "bfloat16" in (cell.asked_dtype, *cell.compute_dtypes.values()) for cell in run.cells
    )


def _notes(judgements: Sequence[Judgement]) -> Iterator[str]:
    """What is true and sometimes useful, but as common in healthy runs."""
    by_slug: dict[str, list[str]] = {}
    largest = math.nan
    for judgement in judgements:
        for reason in judgement.reasons:
            if not reason.is_alarm:
                name = judgement.summary.site.path or "(network)"
                names = by_slug.setdefault(reason.slug, [])
                if name not in names:
                    names.append(name)
                if reason.slug == "beyond-float16":
                    largest = max(judgement.summary.absmax, largest) if largest == largest else judgement.summary.absmax
    texts = {
        "mask": "only -inf, as a mask makes, in {}",
        "zero-gradient": "gradient exactly 0 in every step for {}",
        "overflow-skipped": "non-finite gradients in skipped steps only, as a loss scaler expects",
        "beyond-float16": f"values that float16 could not hold (up to {largest:.3g}, in a wider dtype) in {{}}",
        "subnormal": "mostly float16 subnormals in {}",
        "flushed-by-cast": "most values of a parameter become 0 in the cast to float16: {}",
        "update-below-half-ulp": "changes below half an ulp, kept by a wider parameter, in {}",
    }
    for slug, text in texts.items():
        if slug in by_slug:
            yield text.format(_listed(by_slug[slug]))


def _without_gradient(run: Run, facts: RunFacts, judgements: Sequence[Judgement]) -> Iterator[str]:
    """Trainable parameters whose gradient never came, by name where the run lists its parameters."""
    seen = {j.summary.site.path for j in judgements if j.summary.site.kind in ("gradient", "reduced_gradient")}
    listed = run.meta.get("parameters")
    if seen and isinstance(listed, list):
        trained = [str(p.get("name")) for p in listed if isinstance(p, dict) and p.get("requires_grad")]
        missing = [name for name in trained if name not in seen]
        if missing:
            yield f"no gradient ever came for {_listed(missing)}"
    elif facts.without_gradient:
        yield f"{plural(facts.without_gradient, 'parameter')} had no gradient"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(shorten(name, 32) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _events(run: Run) -> Iterator[tuple[str, str]]:
    events = run.events
    for number, event in enumerate(events[:_NAMED], 1):
        at = f"step {event.step}: " if event.step else ""
        yield f"event {number}", f"{at}{event.message} [{event.kind}]"
    if len(events) > _NAMED:
        yield "events", f"{len(events) - _NAMED} more: ampdebug export {run.path.parent}, or Run.events"
