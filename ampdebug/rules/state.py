"""Rules about the scaler's state: lost on resume, different across ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise

from ampdebug.rules._facts import Facts, by_segment, octaves
from ampdebug.rules._finding import Evidence, Finding, power, rows, show_mark
from ampdebug.rules._history import Record


def not_restored(facts: Facts) -> Iterator[Finding]:
    """After a resume the loss scale starts again where a new training would."""
    # Grouped once: a damaged log may seem to restart at every line.
    scaled, logged, bad = (by_segment(records) for records in (facts.scaled, facts.logged, facts.overflows))
    segments = sorted(scaled)
    for before, after in pairwise(segments):
        old, new = scaled[before], scaled[after]
        steps = [r.step.step for r in logged.get(after, ())]
        if not old or not new or not steps or steps[0] <= 2 * facts.interval:
            continue  # a training that begins at step 1 again has no state to restore
        # The checkpoint may be older than the last line: compare with the scale of the step that is repeated.
        at = [r for r in old if not r.between and r.step.step <= steps[0]]
        saved = (at or old)[-1]
        last = saved.scale or 0.0
        near = [r.scale for r in old[-200:] if r.scale]
        first = _first_scale(new[0])
        if last <= 0 or first is None or first <= 0:
            continue
        jump = abs(octaves(max(first, last), min(first, last)))
        initial = _first_scale(old[0]) if before == segments[0] else None
        overflowed = [r for r in bad.get(after, ()) if r.step.step <= steps[0] + 64 + 3 * facts.interval]
        as_new = initial is not None and initial == first and initial != last
        if jump < 2 or ((near and min(near) <= first <= max(near)) and not as_new):
            continue
        if not (as_new or (first > last and len(overflowed) >= 2) or jump >= 4):
            continue
        yield _finding(facts, saved, new[0], first, overflowed, as_new)
        return
    silent = _unsaid_restart(facts)
    if silent is not None:
        yield silent
        return
    yield from _search_after_resume(facts)


def _unsaid_restart(facts: Facts) -> Finding | None:
    """Nothing says that the program was started again, but the scale jumps to where it began: growth only doubles.

    In a sparse log some of the halvings from there may be over by the next line.
    """
    if not facts.scaled:
        return None
    scaled = facts.scaled
    initial = _first_scale(scaled[0])
    for place, (before, after) in enumerate(pairwise(scaled), 1):
        first = _first_scale(after)
        if before.segment != after.segment or before.between or after.between or first is None or initial is None:
            continue
        steps = after.step.step - before.step.step
        if not before.scale or steps > 2 * facts.interval or octaves(first, before.scale) < 4:
            continue
        at = after.step.step
        overflowed = [r for r in facts.overflows if at <= r.step.step <= at + 64 + 3 * facts.interval]
        if first == initial and len(overflowed) >= 2:
            return _finding(facts, before, after, first, overflowed, as_new=True)
        if 0 <= octaves(initial, first) <= min(3, steps) and _falls_back(scaled[place : place + 20], before.scale):
            return _finding(facts, before, after, first, overflowed, as_new=first == initial)
    return None


def _falls_back(records: list[Record], level: float) -> bool:
    """The scale goes down to the old level again, or nearly, without a growth on the way."""
    scales = [r.scale for r in records if r.scale is not None]
    low = next((place for place, scale in enumerate(scales) if octaves(scale, level) <= 1), None)
    return low is not None and all(b <= a for a, b in pairwise(scales[: low + 1]))


def _first_scale(record: Record) -> float | None:
    """The scale in force when a segment began: an overflow message tells the one after halving."""
    step = record.step
    if step.loss_scale is not None:
        return step.loss_scale
    after = step.loss_scale_after
    return after * 2 if after is not None and record.bad_gradient else after


def _finding(
    facts: Facts, saved: Record, begin: Record, first: float, overflowed: list[Record], as_new: bool
) -> Finding:
    last = saved.scale or 0.0
    count = sum(max(r.count, 1) for r in overflowed)
    cost = f"; {count} steps were skipped until it had found its level again" if overflowed else ""
    resumes = [m for m in facts.marks("resume") if m.line <= begin.line]
    return Finding(
        "scaler-state-not-restored",
        f"Before the restart the loss scale was {power(last)}, after it {power(first)}"
        + (", which is where the training first began" if as_new else "")
        + f": the scaler's state was not restored from the checkpoint{cost}.",
        "warning",
        "high" if as_new or overflowed else "medium",
        "the scale after the restart is the initial one of this run"
        if as_new
        else "the scale jumps at the restart and at no other place",
        begin.step.step,
        overflowed[-1].step.step if overflowed else begin.step.step,
        "",
        rows([saved], 1) + tuple(show_mark(m) for m in resumes[-1:]) + rows([begin, *overflowed[:2]], 4),
        "Save and load the scaler with the checkpoint: append scale_sense (or the DynamicLossScaler's scale_value and "
        "counter) to ms.save_checkpoint's append_dict and set it after loading; in PyTorch scaler.state_dict() / "
        "load_state_dict().",
    )


def _search_after_resume(facts: Facts) -> Iterator[Finding]:
    """Only the resumed part is in the log: a scaler that searches from a high scale in the middle of a training."""
    resumes = facts.marks("resume") or facts.marks("load")
    if not resumes or facts.onset is not None:
        return
    for mark in resumes[:20]:
        rest = [r for r in facts.records if r.line > mark.line]
        steps = [r for r in rest if not r.between]
        if not steps or steps[0].step.step < max(100, 4 * facts.interval):
            continue
        before = [r for r in facts.records if r.line < mark.line and r.scale is not None]
        if before:
            continue
        burst: list[Record] = []
        lowest = float("inf")
        for record in rest:
            scale = record.scale
            if scale is not None and scale > lowest:
                break
            if scale is not None:
                lowest = min(lowest, scale)
            if record.bad_gradient:
                burst.append(record)
            elif (len(burst) > 0 and record.step.step - burst[-1].step.step > 20 + 2 * facts.interval) or (
                not burst and record.step.step > steps[0].step.step + 2 * facts.interval
            ):
                break
        good = [r for r in facts.clean if burst and r.line > burst[-1].line]
        count = sum(max(r.count, 1) for r in burst)
        if count < 3 or len(good) < 3 or statistics.fmean(1.0 * (r.bad_loss) for r in burst) > 0:
            continue
        high = _first_scale(burst[0])
        yield Finding(
            "scaler-state-not-restored",
            f"Right after the resume at step {steps[0].step.step} the scaler searches for its scale anew"
            + (f", from {power(high)} down to {power(lowest)}" if high else "")
            + f" ({count} steps skipped): its state was not in the checkpoint or was not loaded.",
            "warning",
            "medium",
            "a search for the scale belongs to the first steps of a training, not to the middle of one",
            steps[0].step.step,
            burst[-1].step.step,
            "",
            (show_mark(mark), *rows([*burst[:2], burst[-1], good[0]], 5)),
            "Save and load the scaler with the checkpoint (scale_value and counter, or scaler.state_dict()).",
        )
        return


def ranks_differ(facts: Facts) -> Iterator[Finding]:
    """Ranks use different loss scales in the same step."""
    history = facts.history
    evidence: tuple[Evidence, ...] = ()
    first: int | None = None
    count = history.scale_disagreements
    values = ""
    if count >= 3 and history.first_disagreement is not None:
        step, line, values = history.first_disagreement
        first = step
        evidence = (Evidence(f"loss scales {values} in step {step}", step, line or None),)
    else:
        pair = _messages_differ(history.rank_scales)
        if pair is None:
            return
        values, count = pair
        evidence = (Evidence(values, None, None),)
    yield Finding(
        "loss-scale-not-synchronised",
        f"Ranks use different loss scales ({values}; {count} times): each rank judges overflow by its own gradients, "
        "so that some apply an update that others skip and the replicas drift apart.",
        "error",
        "high" if count >= 5 else "medium",
        "the ranks print different scales for the same step",
        first,
        facts.history.totals.last_step,
        "",
        evidence + _rank_rows(facts, first),
        "Reduce the overflow flag over all ranks before the scaler is updated (AllReduce with SUM or MAX of the flag; "
        "TrainOneStepWithLossScaleCell does it when the parallel mode is set before it is built), and check after the "
        "gradients are reduced, not before.",
        "ampdebug diagnose of the directory with all ranks' runs",
    )


def _messages_differ(rank_scales: dict[int, list[tuple[int, float]]]) -> tuple[str, int] | None:
    """Overflow messages per rank, in order: their number and scales must agree."""
    ranks = sorted(rank_scales)
    if len(ranks) < 2:
        return None
    main = rank_scales[ranks[0]]
    for rank in ranks[1:]:
        other = rank_scales[rank]
        by_place = dict(other)
        differ = sum(1 for place, scale in main if place in by_place and by_place[place] != scale)
        if differ >= 3:
            place, scale = next((p, s) for p, s in main if p in by_place and by_place[p] != s)
            return f"rank {ranks[0]} {scale:g}, rank {rank} {by_place[place]:g}", differ
    return None


def _rank_rows(facts: Facts, step: int | None) -> tuple[Evidence, ...]:
    if step is None:
        return ()
    return rows([r for r in facts.logged if r.step.step == step], 2)
