"""Which step a line is about: numbers over the whole run, made of what a tool prints."""

from __future__ import annotations

from bisect import bisect_left

from ampdebug.logs._format import Fields, LogFormat
from ampdebug.logs._shape import Shape


class Numbering:
    """Turns what lines say into step numbers over the whole run, counted from 1.

    Attributes:
        counts_lines: Some line told no step, so that lines were counted.
        named: Some line told its step.
    """

    def __init__(self) -> None:
        self.counts_lines = False
        self.named = False
        self._epoch = -1
        self._epoch_start = 0
        self._epoch_longest = 0
        self._unnamed = 1
        self._within = 0
        self._epoch_base: dict[str, int] = {}
        self._offsets: dict[int, int] = {}
        self._epochs: list[int] = []  # of the offsets, in order
        self._raw = (0, 0)

    def of(self, row: LogFormat, fields: Fields, last: int) -> tuple[int, bool]:
        """The step of a line, and whether the line names it.

        Args:
            row: The format.
            fields: What the line says; its epoch and its place in the epoch are made to count from 1.
            last: The step of the line before.
        """
        step = fields.get("step")
        if step is not None:
            self.named = True
            if row.steps_restart and "epoch" in fields:
                return self._over_epochs(int(fields["epoch"]), int(step)), True
            return step + (1 - row.steps_from), True
        if "epoch_step" in fields:
            self.named = True
            if "epoch" not in fields:
                # Only the place within the epoch is printed: where it falls, the next epoch has begun.
                if fields["epoch_step"] < self._within:
                    self._unnamed += 1
                self._within = fields["epoch_step"]
            self.settle(row, fields)
            return self.by_epoch(fields), True
        if self.named:
            return last, False
        self.counts_lines = True
        return last + 1, False

    def settle(self, row: LogFormat, fields: Fields) -> None:
        """Make the epoch and the place in it count from 1."""
        if "epoch_step" in fields and "step" not in fields:
            epoch = fields.get("epoch")
            fields["epoch"] = self._unnamed if epoch is None else epoch + (1 - self._first_epoch(row, epoch))
            fields["epoch_step"] += 1 - row.steps_from

    def of_plain(self, shape: Shape, text: bytes, last: int) -> int | None:
        """The step of a line whose shape is plain, cut out of its text; None where that takes more.

        What ``of`` says of the same line right afterwards is the same.
        """
        row = shape.row
        span = shape.step
        if span is not None:
            step = int(text[span[0] : span[1]])
            epoch_span = shape.epoch
            if row.steps_restart and epoch_span is not None:
                epoch = int(text[epoch_span[0] : epoch_span[1]])
                offset = self._offsets.get(epoch)
                if offset is None:
                    return None
                self._raw = (epoch, step)
                return offset + step
            return step + (1 - row.steps_from)
        span = shape.within
        if span is None:
            return None if self.named else last + 1
        within = int(text[span[0] : span[1]])
        span = shape.epoch
        if span is None:
            if within < self._within:
                return None
            self._within = within
            epoch = self._unnamed
        else:
            base = row.epochs_from if row.epochs_from is not None else self._epoch_base.get(row.name)
            if base is None:
                return None
            epoch = int(text[span[0] : span[1]]) + (1 - base)
        within += 1 - row.steps_from
        span = shape.length
        if span is not None:
            length = int(text[span[0] : span[1]])
            return max(epoch - 1, 0) * length + within if length and within <= length + 1 else None
        if epoch != self._epoch:
            return None
        if within > self._epoch_longest:
            self._epoch_longest = within
        return self._epoch_start + within

    def _first_epoch(self, row: LogFormat, epoch: int) -> int:
        """Number that the tool gives to the first epoch, learned from the first line where tools differ."""
        if row.epochs_from is not None:
            return row.epochs_from
        return self._epoch_base.setdefault(row.name, 0 if epoch == 0 else 1)

    def _over_epochs(self, epoch: int, step: int) -> int:
        """A step number that may or may not start anew in each epoch."""
        offsets = self._offsets
        offset = offsets.get(epoch)
        if offset is None:
            place = bisect_left(self._epochs, epoch)
            before = self._epochs[place - 1] if place else None
            restarts = before is not None and self._raw[0] == before and step <= self._raw[1]
            offset = 0 if before is None else offsets[before] + (self._raw[1] if restarts else 0)
            self._epochs.insert(place, epoch)
            offsets[epoch] = offset
            if len(offsets) > 10_000:
                del offsets[self._epochs.pop(0)]
        self._raw = (epoch, step)
        return offset + step

    def by_epoch(self, fields: Fields) -> int:
        """The step of a line that names its epoch and the place in it, both counted from 1."""
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
