"""What several rules need to know of a history, computed once: where NaN began, what the scale did, what rose.

Everything here is a statement about the records, not a judgement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cached_property

from ampdebug.rules._climb import climb
from ampdebug.rules._history import History, Mark, Record


def octaves(high: float, low: float) -> float:
    """How many halvings lead from ``high`` to ``low``; infinite when ``low`` is 0."""
    if low <= 0 or high <= 0:
        return math.inf if high > 0 else 0.0
    return math.log2(high) - math.log2(low)


def by_segment(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Records by segment, each in order."""
    result: dict[int, list[Record]] = {}
    for record in records:
        result.setdefault(record.segment, []).append(record)
    return result


class Facts:
    """Views of one history.

    Attributes:
        history: It.
        records: All kept records.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.records = history.records
        self._place = {id(record): place for place, record in enumerate(self.records)}

    def place(self, record: Record) -> int:
        """Index of a record among the kept ones."""
        return self._place[id(record)]

    @cached_property
    def logged(self) -> list[Record]:
        """Records with a step of their own."""
        return [record for record in self.records if not record.between]

    @cached_property
    def losses(self) -> list[Record]:
        """Records whose loss is known."""
        return [record for record in self.logged if record.step.loss is not None]

    @cached_property
    def interval(self) -> int:
        """Usual distance between two logged steps."""
        gaps = [
            b.step.step - a.step.step
            for a, b in zip(self.logged[:2000], self.logged[1:2001], strict=False)
            if b.step.step > a.step.step
        ]
        return max(1, round(statistics.median(gaps))) if gaps else 1

    @cached_property
    def span(self) -> int:
        """Steps from the first to the last one, both counted (for a restarted run, of the numbers seen)."""
        totals = self.history.totals
        if totals.first_step is None or totals.last_step is None:
            return 0
        return totals.last_step - totals.first_step + 1

    def marks(self, kind: str) -> list[Mark]:
        """The marker lines of a kind."""
        return [mark for mark in self.history.marks if mark.kind == kind]

    # --- NaN ---

    @cached_property
    def onset(self) -> Record | None:
        """First record of a run of non-finite losses that lasts to the end of its segment, None where there is none.

        At least two records, or one that ended the program with an error that says so.
        """
        segments = by_segment(self.losses)
        stopped = bool(self.marks("stopped-on-nan") or self.marks("zero-division") or self.marks("scale-floor"))
        for segment in sorted(segments):
            losses = segments[segment]
            start = len(losses)
            while start > 0 and losses[start - 1].bad_loss:
                start -= 1
            tail = len(losses) - start
            if tail >= 2 or (tail == 1 and stopped and segment == max(segments)):
                return losses[start]
        return None

    @cached_property
    def tail(self) -> list[Record]:
        """Records from the onset to the end of its segment."""
        onset = self.onset
        if onset is None:
            return []
        return [r for r in self.records[self.place(onset) :] if r.segment == onset.segment]

    @cached_property
    def before(self) -> list[Record]:
        """Records with a finite loss in the onset's segment, before it (all losses where there is no onset)."""
        onset = self.onset
        if onset is None:
            return [r for r in self.losses if not r.bad_loss]
        end = self.place(onset)
        return [
            r
            for r in self.records[:end]
            if r.segment == onset.segment and not r.between and r.step.loss is not None and not r.bad_loss
        ]

    @cached_property
    def last_good(self) -> Record | None:
        """The last record with a finite loss before the onset."""
        return self.before[-1] if self.before and self.onset is not None else None

    @cached_property
    def resume_before_onset(self) -> Mark | Record | None:
        """The resume or load after which every loss was non-finite, as the line or the first record of the segment."""
        onset, good = self.onset, self.last_good
        if onset is None:
            return None
        if good is not None:
            # The step numbers go on, but a checkpoint was loaded just between the last finite loss and the first NaN,
            # and nowhere else: evaluations load checkpoints again and again.
            loads = [m for m in self.marks("load") if m.step > 0 and m.line < onset.line]
            return loads[-1] if loads and all(m.line > good.line for m in loads) else None
        # Weights are also loaded for a fine-tuning that begins at step 1; in the middle of a training it is a resume.
        begun = (self.history.totals.first_step or 1) > 2 * self.interval
        kinds = ("resume", "load") if begun or onset.segment > 0 else ("resume",)
        marks = [m for m in self.history.marks if m.kind in kinds and (not m.line or m.line <= onset.line)]
        if marks:
            return marks[-1]
        return onset if onset.segment > 0 else None

    @cached_property
    def rising(self) -> tuple[Record, float, float] | None:
        """Where a climb of the loss began that leads up to the onset or the end: the record, its level, the last level.

        See ``climb``.
        """
        found = climb([float(r.step.loss or 0.0) for r in self.before], before_nan=self.onset is not None)
        return None if found is None else (self.before[found[0]], *found[1:])

    # --- overflow and scale ---

    @cached_property
    def overflows(self) -> list[Record]:
        """Records in which a gradient was not finite."""
        return [record for record in self.records if record.bad_gradient]

    @cached_property
    def overflow_count(self) -> int:
        """How many overflowed steps, thinned-out ones included where they were counted."""
        return max(self.history.totals.overflows, sum(max(r.count, 1) for r in self.overflows))

    @cached_property
    def scaled(self) -> list[Record]:
        """Records with a known loss scale."""
        return [record for record in self.records if record.scale is not None]

    @cached_property
    def scales(self) -> list[float]:
        """Their scales."""
        return [record.scale for record in self.scaled if record.scale is not None]

    @cached_property
    def _reduced(self) -> bool:
        """Some message says that the scale was reduced, though it may always be reduced to the same value."""
        return any(
            r.between and r.step.loss_scale_after is not None and r.step.loss_scale != r.step.loss_scale_after
            for r in self.overflows
        )

    @cached_property
    def static(self) -> bool:
        """The loss scale is known and never moved."""
        return bool(self.scales) and len(set(self.scales)) == 1 and not self._reduced

    @cached_property
    def dynamic(self) -> bool:
        """The loss scale moved within a segment."""
        return self._reduced or any(
            a.scale != b.scale and a.segment == b.segment for a, b in zip(self.scaled, self.scaled[1:], strict=False)
        )

    @cached_property
    def clean(self) -> list[Record]:
        """Logged records in which nothing was wrong as far as the format can tell."""
        result: list[Record] = []
        messages, last = 0, None
        for record in self.records:
            if record.between:
                messages += max(record.count, 1)
                continue
            # As many overflow messages as steps since the last line: none of these steps was a good one.
            covered = messages > 0 and messages >= record.step.step - (last if last is not None else 0)
            messages, last = 0, record.step.step
            if covered or record.bad_gradient or record.bad_loss or record.step.extra.get("skipped_since"):
                continue
            result.append(record)
        return result

    @cached_property
    def search(self) -> list[Record]:
        """The overflows by which a dynamic scaler looks for its scale at the start of the training or after a restart.

        Each of them is at a lower scale than all before it, none follows a growth, and they are not far apart.
        """
        first = self.history.totals.first_step
        if not self.overflows or first is None or self.static:
            return []
        segments = by_segment(self.records)
        from_start = first <= 10 * self.interval or self.history.counts_lines or bool(self.marks("resume"))
        return [
            record
            for segment, records in segments.items()
            if segment > 0 or from_start
            for record in self._search_in(records)
        ]

    def _search_in(self, records: list[Record]) -> list[Record]:
        result: list[Record] = []
        first = records[0].step.step
        left = math.inf  # the scale that the last record left behind
        previous: Record | None = None
        good_between = False
        for record in records:
            used, after = record.step.loss_scale, record.step.loss_scale_after
            if (used is not None and used > left) or (after is not None and after > left):
                break  # it grew: the search is over
            if not record.bad_gradient:
                if not record.between and previous is not None:
                    good_between = True
                left = min(left, used if used is not None else math.inf, after if after is not None else math.inf)
                continue
            if after is not None and used is None and after == left and good_between:
                break  # the scale left behind is the same as after the last overflow: it grew in between
            since = previous.step.step if previous is not None else first
            if record.step.step - since > 200 + 2 * self.interval:
                break
            known = after if after is not None else used
            left = min(left, known if known is not None else math.inf)
            result.append(record)
            previous, good_between = record, False
        return result

    @cached_property
    def later_overflows(self) -> list[Record]:
        """Overflows that are not part of the search."""
        known = {id(record) for record in self.search}
        return [record for record in self.overflows if id(record) not in known]

    @cached_property
    def falling(self) -> list[Record]:
        """The last overflows without a growth between them, when they last to the end of the record."""
        chain: list[Record] = []
        high = -math.inf
        good_between = False
        for record in reversed(self.records):
            scale = record.scale
            if scale is not None and record.bad_gradient:
                # The same scale left behind twice with a good step between: it grew there, unless it is the floor.
                if scale < high or (scale == high and scale > 1.0 and good_between):
                    break
                high = scale
            elif scale is not None and scale < high:
                break
            good_between = not record.bad_gradient and not record.bad_loss and (good_between or not record.between)
            if record.bad_gradient:
                chain.append(record)
            elif chain and record.step.overflow is False and not record.bad_loss and not record.between:
                break
        chain.reverse()
        if not chain:
            return []
        last = chain[-1].step.step
        end = self.history.totals.last_step or last
        # The chain must reach the end of the record: nothing was heard of a good step for long after it.
        return chain if end - last <= max(3 * self.interval, 3) else []

    def clean_before(self, record: Record) -> bool:
        """Some step before this record went well, as far as the format can tell."""
        end = self.place(record)
        return any(self.place(r) < end for r in self.clean)

    def exact_overflow_steps(self) -> bool:
        """Every overflow is seen: counted since the last line, or on a line of its own outside the logging interval."""
        if self.history.facts.get("counts_skipped"):
            return True
        known = [r for r in self.overflows if not r.between]
        # Where an epoch is no multiple of the interval, the lines keep it within the epoch.
        return any(
            r.step.step % self.interval not in (0, 1)
            and (r.step.epoch_step is None or r.step.epoch_step % self.interval not in (0, 1))
            for r in known
        )

    def scale_before(self, record: Record) -> float | None:
        """The last known scale before a record, in its segment."""
        for other in reversed(self.records[: self.place(record)]):
            if other.segment != record.segment:
                return None
            if other.scale is not None:
                return other.scale
        return None
