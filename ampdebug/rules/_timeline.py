"""A picture in text: loss scale, overflows and loss over the steps, on one time axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdebug.rules._history import History, Record

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], *, low: float | None = None, high: float | None = None) -> str:
    """One character a value: a bar for a finite one, ``×`` for a non-finite one, a space for None.

    Args:
        values: The values, already as many as there shall be characters.
        low: Value of the lowest bar; None takes the smallest finite value.
        high: Value of the highest bar.
    """
    finite = [v for v in values if v is not None and math.isfinite(v)]
    bottom = min(finite, default=0.0) if low is None else low
    top = max(finite, default=0.0) if high is None else high
    result = []
    for value in values:
        if value is None:
            result.append(" ")
        elif not math.isfinite(value):
            result.append("×")
        elif top <= bottom:
            result.append(_BARS[0])
        else:
            share = (min(max(value, bottom), top) - bottom) / (top - bottom)
            result.append(_BARS[min(len(_BARS) - 1, int(share * len(_BARS)))])
    return "".join(result)


def timeline(history: History, width: int = 60) -> tuple[str, ...]:
    """Lines for a report: loss (linear), loss scale (powers of two), overflowed steps; those that are known.

    Args:
        history: What happened.
        width: Characters on the time axis.
    """
    records = history.records
    if len(records) < 8:
        return ()
    bins: list[list[Record]] = [[] for _ in range(min(width, len(records)))]
    for place, record in enumerate(records):
        bins[place * len(bins) // len(records)].append(record)
    lines = []
    losses = [_worst([r.step.loss for r in part if r.step.loss is not None]) for part in bins]
    if any(v is not None for v in losses):
        finite = [v for v in losses if v is not None and math.isfinite(v)]
        span = f"{finite[0]:.4g} → {finite[-1]:.4g}" if finite else "never finite"
        lines.append(f"loss      {sparkline(losses)}  {span}")
    scales: list[float | None] = []
    for part in bins:
        known = [r.scale for r in part if r.scale is not None and r.scale > 0]
        scales.append(math.log2(known[-1]) if known else None)
    known_scales = [v for v in scales if v is not None]
    if known_scales and (min(known_scales) != max(known_scales) or known_scales[0] != 0.0):
        every = [r.scale for r in records if r.scale is not None and r.scale > 0]
        ends = math.log2(every[0]), math.log2(every[-1])
        lines.append(f"scale     {sparkline(scales)}  2**{ends[0]:.3g} → 2**{ends[1]:.3g}")
    if any(r.bad_gradient for r in records):
        lines.append("overflow  " + "".join("│" if any(r.bad_gradient for r in part) else "·" for part in bins))
    return tuple(lines)


def _worst(values: list[float]) -> float | None:
    if not values:
        return None
    bad = [v for v in values if not math.isfinite(v)]
    return bad[0] if bad else sorted(values)[len(values) // 2]
