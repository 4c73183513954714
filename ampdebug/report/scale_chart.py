"""Loss, loss scale and overflows over the steps as one picture, on one time axis.

Three panels below each other: the loss (a range for each column, red where it was not finite), the loss scale (in
powers of two), and the overflowed steps as ticks. The colours are told apart with every common kind of colour
blindness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ampdebug._records import Step
from ampdebug.report._font import HEIGHT, WIDTH, text_mask

Image = npt.NDArray[np.uint8]

_WHITE, _INK, _GRID = (255, 255, 255), (36, 41, 47), (226, 229, 233)
_LOSS, _SCALE, _BAD = (0, 114, 178), (230, 159, 0), (213, 94, 0)  # Okabe-Ito: blue, orange, vermilion
_LEFT, _RIGHT, _TOP = 10 * WIDTH, 8, 4
_PIXELS = 2  # of one column
_PANELS = (("loss", 90), ("scale", 90), ("overflow", 16))
_GAP = HEIGHT + 5
COLUMNS = 300


@dataclass(slots=True)
class _Column:
    first: int
    last: int
    losses: tuple[float, float] | None = None
    bad_loss: bool = False
    scales: tuple[float, float] | None = None
    overflows: int = 0


@dataclass
class ScaleChart:
    """Collects the scalars of a run, step by step, and draws them; it does not grow with the steps.

    Attributes:
        title: Written above.
        columns: At most this many; neighbours share one where there are more steps.
    """

    title: str = "loss, loss scale and overflows"
    columns: int = COLUMNS
    _kept: list[_Column] = field(default_factory=list, repr=False)
    _each: int = field(default=1, repr=False)
    _in_last: int = field(default=0, repr=False)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, step: Step) -> None:
        """Take in one step's loss, loss scale and overflow; what is unknown is left out."""
        scale = step.loss_scale if step.loss_scale is not None else step.loss_scale_after
        self.see(step.step, loss=step.loss, scale=scale, overflow=bool(step.overflow or step.nonfinite_gradients))

    def see(self, step: int, *, loss: float | None = None, scale: float | None = None, overflow: bool = False) -> None:
        """The same from plain numbers. Scales that are not above 0 are left out."""
        fresh = _Column(step, step, overflows=int(overflow))
        if loss is not None:
            fresh.bad_loss = not math.isfinite(loss)
            fresh.losses = None if fresh.bad_loss else (loss, loss)
        if scale is not None and 0 < scale < math.inf:
            fresh.scales = (math.log2(scale), math.log2(scale))
        if self._kept and self._in_last < self._each:
            self._kept[-1] = _merged(self._kept[-1], fresh)
            self._in_last += 1
            return
        self._kept.append(fresh)
        self._in_last = 1
        if len(self._kept) > self.columns:
            odd = self._kept[-1:] if len(self._kept) % 2 else []
            pairs = zip(self._kept[0::2], self._kept[1::2], strict=False)
            self._kept = [_merged(left, right) for left, right in pairs] + odd
            self._in_last = 1 if odd else self._each + 1
            self._each *= 2

    @property
    def tells(self) -> bool:
        """There is something to draw: two columns at least, and a loss scale or an overflow among them."""
        return len(self._kept) > 1 and any(c.scales is not None or c.overflows for c in self._kept)

    def draw(self) -> Image:
        """Return the picture, uint8 RGB ``[height, width, 3]``."""
        width = _LEFT + max(_PIXELS * max(len(self._kept), 60), WIDTH * len(self.title)) + _RIGHT
        height = _TOP + HEIGHT + sum(size + _GAP for _, size in _PANELS) + HEIGHT
        picture = np.full((height, width, 3), _WHITE, np.uint8)
        _write(picture, _LEFT, _TOP, self.title)
        top = _TOP + HEIGHT + 2
        for name, size in _PANELS:
            self._panel(picture, name, top, size)
            top += size + _GAP
        if self._kept:
            steps = f"step {self._kept[0].first} to {self._kept[-1].last}"
            _write(picture, _LEFT, top - _GAP + 4, steps)
        return picture

    def _panel(self, picture: Image, name: str, top: int, size: int) -> None:
        right = _LEFT + _PIXELS * max(len(self._kept), 60)
        picture[top : top + size, _LEFT:right] = (250, 250, 251)
        picture[top + size, _LEFT - 1 : right] = _INK
        _write(picture, 0, top + size // 2 - HEIGHT // 2, name)
        if name == "overflow":
            for place, column in enumerate(self._kept):
                if column.overflows:
                    at = _LEFT + _PIXELS * place
                    picture[top : top + size, at : at + _PIXELS] = _BAD
            return
        ranges = [c.losses if name == "loss" else c.scales for c in self._kept]
        known = [r for r in ranges if r is not None]
        bad = [name == "loss" and c.bad_loss for c in self._kept]
        if known:
            low, high = min(r[0] for r in known), max(r[1] for r in known)
            if name == "scale":
                low, high = math.floor(low) - 0.5, math.ceil(high) + 0.5
                for power in range(math.ceil(low), math.floor(high) + 1):
                    if (high - low) <= 24 or power % 4 == 0:
                        picture[_at(power, low, high, top, size), _LEFT:right] = _GRID
            label = (
                (f"2**{high - 0.5:.0f}", f"2**{low + 0.5:.0f}") if name == "scale" else (f"{high:.4g}", f"{low:.4g}")
            )
            _write(picture, 0, top, label[0])
            _write(picture, 0, top + size - HEIGHT + 1, label[1])
            color = _LOSS if name == "loss" else _SCALE
            before: int | None = None
            for place, span in enumerate(ranges):
                if span is None:
                    before = None
                    continue
                a, b = _at(span[1], low, high, top, size), _at(span[0], low, high, top, size)
                at = _LEFT + _PIXELS * place
                begin, end = (a, b) if before is None else (min(a, before), max(b, before))
                picture[begin : end + 1, at : at + 1] = color
                picture[a : b + 1, at : at + _PIXELS] = color
                before = b
        for place, wrong in enumerate(bad):
            if wrong:
                at = _LEFT + _PIXELS * place
                picture[top : top + 6, at : at + _PIXELS] = _BAD


def draw_replays(steps: int, replays: Sequence[tuple[str, Sequence[float], Sequence[int]]]) -> Image:
    """The loss scale and the skipped steps of several replayed policies, one below the other.

    Args:
        steps: Steps replayed.
        replays: ``(policy, scale of each step, numbers of the skipped steps from 1)``.

    Returns:
        uint8 RGB ``[height, width, 3]``.
    """
    pictures = []
    for name, scales, skipped in replays:
        chart = ScaleChart(f"{name}: {len(skipped)} of {steps} steps skipped")
        missed = set(skipped)
        for number, scale in enumerate(scales, 1):
            chart.see(number, scale=scale, overflow=number in missed)
        whole = chart.draw()
        # No losses here: cut their panel out.
        head, panel = _TOP + HEIGHT + 2, _PANELS[0][1] + _GAP
        pictures.append(np.concatenate([whole[:head], whole[head + panel :]]))
    width = max(picture.shape[1] for picture in pictures)
    return np.concatenate([np.pad(p, ((0, 6), (0, width - p.shape[1]), (0, 0)), constant_values=255) for p in pictures])


def _merged(left: _Column, right: _Column) -> _Column:
    return _Column(
        left.first,
        right.last,
        _span(left.losses, right.losses),
        left.bad_loss or right.bad_loss,
        _span(left.scales, right.scales),
        left.overflows + right.overflows,
    )


def _span(a: tuple[float, float] | None, b: tuple[float, float] | None) -> tuple[float, float] | None:
    if a is None or b is None:
        return a if b is None else b
    return min(a[0], b[0]), max(a[1], b[1])


def _at(value: float, low: float, high: float, top: int, size: int) -> int:
    share = 0.5 if high <= low else (value - low) / (high - low)
    return top + size - 2 - round(share * (size - 4))


def _write(picture: Image, x: int, y: int, text: str) -> None:
    mask = text_mask(text[: max(0, (picture.shape[1] - x) // WIDTH)])
    picture[y : y + mask.shape[0], x : x + mask.shape[1]][mask] = _INK
