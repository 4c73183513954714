"""Rules about where the first non-finite value of a forward pass was born; they need a monitor's run.

One function decides what a birth is (``classify``), so that one NaN gets one name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampdebug._records import Birth
from ampdebug.rules import _birth_operators as by_operators
from ampdebug.rules._birth_kinds import KINDS, Verdict, counted, place_of
from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Evidence, Finding
from ampdebug.rules._history import Record
from ampdebug.rules._run import Row, RunView, births

_REPLAY = "ampdebug replay of this step: it names the operator and the source line"

_EXPLAINS = (
    "forward-overflow-scale-independent",
    "nan-permanent-params-corrupted",
    "loss-nan-before-scale-moved",
    "scale-collapse-loss-already-nan",
    "nan-updates-not-skipped",
    "overflow-at-every-scale-from-step-1",
    "every-update-dropped",
    "loss-nan-cause-unknown",
    "loss-nan-in-some-steps",
    "overflow-frequent",
    "scale-oscillates-window-too-short",
    "periodic-nan-same-batch",
    "update-applied-on-overflow-static-scale",
    "updates-applied-on-overflow",
    "loss-spike-recovered",
    "values-pinned-at-fp16-max",
    "nan-from-first-step-after-resume",
)


_BY_OPERATORS = (
    by_operators.exponential,
    by_operators.epsilon,
    by_operators.reduction,
    by_operators.residual_branch,
)


def classify(view: RunView, record: Record, birth: Birth) -> Verdict:
    """Name a birth by what surrounds it, the most specific that fits."""
    place = place_of(view, record, birth)
    for test in (by_operators.hidden_by_clip, by_operators.empty_mean, *KINDS, *_BY_OPERATORS):
        verdict = test(view, record, place)
        if verdict is not None:
            return verdict
    cell = f"{birth.cell_type} {birth.path!r}" if birth.path else f"the network's own code ({birth.cell_type})"
    what = counted(birth)
    how = "in its own construct, all of its cells being finite" if birth.own_code else "out of finite inputs"
    known = birth.inputs_finite is True
    return Verdict(
        "forward-overflow-scale-independent",
        f"{cell} makes {what} in {birth.dtype} {how if known else '; what went in was not finite or not seen'}: the "
        "forward pass overflows, whatever the loss scale.",
        "high" if known else "medium",
        "everything that went into it was finite" if known else "its inputs were not all observed",
        (
            f"Keep this cell in float32 (net.{birth.path}.to_float(ms.float32))"
            if birth.path
            else "Keep this part in float32"
        )
        + ", or use bfloat16.",
        birth.path,
    )


def born_in_the_forward(facts: Facts) -> Iterator[Finding]:
    """One finding for each kind of forward birth, with the place it was first seen at."""
    view = facts.history.facts.get("run")
    if not isinstance(view, RunView):
        return
    named: dict[tuple[str, str], tuple[Verdict, list[Record], Birth]] = {}
    for record, birth in births(view, facts.history, "forward"):
        spoilt = _spoilt(view, record, birth)
        if spoilt and record.step.step > (facts.history.totals.first_step or 1):
            continue  # made by an earlier update: a consequence, whatever the cell
        verdict = _checkpoint(birth, spoilt) if spoilt else classify(view, record, birth)
        key = (verdict.slug, verdict.where)
        if key in named:
            named[key][1].append(record)
        else:
            named[key] = (verdict, [record], birth)
    ordered = sorted(named.values(), key=lambda item: item[1][0].step.step)
    for place, (verdict, records, birth) in enumerate(ordered):
        if place and not _before_any_damage(facts, ordered[0][1][0], records[0]):
            break  # later places are victims of the first one's NaN in the parameters
        first = records[0].step.step
        yield Finding(
            verdict.slug,
            verdict.sentence,
            "error",
            verdict.confidence,
            verdict.reason,
            first,
            records[-1].step.step,
            verdict.where,
            tuple(_evidence(view, records[0], birth)),
            verdict.action,
            "" if verdict.confidence == "high" else _REPLAY,
            (),
            _EXPLAINS,
        )


def _spoilt(view: RunView, record: Record, birth: Birth) -> list[Row]:
    """Parameters of the cell of a birth that were not finite before the step."""
    inside = f"{birth.path}." if birth.path else ""
    return [
        row
        for row in view.rows(record.step.step)
        if row.site.kind == "parameter" and row.nonfinite and row.site.path.startswith(inside)
    ]


def _checkpoint(birth: Birth, spoilt: list[Row]) -> Verdict:
    names = ", ".join(row.site.path for row in spoilt[:4])
    return Verdict(
        "nan-from-first-step-after-resume",
        f"{names} held non-finite values before the first step of this run: the checkpoint that was loaded, or the "
        "initialisation, is not finite.",
        "high",
        "the parameters were measured before the first update",
        "Check every tensor of the checkpoint for NaN and inf (np.isfinite over ms.load_checkpoint(path)), and go "
        "back to the last clean one.",
        birth.path,
    )


def _before_any_damage(facts: Facts, first: Record, later: Record) -> bool:
    """The steps from the first birth to a later one did not all go wrong: the network was whole in between."""
    between = [r for r in facts.logged if first.step.step < r.step.step < later.step.step]
    return any(r.step.forward_birth is None and not r.bad_loss for r in between)


def _evidence(view: RunView, record: Record, birth: Birth) -> Iterator[Evidence]:
    place = place_of(view, record, birth)
    step = record.step.step
    for row in (*place.inputs[:2], *place.before[-3:]):
        yield Evidence(f"{row.site.kind} of {row.site.path or 'the network'}: {_describe(row)}", step)
    if place.seen is not None:
        yield Evidence(f"{birth.kind} of {place.seen.site.path or 'the network'}: {_describe(place.seen)}", step)
    else:
        yield Evidence(f"{birth.kind} of {birth.path or 'the network'}: {counted(birth)}, {birth.dtype}", step)


def _describe(row: Row) -> str:
    shape = "x".join(map(str, row.shape)) if row.shape is not None else str(row.count)
    bad = f", {row.nan} NaN, {row.pos_inf} +inf, {row.neg_inf} -inf" if row.nonfinite else ", all finite"
    size = f", largest {row.absmax:.5g}" if not math.isnan(row.absmax) else ""
    return f"{row.dtype} {shape}{size}{bad}"
