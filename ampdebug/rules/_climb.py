"""Whether a series of losses climbs at its end: a statement about numbers, on which the rule of divergence rests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise


def median_filter(values: Sequence[float], width: int = 5) -> list[float]:
    """Running median over the last ``width`` values."""
    return [statistics.median(values[max(0, place - width + 1) : place + 1]) for place in range(len(values))]


def climb(values: Sequence[float], *, before_nan: bool) -> tuple[int, float, float] | None:
    """Where the climb began that ends the series, its level and the last level; None where it does not climb.

    Levels are running medians, so that a single spike or the noise of single batches is no climb.

    Args:
        values: Finite losses in order.
        before_nan: NaN comes after them: then less of a climb is enough.
    """
    if len(values) < (8 if before_nan else 16):
        return None
    smooth = median_filter(values, 5 if len(values) >= 20 else 3)
    # The last values count more than a median of five lets them: the climb may be short in a coarse log.
    end = max(smooth[-1], statistics.median(values[-3:]))
    low_at = min(range(len(smooth)), key=smooth.__getitem__)
    # The most recent place that is as low as the lowest (the climb starts at its end, not at its beginning).
    low = smooth[low_at]
    # Noise is measured before the climb: in it, every step is large.
    calm = smooth[: max(low_at + 1, 4)]
    noise = statistics.median(abs(b - a) for a, b in pairwise(calm))
    for place in range(len(smooth) - 1, low_at, -1):
        if smooth[place] <= low + 2 * noise:
            low_at = place
            break
    rises = smooth[low_at:]
    if len(rises) < 4:
        return None
    raw = values[max(low_at - 2, 0) :]
    spread = statistics.median(abs(v - s) for v, s in zip(values[: low_at + 4], smooth, strict=False))
    rise = end - low
    if rise <= max(6 * spread, (3 if before_nan else 6) * noise) or raw[-1] < low + 0.5 * rise:
        return None
    first = statistics.median(values[:5])
    ups = sum(b > a for a, b in pairwise(rises)) / (len(rises) - 1)
    if low <= 0:
        # No factor says how far a loss has climbed that may be negative: it must go well beyond where it came from.
        far = rise > 2 * max(max(smooth[: low_at + 1]) - low, 8 * spread) and ups >= 0.5
    elif before_nan:
        far = end >= 1.5 * low and ups >= 0.5
    else:
        far = (end >= 3.0 * low and end > 2.0 * first and ups >= 0.5) or _lost(smooth, first, low, end)
    return (low_at, low, end) if far and _climbs_once(smooth, low, rise) else None


def _lost(smooth: list[float], first: float, low: float, end: float) -> bool:
    """What had been learnt is gone for good: the loss is back near its first level, and stays there."""
    if first < 1.5 * low or end < 1.8 * low or end - low < 0.45 * (first - low):
        return False
    tail = smooth[-max(10, len(smooth) // 12) :]
    stayed = sum(value <= low + 0.3 * (end - low) for value in smooth)
    return len(smooth) >= 40 and min(tail) > low + 0.5 * (end - low) and stayed >= max(5, len(smooth) // 20)


def _climbs_once(smooth: list[float], low: float, rise: float) -> bool:
    """The loss did not go up and down like that before: one that wanders (of a GAN, of a policy) does all the time."""
    down, climbs = False, 0
    for value in smooth:
        if value <= low + 0.3 * rise:
            down = True
        elif down and value >= low + 0.7 * rise:
            down = False
            climbs += 1
    return climbs <= 1


__all__ = ["climb", "median_filter"]
