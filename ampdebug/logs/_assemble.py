"""From the fields of single lines to the records of a run: ranks, restarts, overflow messages.

What a line does not say is decided here, once: which step an overflow message belongs to, which of several equal lines
come from other ranks, where a run was started again.
"""

from __future__ import annotations

from ampdebug._records import Step
from ampdebug.logs._copies import Copies
from ampdebug.logs._format import Fields, LogFormat, rank_place
from ampdebug.logs._markers import Marker
from ampdebug.logs._numbering import Numbering
from ampdebug.logs._recent import SLACK, Counted, Recent
from ampdebug.logs._shape import Shape
from ampdebug.logs._updates import Updates
from ampdebug.rules._history import TEXT_LIMIT, History, Mark, Record

_APART = 8
_RANK_SCALES_CAP = 10_000
_UNSEEN = b"?"


class Assembler:
    """Feeds a ``History`` from what the lines say.

    Attributes:
        history: The result so far.
        formats: ``{format name: lines read}``.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.formats: dict[str, int] = {}
        self._numbering = Numbering()
        self._step = 0
        self._bad_step = 0  # the last one with a loss that is not finite
        self._recent = Recent(self._of_counted)
        self._main_rank: int | None = None
        self._one_rank = True
        self._pending: list[tuple[Fields, int, bytes]] = []
        self._copies = Copies()
        self._skipped_total: int | None = None
        self._updates = Updates()
        self._scale: float | None = None  # of the last record that has one
        self._scale_text = _UNSEEN  # as a plain line printed it
        self._counted: Counted | None = None  # the line before, where it was only counted
        self._ordinals: dict[int, int] = {}

    def step_line(self, row: LogFormat, fields: Fields, line: int, text: bytes, *, prefix: bool = True) -> None:
        """A line of the table of formats.

        Args:
            row: The format.
            fields: What the line says.
            line: Its number.
            text: The line.
            prefix: The rank may still stand in a launcher's prefix of the line.
        """
        count = self.formats.get(row.name, 0)
        self.formats[row.name] = count + 1
        history = self.history
        if count == 0:
            self._learn(row)
        rank = fields.get("rank")
        if rank is None and prefix:
            rank = self._rank_of(text)
        if row.name == "deepspeed":
            self._deepspeed(fields, line, text)
            return
        if row.repeats and fields.get("step", fields.get("epoch_step")) == 0:
            return  # a bar at "0/100" is drawn before the first step: a loss in it is that of the steps before
        number, exact = self._numbering.of(row, fields, self._step)
        if not exact and self._numbering.counts_lines:
            history.counts_lines = True
        if rank is not None:
            scale = fields.get("scale")
            if scale is not None:
                self._scale_of_rank(rank, number, scale)
            if self._main_rank is None:
                self._main_rank = rank
            elif rank != self._main_rank:
                self._one_rank = False
                self._other_rank(number, fields, line)
                return
        if exact and number <= self._step and history.totals.records:
            # Ranks that write into one file are a few lines apart; farther back is a run that was started again.
            first = self._recent.get(number)
            behind = 0 if first is not None and number == self._step else self._recent.behind(number)
            if behind <= _APART and first is not None:
                self._again(row, number, first, fields, line)
                return
            if behind > _APART or not behind:
                self._restart()
        if self._counted is not None:
            self._hand_over()
        if self._step == 0 and number > 1 and history.records:
            # Messages before the first step line belong to the steps just before it, not to step 0.
            for waiting in history.records:
                if waiting.between and waiting.step.step == 0:
                    waiting.step.step = number - 1
        self._step = number
        record = self._record(row, fields, number, line, text)
        record.rank = rank
        if row.drops_nan_loss or "skipped" in fields:
            self._counters(row, fields, record, text)
        if "optimizer_step" in fields:
            self._updates.take(number, fields["optimizer_step"], record.step)
        if self._pending:
            self._take_pending(record)
        if exact:
            self._remember(number, record)
        self._add(record)

    def _record(self, row: LogFormat, fields: Fields, number: int, line: int, text: bytes) -> Record:
        get = fields.get
        scale = get("scale")
        used, after = (None, scale) if row.scale == "after" else (scale, None)
        step = Step(
            number,
            get("epoch"),
            get("epoch_step"),
            get("loss"),
            used,
            after,
            get("overflow"),
            None,
            None,
            None,
            get("lr"),
            get("grad_norm"),
        )
        return Record(step, line, text[:TEXT_LIMIT])

    def _add(self, record: Record) -> None:
        step = record.step
        if step.loss is not None and step.loss - step.loss != 0.0:
            self._bad_step = step.step
        scale = step.loss_scale if step.loss_scale is not None else step.loss_scale_after
        if scale is not None and scale != self._scale:
            self._scale, self._scale_text = scale, _UNSEEN
        self.history.add(record)

    def plain_line(self, shape: Shape, text: bytes, line: int) -> bool:
        """Take in a line that says nothing new, without making a record of it; False where it must be read in full.

        Only once a log is so long that most plain steps are thinned out anyway. Little but text is compared: the shape
        says that the loss and the norm are ordinary numbers, and what tells overflow is printed as on a healthy line.
        """
        if self._pending:
            return False
        for begin, end, expected in shape.still:
            if text[begin:end] != expected:
                return False
        span = shape.scale
        if span is not None and text[span[0] : span[1]] != self._scale_text:
            scale = text[span[0] : span[1]]
            if shape.read_scale(scale) != self._scale:
                return False
            self._scale_text = scale
        span = shape.rank
        if span is not None and not self._only_rank(int(text[span[0] : span[1]]), shape.scale is not None):
            return False
        last = self._step
        number = self._numbering.of_plain(shape, text, last)
        if number is None:
            return False
        row = shape.row
        if row.name not in self.formats:
            return False
        if not last < number < last + 10_000:
            if number == last and row.repeats and self._recent.again(number, shape, text):
                self.formats[row.name] += 1
                return True
            return False
        span = shape.updates
        updates = 0 if span is None else int(text[span[0] : span[1]])
        if span is not None and not self._updates.go_on(number, updates):
            return False
        if not self.history.skip_plain(number, scale=shape.scale is not None, overflow=shape.overflow, norm=shape.norm):
            return False
        if span is not None:
            self._updates.pass_by(number, updates)
        self._step = number
        self.formats[row.name] += 1
        self._counted = counted = (shape, text, line, number, None)
        self._remember(number, counted)
        return True

    def _remember(self, number: int, step: Record | Counted) -> None:
        steps = self._recent.steps
        steps[number] = step
        if len(steps) > SLACK:
            self._recent.trim()

    def _hand_over(self) -> None:
        """The line before was only counted: its record is wanted where the next one is remarkable."""
        counted = self._counted
        if counted is not None:
            held = self._recent.steps.get(counted[3], counted)
            self.history.set_previous(lambda: self._of_counted(held) if isinstance(held, tuple) else held)
            self._counted = None

    def _of_counted(self, counted: Counted) -> Record:
        shape, text, line, number, again = counted
        fields = shape.fields(text) or {}
        self._numbering.settle(shape.row, fields)
        record = self._record(shape.row, fields, number, line, text)
        record.rank = fields.get("rank")
        if "optimizer_step" in fields:
            record.step.extra = {"optimizer_step": fields["optimizer_step"]}
            record.step.update_skipped = False
        if again is not None:
            record.step.loss = (again[0].fields(again[1]) or {}).get("loss", record.step.loss)
        return record

    def _counters(self, row: LogFormat, fields: Fields, record: Record, text: bytes) -> None:
        """Counts since the last line, and a loss field that vanished."""
        step = record.step
        if row.drops_nan_loss:
            if fields.get("nan_losses"):
                step.loss = float("nan")
            if step.loss is not None and step.loss != step.loss and b"loss: nan" not in text:
                record.loss_missing = True
        skipped = fields.get("skipped")
        if skipped is not None:
            self.history.facts["counts_skipped"] = True
        if skipped:
            record.count = skipped
            step.update_skipped = True

    def marker_line(self, marker: Marker, fields: Fields, line: int, text: bytes) -> None:
        """A line of the table of markers."""
        history = self.history
        kind = marker.kind
        if kind == "overflow-next":
            if len(self._pending) < 1000:
                self._pending.append((fields, line, text))
            return
        if kind == "overflow-between":
            self._between(marker, fields, line, text)
            return
        if kind == "parameter-norm":
            norm = fields.get("grad_norm")
            if norm is not None and norm - norm != 0.0 and len(history.parameter_norms) < 50:
                history.parameter_norms.append((str(fields.get("text", "")), self._step, line))
            return
        if kind == "resume":
            self._restart()
        if kind == "level":
            history.facts["level"] = str(fields.get("text", "")).upper()
        if kind == "bfloat16":
            history.facts["bfloat16"] = True
        if kind == "stopped-on-nan" and "epoch_step" in fields:
            number = self._numbering.by_epoch(fields)
            self._step = max(self._step, number)
            self._add(
                Record(Step(self._step, fields["epoch"], fields["epoch_step"], float("nan")), line, text[:TEXT_LIMIT])
            )
        elif kind in ("stopped-on-nan", "stopped-on-nan-gradient"):
            self._stopped(kind, fields, line, text)
        detail = str(fields.get("text", ""))
        history.mark(Mark(kind, self._step, line, text[:TEXT_LIMIT], history.totals.records, detail))

    def _stopped(self, kind: str, fields: Fields, line: int, text: bytes) -> None:
        """The last words of a program are all there is of its last step, unless its line was printed before."""
        if self._bad_step == self._step and self._step:
            return  # the line is there, or another process said it
        number = max(fields.get("step", 0), self._step + 1)
        step = Step(number)
        if kind == "stopped-on-nan":
            step.loss = float("nan")
        else:
            step.overflow = step.update_skipped = True
        self._hand_over()
        self._step = self._bad_step = number
        self._add(Record(step, line, text[:TEXT_LIMIT]))

    def finish(self) -> History:
        """Overflow messages still waiting for their step line are taken as they are."""
        for fields, line, text in self._pending:
            self._add_between(fields, line, text)
        self._pending.clear()
        self.history.finish()
        self._copies.drop(self.history)
        return self.history

    def _learn(self, row: LogFormat) -> None:
        history = self.history
        history.drops_nan_loss |= row.drops_nan_loss
        history.filters_nan_loss |= row.filters_nan_loss
        history.prints_overflow |= row.prints_overflow
        if row.loss_decimals is not None:
            known = history.loss_decimals
            history.loss_decimals = row.loss_decimals if known is None else min(known, row.loss_decimals)
        if history.scale_meaning == "unknown":
            history.scale_meaning = row.scale

    def _rank_of(self, text: bytes) -> int | None:
        place = rank_place(text)
        return None if place is None else int(text[place[0] : place[1]])

    def _only_rank(self, rank: int, prints_scale: bool) -> bool:
        """It is the only rank that was ever seen, and nothing is noted of its scales any more."""
        noted = len(self.history.rank_scales.get(rank, ())) >= _RANK_SCALES_CAP
        return self._one_rank and rank == self._main_rank and (noted or not prints_scale)

    def _restart(self) -> None:
        self._hand_over()
        self.history.restart()
        self._recent.clear()
        self._updates.restart()
        self._skipped_total = None

    def _again(self, row: LogFormat, number: int, record: Record, fields: Fields, line: int) -> None:
        """The same step once more: a bar that was drawn again, another rank, or a second line about it."""
        first = record.step
        loss, scale = fields.get("loss"), fields.get("scale")
        if row.repeats:
            if loss is not None:
                first.loss = loss
            return
        if self._pending:
            self._take_pending(record)
        known = record.scale
        if scale is not None and known is not None and scale != known:
            self._disagree(number, line, f"{known:g} and {scale:g}")
        if fields.get("overflow") and not first.overflow:
            first.overflow = True

    def _other_rank(self, number: int, fields: Fields, line: int) -> None:
        main = self._recent.get(number)
        scale = fields.get("scale")
        if main is None or scale is None or main.scale is None:
            return
        if main.scale != scale:
            self._disagree(number, line, f"{main.scale:g} and {scale:g}")

    def _disagree(self, number: int, line: int, values: str) -> None:
        self.history.scale_disagreements += 1
        if self.history.first_disagreement is None:
            self.history.first_disagreement = (number, line, values)

    def _scale_of_rank(self, rank: int, place: int, scale: float) -> None:
        scales = self.history.rank_scales.setdefault(rank, [])
        if len(scales) < _RANK_SCALES_CAP and len(self.history.rank_scales) <= 4096:
            scales.append((place, scale))

    def _take_pending(self, record: Record) -> None:
        step = record.step
        for fields, line, text in self._pending:
            if "epoch_step" in fields and step.epoch_step is not None and fields["epoch_step"] != step.epoch_step:
                self._add_between(fields, line, text)
                continue
            step.overflow = True
            record.count += 1
            if fields.get("applied"):
                record.applied = True
                step.update_skipped = False
            elif fields.get("dropped"):
                step.update_skipped = True
            if fields.get("scale") is not None and step.loss_scale is None and step.loss_scale_after is None:
                step.loss_scale_after = fields["scale"]
            record.text = text[:TEXT_LIMIT] if not record.bad_loss else record.text
            if not record.bad_loss:
                record.line = line
        self._pending.clear()

    def _between(self, marker: Marker, fields: Fields, line: int, text: bytes) -> None:
        rank = fields.get("rank")
        if rank is None:
            rank = self._rank_of(text)
        if rank is not None:
            value = fields.get("scale", fields.get("scale_before"))
            if value is not None:
                ordinal = self._ordinals.get(rank, 0)
                self._ordinals[rank] = ordinal + 1
                self._scale_of_rank(rank, ordinal, value)
            if self._main_rank is None:
                self._main_rank = rank
            elif rank != self._main_rank:
                self._one_rank = False
                return
        if marker.per_process:
            self._copies.see((marker.trigger, fields.get("scale"), fields.get("scale_before"), fields.get("step")))
        self._add_between(fields, line, text)

    def _add_between(self, fields: Fields, line: int, text: bytes) -> None:
        step = Step(self._step)
        step.overflow = True
        if fields.get("dropped"):
            step.update_skipped = True
        step.loss_scale = fields.get("scale_before")
        after = fields.get("scale")
        step.loss_scale_after = after if after is not None else step.loss_scale
        record = Record(step, line, text[:TEXT_LIMIT], between=True)
        record.applied = bool(fields.get("applied"))
        self._hand_over()
        self._add(record)

    def _deepspeed(self, fields: Fields, line: int, text: bytes) -> None:
        """``step=…, skipped=…``: a step of its own only where no other format tells the steps."""
        total = fields.get("skipped_total")
        skipped = total - self._skipped_total if total is not None and self._skipped_total is not None else total
        self._skipped_total = total
        if len(self.formats) > 1:
            return
        number = fields.get("step")
        if number is None or self._recent.get(number) is not None:
            return
        if number < self._step - 8:
            self._restart()
        self._numbering.named = True
        self._step = number
        step = Step(number)
        step.learning_rate = fields.get("lr")
        step.extra = {"skipped_since": skipped, "skipped_total": total}
        record = Record(step, line, text[:TEXT_LIMIT])
        self._remember(number, record)
        self._add(record)
