"""Rule: the same batch of every epoch makes the step fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Finding, rows
from ampdebug.rules._history import Record


def same_batch(facts: Facts) -> Iterator[Finding]:
    """Non-finite steps return at the same place of each epoch, and the steps between are good."""
    bad = [r for r in facts.records if (r.bad_loss or r.bad_gradient) and not r.between]
    searched = {id(r) for r in facts.search if not r.bad_loss}
    bad = [r for r in bad if id(r) not in searched]
    if len(bad) < 3 or len(facts.clean) < len(bad) or facts.onset is not None:
        return
    place = _by_epoch(bad) or _by_period(facts, bad)
    if place is None:
        return
    where, hits, period = place
    if not any(r.bad_loss for r in hits) and _follow_growth(facts, hits):
        return
    first, last = hits[0].step.step, hits[-1].step.step
    each = f"step {where} of each epoch" if where is not None else f"every {period} steps"
    length = f" of {period} steps" if where is not None and period else ""
    scale = "at an unchanged loss scale" if facts.static else "at whatever loss scale"
    dropped = any(r.step.update_skipped for r in hits)
    loss = any(r.bad_loss for r in hits)
    what = "The loss is NaN" if loss else "The gradients overflow"
    yield Finding(
        "periodic-nan-same-batch",
        f"{what} only at {each}{length}, {len(hits)} times, {scale}, and the next step is normal again"
        + (" (the update was dropped)" if dropped else "")
        + ": one and the same batch returns each epoch (the data is not shuffled) and holds a bad sample.",
        "error" if loss else "warning",
        "high" if where is not None and len(hits) >= 3 else "medium",
        f"{len(hits)} of {len(bad)} bad steps are at this place, in {len({r.step.epoch for r in hits})} epochs"
        if where is not None
        else f"{len(hits)} bad steps at equal distances",
        first,
        last,
        f"step {where} of the epoch" if where is not None else "",
        rows([*hits[:4], hits[-1]]),
        f"Inspect the samples of batch {where if where is not None else (first - 1) % (period or 1) + 1}: NaN or inf "
        "values, an empty target, a label out of range, a constant image under min-max normalisation. Check with "
        "np.isfinite over the loader's output.",
        "ampdebug.watch over that step: it says whether the input itself is not finite",
        (),
        (
            "loss-nan-in-some-steps",
            "loss-spike-recovered",
            "overflow-frequent",
            "scale-oscillates-window-too-short",
            "loss-nan-cause-unknown",
        ),
    )


def _by_epoch(bad: list[Record]) -> tuple[int | None, list[Record], int] | None:
    known = [r for r in bad if r.step.epoch is not None and r.step.epoch_step is not None]
    if len(known) < 3:
        return None
    places = Counter(r.step.epoch_step for r in known)
    common, _ = places.most_common(1)[0]
    hits = [r for r in known if r.step.epoch_step == common]
    epochs = {r.step.epoch for r in hits}
    few = len({p for p, n in places.items() if n >= 3}) <= 3
    regular = sum(n for n in places.values() if n >= 3)
    if len(epochs) < 3 or regular < 0.8 * len(known) or not few:
        return None
    gaps = [
        (b.step.step - a.step.step) // max((b.step.epoch or 0) - (a.step.epoch or 0), 1)
        for a, b in pairwise(hits)
        if (b.step.epoch or 0) > (a.step.epoch or 0)
    ]
    return common, hits, gaps[0] if gaps else 0


def _by_period(facts: Facts, bad: list[Record]) -> tuple[int | None, list[Record], int] | None:
    """Equal distances, where the epochs are not printed. Only NaN losses count: a scaler has its own rhythm."""
    if facts.history.counts_lines or facts.interval != 1:
        return None
    hits = [r for r in bad if r.bad_loss]
    if len(hits) < 4:
        return None
    gaps = [b.step.step - a.step.step for a, b in pairwise(hits)]
    unit = math.gcd(*gaps)
    if unit < 5 or sum(g == unit for g in gaps) < 0.8 * len(gaps):
        return None
    return None, hits, unit


def _follow_growth(facts: Facts, hits: list[Record]) -> bool:
    """Most of them come within a few steps after the scale grew: that is the scaler's rhythm, not a batch's."""
    after = 0
    hits = hits[:100]  # enough to tell, and each looks at the records before it
    for record in hits:
        scale = record.scale
        recent = [
            r
            for r in facts.scaled
            if r.segment == record.segment and 0 < record.step.step - r.step.step <= max(50, 5 * facts.interval)
        ]
        if scale is not None and any((r.scale or 0.0) < scale for r in recent):
            after += 1
    return after >= 0.6 * len(hits)
