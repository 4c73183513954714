"""Rules about a loss that grows: plain divergence, and spikes that heal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from ampdebug.rules._climb import median_filter
from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Finding, rows
from ampdebug.rules._story import nan_story


def divergence(facts: Facts) -> Iterator[Finding]:
    """The loss climbs over many records before it is NaN, or climbs far and does not come back."""
    climb = facts.rising
    if climb is None or (facts.onset is not None and nan_story(facts) != "divergence"):
        return
    start, low, end = climb
    onset = facts.onset
    rate = start.step.learning_rate
    rates = [r.step.learning_rate for r in facts.before if r.step.learning_rate is not None]
    growing = rate is not None and bool(rates) and rates[-1] > 1.05 * rates[0]
    lr = f" The learning rate was {rate:.4g} when the climb began" if rate is not None else ""
    if lr and growing:
        lr += f", warming up to {max(rates):.4g}"
    lr += "." if lr else ""
    level = facts.history.facts.get("level")
    off = " Mixed precision is off (O0), so it has no part in this." if level == "O0" else ""
    climbing = [r for r in facts.before if facts.place(r) >= facts.place(start)]
    after = f" before it is NaN at step {onset.step.step}" if onset is not None else " and does not come back"
    last = facts.tail[-1].step.step if onset is not None else climbing[-1].step.step
    yield Finding(
        "divergence-learning-rate",
        f"The loss climbs from {low:.4g} (step {start.step.step}) to {end:.4g} over {len(climbing)} logged "
        f"steps{after}: plain divergence of the training, not a matter of number formats.{lr}{off}",
        "error" if onset is not None else "warning",
        "high" if len(climbing) >= 8 else "medium",
        f"the climb is spread over {len(climbing)} logged steps with finite numbers",
        start.step.step,
        last,
        "",
        rows([start, *climbing[1 : -1 : max(1, len(climbing) // 4)], climbing[-1], onset]),
        "Lower the learning rate or lengthen its warm-up"
        + (
            " (for fewer devices or a smaller batch than the recipe's, scale the rate down in proportion)"
            if growing or off
            else ""
        )
        + ", clip the gradient norm, and restart from a checkpoint before the climb.",
        "ampdebug diagnose of the same run at level O0: it diverges there too",
        (),
        (
            "forward-overflow-scale-independent",
            "scale-oscillates-window-too-short",
            "every-update-dropped",
            "scale-below-one",
            "scale-never-grows",
            "loss-spike-recovered",
            "overflow-frequent",
            "grad-norm-proportional-to-loss-scale",
            "updates-applied-on-overflow",
        ),
    )


def spike_recovered(facts: Facts) -> Iterator[Finding]:
    """A loss far above its surroundings, or a NaN, after which everything is as before."""
    losses = [r for r in facts.losses if facts.onset is None or r.segment != facts.onset.segment or not r.bad_loss]
    if len(losses) < 12:
        return
    values = [float(r.step.loss if r.step.loss is not None else math.nan) for r in losses]
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 12:
        return
    smooth = median_filter([v if math.isfinite(v) else finite[0] for v in values], 9)
    level = [abs(v - s) for v, s in zip(values, smooth, strict=True) if math.isfinite(v)]
    spread = statistics.median(level)
    spikes = []
    for place in range(5, len(values) - 3):
        value = values[place]
        around = smooth[place - 1]
        later = statistics.median(v if math.isfinite(v) else math.inf for v in values[place + 1 : place + 8])
        if math.isfinite(value):
            if not (value > 2 * around + 10 * spread and around > 0 and later < 1.2 * around + 5 * spread):
                continue
        elif not later < 1.2 * around + 5 * spread:
            continue
        spikes.append(losses[place])
    if not spikes:
        return
    first, last = spikes[0].step.step, spikes[-1].step.step
    finite_spikes = sum(not r.bad_loss for r in spikes)
    kinds = ("spike", "spikes") if finite_spikes == len(spikes) else ("non-finite loss", "non-finite losses")
    yield Finding(
        "loss-spike-recovered",
        f"{len(spikes)} {kinds[len(spikes) > 1]} (first at step {first}) after which the loss is back where it was.",
        "note",
        "high",
        "the losses after it are on the level of those before it",
        first,
        last,
        "",
        rows(spikes[:4]),
        "Nothing needs to be done. If spikes become frequent, look at the batches concerned or clip the gradient norm.",
    )
