"""From the fields of single lines to the records of a run: step numbers, ranks, restarts, overflow messages.

What a line does not say is decided here, once: which step an overflow message belongs to, how long an epoch is,
which of several equal lines come from other ranks, where a run was started again.
"""

from __future__ import annotations

import re

from ampdebug._records import Step
from ampdebug.logs._copies import Copies
from ampdebug.logs._format import Fields, LogFormat
from ampdebug.logs._markers import Marker
from ampdebug.logs._shape import Shape
from ampdebug.rules._history import TEXT_LIMIT, History, Mark, Record

_RANK = re.compile(rb"^\s{0,4}(?:\[(?:rank|default|Rank )(\d{1,5})\]:?|(\d{1,4}): )")
_RECENT = 64
_APART = 8
_RANK_SCALES_CAP = 10_000


class Assembler:
    """Feeds a ``History`` from what the lines say.

    Attributes:
        history: The result so far.
        formats: ``{format name: lines read}``.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.formats: dict[str, int] = {}
        self._epoch_steps = 0
        self._epoch = -1
        self._epoch_start = 0
        self._epoch_longest = 0
        self._step = 0
        self._have_steps = False
        self._origin: int | None = None
        self._recent: dict[int, Record] = {}
        self._main_rank: int | None = None
        self._pending: list[tuple[Fields, int, bytes]] = []
        self._copies = Copies()
        self._skipped_total: int | None = None
        self._skipped_source = False
        self._optimizer: tuple[int, int] | None = None
        self._pace = 0.0  # updates a step, at most
        self._plain_scale: bytes | None = None
        self._skipped: tuple[LogFormat, Shape, bytes, int, int] | None = None
        self._ordinals: dict[int, int] = {}
        self._unnamed = 1
        self._within = 0
        self._epoch_base: dict[str, int] = {}
        self._offsets: dict[int, int] = {}
        self._raw = (0, 0)

    def step_line(self, row: LogFormat, fields: Fields, line: int, text: bytes) -> None:
        """A line of the table of formats."""
        count = self.formats.get(row.name, 0)
        self.formats[row.name] = count + 1
        history = self.history
        if count == 0:
            self._learn(row)
        rank = fields.get("rank")
        if rank is None and text[:1] in b" [0123456789":
            rank = self._rank_of(text)
        if row.name == "deepspeed":
            self._deepspeed(fields, line, text)
            return
        number, exact = self._number(row, fields)
        scale = fields.get("scale")
        if scale is not None and rank is not None:
            self._scale_of_rank(rank, number, scale, text)
        if rank is not None:
            if self._main_rank is None:
                self._main_rank = rank
            elif rank != self._main_rank:
                self._other_rank(number, fields, line)
                return
        if exact and number <= self._step and history.totals.records:
            # Ranks that write into one file are a few lines apart; farther back is a run that was started again.
            behind = sum(1 for other in self._recent if other > number)
            if behind <= _APART and number in self._recent:
                self._again(row, number, fields, line, text)
                return
            if behind > _APART or not behind:
                self._restart()
        if self._skipped is not None:
            # It is wanted only where the next one is remarkable.
            history.set_previous(self._last_skipped)
        if self._step == 0 and number > 1 and history.records:
            # Messages before the first step line belong to the steps just before it, not to step 0.
            for waiting in history.records:
                if waiting.between and waiting.step.step == 0:
                    waiting.step.step = number - 1
        self._step = number
        record = self._record(row, fields, number, line, text)
        step = record.step
        record.rank = rank
        if row.pairs is not None:
            self._counters(row, fields, record, text)
        elif "optimizer_step" in fields:
            self._optimizer_step(number, fields["optimizer_step"], step)
        if self._pending:
            self._take_pending(record)
        if exact:
            recent = self._recent
            recent[number] = record
            if len(recent) > _RECENT:
                del recent[next(iter(recent))]
        history.add(record)
        self._skipped = None

    def _record(self, row: LogFormat, fields: Fields, number: int, line: int, text: bytes) -> Record:
        step = Step(
            number,
            fields.get("epoch"),
            fields.get("epoch_step"),
            fields.get("loss"),
            None,
            None,
            fields.get("overflow"),
            None,
            None,
            None,
            fields.get("lr"),
            fields.get("grad_norm"),
        )
        scale = fields.get("scale")
        if scale is not None:
            if row.scale == "after":
                step.loss_scale_after = scale
            else:
                step.loss_scale = scale
        return Record(step, line, text[:TEXT_LIMIT])

    def plain_line(self, row: LogFormat, shape: Shape, text: bytes, line: int) -> bool:
        """Take in a line that says nothing new, without making a record of it; False where it must be read in full.

        Only once a log is so long that most plain steps are thinned out anyway. Nothing but text is compared: the shape
        says that the loss and the norm are ordinary numbers and that nothing overflowed, and the scale is printed as on
        the line before.
        """
        span = shape.scale
        scale = None if span is None else text[span[0] : span[1]]
        if scale != self._plain_scale or self._pending:
            self._plain_scale = scale
            return False
        span = shape.step
        if span is not None:
            number = int(text[span[0] : span[1]]) + 1 - row.steps_from
        else:
            assert shape.within is not None
            assert shape.length is not None
            epoch, within, length = shape.epoch, shape.within, shape.length
            number = int(text[within[0] : within[1]]) + 1 - row.steps_from
            if epoch is not None:
                number += (int(text[epoch[0] : epoch[1]]) - (row.epochs_from or 0)) * int(text[length[0] : length[1]])
        history = self.history
        if not self._step < number < self._step + 10_000 or not history.skip_plain(
            number, scale=scale is not None, overflow=shape.overflow, norm=shape.norm
        ):
            return False
        self._step = number
        self.formats[row.name] += 1
        self._skipped = (row, shape, text, line, number)
        return True

    def _last_skipped(self) -> Record:
        """The record of the last line that was only counted."""
        assert self._skipped is not None
        row, shape, text, line, number = self._skipped
        return self._record(row, shape.fields(text), number, line, text)

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
        if "optimizer_step" in fields:
            self._optimizer_step(step.step, fields["optimizer_step"], step)

    def _optimizer_step(self, number: int, optimizer_step: int, step: Step) -> None:
        """The optimizer's own counter: where it stands still, the update was skipped.

        Where only some of the updates since the last line were made, this step's own may be of either kind.
        """
        step.extra = {"optimizer_step": optimizer_step}
        if self._optimizer is not None and number > self._optimizer[0]:
            made = (optimizer_step - self._optimizer[1]) / (number - self._optimizer[0])
            self._pace = max(self._pace, made)  # below 1 where gradients accumulate
            step.update_skipped = True if made == 0 else False if made >= self._pace else None
        self._optimizer = (number, optimizer_step)

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
            number = self._by_epoch(fields)
            self._step = max(self._step, number)
            history.add(
                Record(Step(self._step, fields["epoch"], fields["epoch_step"], float("nan")), line, text[:TEXT_LIMIT])
            )
        detail = str(fields.get("text", ""))
        history.mark(Mark(kind, self._step, line, text[:TEXT_LIMIT], history.totals.records, detail))

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
        match = _RANK.match(text)
        if match is None:
            return None
        return int(match.group(1) or match.group(2))

    def _number(self, row: LogFormat, fields: Fields) -> tuple[int, bool]:
        """The step over the whole run, counted from 1, and whether the line names it."""
        step = fields.get("step")
        if step is not None:
            self._have_steps = True
            if row.steps_restart and "epoch" in fields:
                return self._over_epochs(int(fields["epoch"]), int(step)), True
            return step + (1 - row.steps_from), True
        if "epoch_step" in fields:
            self._have_steps = True
            epoch = fields.get("epoch")
            if epoch is None:
                # Only the place within the epoch is printed: where it falls, the next epoch has begun.
                if fields["epoch_step"] < self._within:
                    self._unnamed += 1
                self._within = fields["epoch_step"]
                fields["epoch"] = self._unnamed
            else:
                fields["epoch"] = epoch + (1 - self._first_epoch(row, epoch))
            fields["epoch_step"] += 1 - row.steps_from
            return self._by_epoch(fields), True
        if self._have_steps:
            return self._step, False
        self.history.counts_lines = True
        return self._step + 1, False

    def _first_epoch(self, row: LogFormat, epoch: int) -> int:
        """Number that the tool gives to the first epoch, learned from the first line where tools differ."""
        if row.epochs_from is not None:
            return row.epochs_from
        return self._epoch_base.setdefault(row.name, 0 if epoch == 0 else 1)

    def _over_epochs(self, epoch: int, step: int) -> int:
        """A step number that may or may not start anew in each epoch."""
        offsets = self._offsets
        if epoch not in offsets:
            before = max((e for e in offsets if e < epoch), default=None)
            restarts = before is not None and self._raw[0] == before and step <= self._raw[1]
            offsets[epoch] = 0 if before is None else offsets[before] + (self._raw[1] if restarts else 0)
            if len(offsets) > 10_000:
                del offsets[min(offsets)]
        self._raw = (epoch, step)
        return offsets[epoch] + step

    def _by_epoch(self, fields: Fields) -> int:
        epoch, within = int(fields["epoch"]), int(fields["epoch_step"])
        length = fields.get("epoch_steps")
        if length and within <= length + 1:
            return max(epoch - 1, 0) * int(length) + int(within)
        # The length of an epoch is not printed: learn it from the highest step seen before the epoch changed.
        if epoch != self._epoch:
            if self._epoch >= 0 and epoch > self._epoch:
                self._epoch_start += (epoch - self._epoch) * self._epoch_longest
            elif epoch < self._epoch or self._epoch < 0:
                self._epoch_start = (epoch - 1) * self._epoch_longest if self._epoch_longest and epoch > 0 else 0
            self._epoch = epoch
        if within > self._epoch_longest:
            self._epoch_longest = within
        return int(self._epoch_start + within)

    def _restart(self) -> None:
        self.history.restart()
        self._recent.clear()
        self._optimizer = None
        self._skipped_total = None

    def _again(self, row: LogFormat, number: int, fields: Fields, line: int, text: bytes) -> None:
        """The same step once more: a bar that was drawn again, another rank, or a second line about it."""
        first = self._recent[number].step
        loss, scale = fields.get("loss"), fields.get("scale")
        if row.repeats:
            if loss is not None:
                first.loss = loss
            return
        if self._pending:
            self._take_pending(self._recent[number])
        known = self._recent[number].scale
        if scale is not None and known is not None and scale != known:
            self._disagree(number, line, f"{known:g} and {scale:g}")
        if fields.get("overflow") and not first.overflow:
            first.overflow = True
        del text

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

    def _scale_of_rank(self, rank: int, place: int, scale: float, text: bytes) -> None:
        del text
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
                self._scale_of_rank(rank, ordinal, value, text)
            if self._main_rank is None:
                self._main_rank = rank
            elif rank != self._main_rank:
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
        if self._skipped is not None:
            self.history.set_previous(self._last_skipped)
        self.history.add(record)
        self._skipped = None

    def _deepspeed(self, fields: Fields, line: int, text: bytes) -> None:
        """``step=…, skipped=…``: a step of its own only where no other format tells the steps."""
        total = fields.get("skipped_total")
        skipped = total - self._skipped_total if total is not None and self._skipped_total is not None else total
        self._skipped_total = total
        if len(self.formats) > 1:
            return
        number = fields.get("step")
        if number is None or number in self._recent:
            return
        if number < self._step - 8:
            self._restart()
        self._have_steps = True
        self._step = number
        step = Step(number)
        step.learning_rate = fields.get("lr")
        step.extra = {"skipped_since": skipped, "skipped_total": total}
        record = Record(step, line, text[:TEXT_LIMIT])
        self._recent[number] = record
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]
        self.history.add(record)
