"""What the rules read: the steps of a run, digested in one pass with bounded memory.

A log of a gigabyte holds millions of steps. Counts and extremes are kept exactly; of the steps themselves every
*remarkable* one (overflow, a non-finite number, a change of the loss scale, a restart) is kept up to a cap, with the
step before it, and the plain ones are thinned out evenly once there are too many. A rule must therefore reason with
step numbers and counts, never with "the next record is the next step".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ampdebug._records import Event, Step

PLAIN_CAP = 30_000
REMARKABLE_CAP = 30_000
TEXT_LIMIT = 240


@dataclass(slots=True)
class Record:
    """One step as a run or a log tells it.

    Attributes:
        step: The scalars.
        line: Line number in the log, counted from 1; 0 where there is no log.
        text: The line itself, cut to ``TEXT_LIMIT`` bytes.
        segment: 0, then one more after each restart.
        between: It stands for an overflow message without a step of its own: ``step.step`` is the last step that was
            logged before it.
        applied: The message says that the overflowed update was made nevertheless.
        count: How many overflowed steps it stands for.
        loss_missing: The loss field vanished, which this format does for NaN.
        rank: As printed; None where it was not.
        remarkable: Something is to be seen in it; set by ``History.add``.
    """

    step: Step
    line: int = 0
    text: bytes = b""
    segment: int = 0
    between: bool = False
    applied: bool = False
    count: int = 0
    loss_missing: bool = False
    rank: int | None = None
    remarkable: bool = False

    @property
    def bad_loss(self) -> bool:
        """The loss is NaN or infinite."""
        loss = self.step.loss
        return loss is not None and not math.isfinite(loss)

    @property
    def bad_gradient(self) -> bool:
        """Something says that a gradient was NaN or infinite."""
        step = self.step
        if step.overflow or step.nonfinite_gradients:
            return True
        norm = step.grad_norm
        return norm is not None and not math.isfinite(norm)

    @property
    def scale(self) -> float | None:
        """The loss scale as printed, whether used in this step or left behind by it."""
        step = self.step
        scale = step.loss_scale if step.loss_scale is not None else step.loss_scale_after
        # A damaged line can say anything; a scale that is negative or no number says nothing.
        return scale if scale is not None and 0.0 <= scale < math.inf else None


@dataclass(frozen=True, slots=True)
class Mark:
    """A line that is no step: a resume, an error, a setting.

    Attributes:
        kind: See ``ampdebug.logs`` markers.
        step: The last step before it, 0 before the first.
        line: Line number, 0 where there is no log.
        text: The line, cut.
        index: How many records had been seen by then.
        detail: What was read from it.
    """

    kind: str
    step: int
    line: int
    text: bytes
    index: int
    detail: str = ""


@dataclass(slots=True)
class Totals:
    """Exact counts over everything that was seen."""

    records: int = 0
    logged: int = 0
    overflows: int = 0
    overflow_known: int = 0
    bad_losses: int = 0
    losses: int = 0
    scales: int = 0
    norms: int = 0
    first_step: int | None = None
    last_step: int | None = None


@dataclass
class History:
    """The digest. ``add`` takes the steps in the order they happened.

    Attributes:
        name: What was read, for the report.
        records: The kept records in order, overflow messages between steps included.
        marks: Lines that are no steps, at most 2,000 a kind.
        totals: Exact counts.
        drops_nan_loss, filters_nan_loss, loss_decimals, counts_lines, prints_overflow, scale_meaning: What is known of
            the format; see ``LogFormat``. ``counts_lines``: there are no step numbers, a step is a line.
        rank_scales: ``{rank: [(ordinal or step, scale)]}``, for the first 10,000 of each rank.
        parameter_norms: Names of parameters whose logged norm was not finite, first first.
        events: Events of a monitor's run.
        facts: What else is known (AMP level, cells), by name.
        exact: Nothing was thinned out.
    """

    name: str = ""
    records: list[Record] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    drops_nan_loss: bool = False
    filters_nan_loss: bool = False
    loss_decimals: int | None = None
    counts_lines: bool = False
    prints_overflow: bool = False
    scale_meaning: str = "unknown"
    rank_scales: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    scale_disagreements: int = 0
    first_disagreement: tuple[int, int, str] | None = None
    parameter_norms: list[tuple[str, int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    segment: int = 0
    _stride: int = 1
    _plain: int = 0
    _remarkable: int = 0
    _plain_seen: int = 0
    _previous: Record | None = None
    _previous_kept: bool = True
    _previous_segment: int = 0
    _make_previous: Callable[[], Record] | None = None
    _last_scale: float | None = None
    _mark_counts: dict[str, int] = field(default_factory=dict)
    _last_few: deque[Record] = field(default_factory=lambda: deque(maxlen=64))

    def add(self, record: Record) -> None:
        """Take in the next record."""
        step = record.step
        totals = self.totals
        totals.records += 1
        record.segment = self.segment
        remarkable = False
        loss = step.loss
        if loss is not None:
            totals.losses += 1
            if loss - loss != 0.0:  # NaN or infinite; twice as fast as math.isfinite
                totals.bad_losses += 1
                remarkable = True
        if step.grad_norm is not None:
            totals.norms += 1
            if step.grad_norm - step.grad_norm != 0.0:
                remarkable = True
        overflow = step.overflow
        if overflow is not None:
            totals.overflow_known += 1
            if overflow:
                remarkable = True
                if record.count == 0:
                    record.count = 1
                totals.overflows += record.count
        scale = step.loss_scale if step.loss_scale is not None else step.loss_scale_after
        if scale is not None:
            totals.scales += 1
            if scale != self._last_scale:
                remarkable = True
                self._last_scale = scale
        if not record.between:
            totals.logged += 1
            if totals.first_step is None or step.step < totals.first_step:
                totals.first_step = step.step
            if totals.last_step is None or step.step > totals.last_step:
                totals.last_step = step.step
        self._last_few.append(record)
        if remarkable or step.nonfinite_gradients or totals.records <= 64:
            if not self._previous_kept:
                previous = self._make_previous() if self._make_previous is not None else self._previous
                if previous is not None:
                    previous.segment = self._previous_segment
                    self.records.append(previous)
                    self._plain += 1
            record.remarkable = True
            self.records.append(record)
            self._remarkable += 1
            self._previous_kept = True
            if self._remarkable > REMARKABLE_CAP:
                self._thin(remarkable=True)
        else:
            self._plain_seen += 1
            if self._plain_seen % self._stride == 0:
                self.records.append(record)
                self._plain += 1
                self._previous_kept = True
                if self._plain > PLAIN_CAP:
                    self._thin(remarkable=False)
            else:
                self._previous_kept = False
        self._previous = record
        self._previous_segment = record.segment
        self._make_previous = None

    def skip_plain(self, number: int, *, scale: bool, overflow: bool, norm: bool) -> bool:
        """Count a plain step with a loss that would be thinned out, without a record; False where it is one to keep."""
        if self._stride == 1 or (self._plain_seen + 1) % self._stride == 0:
            return False
        self._plain_seen += 1
        totals = self.totals
        totals.records += 1
        totals.logged += 1
        totals.losses += 1
        totals.scales += scale
        totals.overflow_known += overflow
        totals.norms += norm
        if totals.last_step is None or number > totals.last_step:
            totals.last_step = number
        return True

    def set_previous(self, make: Callable[[], Record]) -> None:
        """How to make the record of the step before the next one, where it was only counted.

        It is made, and kept, if the next one is remarkable.
        """
        self._make_previous = make
        self._previous_segment = self.segment
        self._previous_kept = False

    def _thin(self, *, remarkable: bool) -> None:
        """Drop every other plain (or, beyond the first thousand, every other remarkable) record."""
        self.exact = False
        before = self.records
        kept: list[Record] = []
        turn, head, last = 0, 1000, len(before) - 1
        for place, record in enumerate(before):
            # The step before a remarkable one says what was still good, so it stays as long as that one.
            needed = record.remarkable or (place < last and before[place + 1].remarkable)
            if needed == remarkable:
                if head > 0 and remarkable:
                    head -= 1
                else:
                    turn += 1
                    if turn % 2:
                        continue
            kept.append(record)
        self.records = kept
        self._remarkable = sum(record.remarkable for record in kept)
        self._plain = len(kept) - self._remarkable
        if not remarkable:
            self._stride *= 2
            if 8 * (len(before) - len(kept)) < len(kept):
                # Nearly every plain step stands before a remarkable one: thin those, or this would go on at every step.
                self._thin(remarkable=True)

    def restart(self) -> None:
        """The next record belongs to a new start of the program."""
        if self.totals.records and (self._previous is None or self._previous.segment == self.segment):
            self.segment += 1

    def mark(self, mark: Mark) -> None:
        """Take in a line that is no step."""
        count = self._mark_counts.get(mark.kind, 0) + 1
        self._mark_counts[mark.kind] = count
        if count <= 2000:
            self.marks.append(mark)

    def mark_count(self, kind: str) -> int:
        """How many marks of a kind were seen, those beyond the cap included."""
        return self._mark_counts.get(kind, 0)

    def finish(self) -> None:
        """Close the digest: the very last records are always kept, whatever was thinned out."""
        known = {id(record) for record in self.records[-200:]}
        tail = [record for record in self._last_few if id(record) not in known]
        if tail:
            merged = self.records[-200:] + tail
            order = {id(record): place for place, record in enumerate(self._last_few)}
            merged.sort(key=lambda record: order.get(id(record), -1))
            self.records[-200:] = merged
        self._last_few.clear()
