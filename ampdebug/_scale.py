"""What another loss-scale policy would have done: replay recorded gradients under it.

The rules are those of the frameworks; each policy's docstring says whose.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._errors import ArgumentError
from ampdebug._scale_policies import DeepSpeedScale, DynamicScale, ScalePolicy, StaticScale, TorchScale
from ampdebug.rules._timeline import sparkline

__all__ = [
    "DEFAULT_POLICIES",
    "DeepSpeedScale",
    "DynamicScale",
    "ScalePolicy",
    "ScaleReplay",
    "ScaleSimulation",
    "StaticScale",
    "TorchScale",
    "simulate_scale",
]

FLOAT16_OVERFLOW = 65520.0
"""Smallest magnitude that rounds to infinity in float16 (halfway from 65504 to what would be 65536)."""

FLUSH_EXPONENT = -25
"""Magnitudes of at most 2**-25 round to zero in float16 (half of the smallest subnormal, ties to even)."""


DEFAULT_POLICIES: tuple[ScalePolicy, ...] = (
    StaticScale(1024.0),
    DynamicScale(2.0**16, window=1000),
    DynamicScale(2.0**12, window=1000),
    DynamicScale(2.0**16, window=100),
    TorchScale(),
    DeepSpeedScale(),
)


@dataclass(frozen=True)
class ScaleReplay:
    """What one policy would have done.

    Attributes:
        policy: Its name.
        steps: Steps replayed.
        skipped: Numbers of the steps that would have overflowed and been skipped, from 1.
        first_scale, last_scale, lowest_scale, highest_scale: The scale.
        flushed_share: Mean share of nonzero gradient elements that float16 would have flushed to zero, over the steps
            that were not skipped; None where no exponents were given.
        scales: The scale used in each step, float64 [steps].
    """

    policy: str
    steps: int
    skipped: tuple[int, ...]
    first_scale: float
    last_scale: float
    lowest_scale: float
    highest_scale: float
    flushed_share: float | None
    scales: npt.NDArray[np.float64] = field(repr=False, compare=False)

    @property
    def overflow_rate(self) -> float:
        """Share of the steps that would have been skipped."""
        return len(self.skipped) / self.steps if self.steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the scale of each step."""
        return {
            "policy": self.policy,
            "steps": self.steps,
            "skipped": list(self.skipped),
            "overflow_rate": self.overflow_rate,
            "first_scale": self.first_scale,
            "last_scale": self.last_scale,
            "lowest_scale": self.lowest_scale,
            "highest_scale": self.highest_scale,
            "flushed_share": self.flushed_share,
        }


@dataclass(frozen=True)
class ScaleSimulation:
    """Replays of several policies over the same gradients, in the order given; ``str()`` is the table."""

    replays: tuple[ScaleReplay, ...]

    def best(self) -> ScaleReplay:
        """The policy that flushes least among those that skip at most twice as many steps (and 5) as the best of all.

        Where nothing is known of flushing, the highest median scale stands for it.
        """
        fewest = min(len(r.skipped) for r in self.replays)
        fair = [r for r in self.replays if len(r.skipped) <= max(2 * fewest, fewest + 5)]
        if all(r.flushed_share is not None for r in fair):
            return min(fair, key=lambda r: (r.flushed_share or 0.0, len(r.skipped)))
        return max(fair, key=lambda r: (float(np.median(r.scales)) if r.steps else 0.0, -len(r.skipped)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"replays": [replay.to_dict() for replay in self.replays], "best": self.best().policy}

    def draw(self) -> npt.NDArray[np.uint8]:
        """The scale and the skipped steps of each policy as a picture, uint8 RGB [height, width, 3]."""
        from ampdebug.report.scale_chart import draw_replays

        return draw_replays(
            max(r.steps for r in self.replays), [(r.policy, r.scales.tolist(), r.skipped) for r in self.replays]
        )

    def write_tensorboard(self, logdir: str | os.PathLike[str]) -> Path:
        """Write the picture and the table to a TensorBoard event file.

        Args:
            logdir: Directory for the event file, made if missing.

        Returns:
            The file.

        Raises:
            ArgumentError: The directory holds event files already.
            StoreError: It cannot be written.
        """
        from ampdebug.report.event_file import EventFile

        file = EventFile(Path(logdir), append=False)
        try:
            table = "\n".join(f"    {line}" for line in str(self).splitlines())
            file.write(
                0, [file.image("simulated-loss-scale", self.draw()), file.text("simulated-loss-scale-table", table)]
            )
        finally:
            file.close()
        return file.path

    def __str__(self) -> str:
        width = max(len(r.policy) for r in self.replays)
        lines = [f"{'policy':{width}}  skipped     rate   flushed      lowest     highest  scale over the steps"]
        for r in self.replays:
            flushed = f"{100 * r.flushed_share:7.3f} %" if r.flushed_share is not None else "unknown  "
            lines.append(
                f"{r.policy:{width}}  {len(r.skipped):7d} {100 * r.overflow_rate:6.2f} % {flushed:>9} "
                f"{r.lowest_scale:11.5g} {r.highest_scale:11.5g}  {_line(r.scales)}"
            )
        lines.append(f"Fewest flushed at few skipped steps: {self.best().policy}.")
        return "\n".join(lines)


def _line(scales: npt.NDArray[np.float64], width: int = 40) -> str:
    if not len(scales):
        return ""
    places = np.linspace(0, len(scales) - 1, min(width, len(scales))).round().astype(int)
    logs = [math.log2(scales[place]) for place in places]
    return sparkline(logs, low=min(logs) - 0.5, high=max(logs) + 0.5)


def simulate_scale(
    absmax: Iterable[float] | npt.NDArray[Any],
    *,
    exponents: npt.NDArray[Any] | None = None,
    policies: Sequence[ScalePolicy] = DEFAULT_POLICIES,
) -> ScaleSimulation:
    """Replay loss-scale policies over recorded gradients.

    A step overflows when ``absmax * scale`` reaches float16's infinity. The gradients are taken as they were recorded:
    a step that another policy would have skipped is replayed as if its update had been made, so the answer is exact for
    the first skipped step and an estimate after it.

    Args:
        absmax: Largest magnitude among the *unscaled* gradient elements of each step, float [steps]. NaN or inf: the
            step overflows at every scale.
        exponents: Counts of the unscaled elements by biased float32 exponent, integer [steps, 256]: column ``e`` counts
            the magnitudes in [2**(e-127), 2**(e-126)); zeros are not counted.
        policies: What to replay: ``StaticScale``, ``DynamicScale``, ``TorchScale``, ``DeepSpeedScale`` or your own.

    Returns:
        One replay a policy.

    Raises:
        ArgumentError: No steps, a negative magnitude, no policies, or ``exponents`` of another shape.

    Example:
        >>> sim = simulate_scale([0.5] * 100, policies=[StaticScale(1024.0), StaticScale(2.0**20)])
        >>> [len(replay.skipped) for replay in sim.replays]
        [0, 100]
    """
    largest = np.asarray(list(absmax) if not isinstance(absmax, np.ndarray) else absmax, dtype=np.float64)
    if largest.ndim != 1 or largest.size == 0:
        raise ArgumentError(f"absmax has shape {largest.shape}; give one number for each of at least one step")
    if (largest < 0).any():
        raise ArgumentError(f"absmax[{int(np.argmax(largest < 0))}] is negative; give magnitudes")
    if not policies:
        raise ArgumentError("policies is empty; give at least one, such as DynamicScale(2.0**12, window=1000)")
    counts: npt.NDArray[np.float64] | None = None
    if exponents is not None:
        counts = np.asarray(exponents, dtype=np.float64)
        if counts.shape != (largest.size, 256):
            raise ArgumentError(
                f"exponents has shape {counts.shape}; it must be ({largest.size}, 256), a row for each step"
            )
    return ScaleSimulation(tuple(_replay(policy, largest, counts) for policy in policies))


def _replay(
    policy: ScalePolicy, largest: npt.NDArray[np.float64], counts: npt.NDArray[np.float64] | None
) -> ScaleReplay:
    scale = policy.first()
    scales = np.empty(largest.size, dtype=np.float64)
    skipped: list[int] = []
    below = np.cumsum(counts, axis=1) if counts is not None else None
    shares: list[float] = []
    for place, value in enumerate(largest.tolist()):
        scales[place] = scale
        overflow = not (value * scale < FLOAT16_OVERFLOW)
        if overflow:
            skipped.append(place + 1)
        elif below is not None and below[place, -1] > 0:
            # Bin e is flushed whole when its upper end times the scale is at most 2**-25: e - 126 + log2(scale) <= -25.
            top = math.floor(FLUSH_EXPONENT + 126 - math.log2(scale)) if scale > 0 else 255
            flushed = float(below[place, min(top, 255)]) if top >= 0 else 0.0
            elements = float(below[place, -1])
            shares.append(flushed / elements)
        scale = policy.next(scale, overflow=overflow)
    return ScaleReplay(
        policy.name,
        largest.size,
        tuple(skipped),
        float(scales[0]),
        float(scales[-1]),
        float(scales.min()),
        float(scales.max()),
        (math.fsum(shares) / len(shares) if shares else 0.0) if counts is not None else None,
        scales,
    )
