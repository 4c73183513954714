"""Lines that differ in nothing but digits: what was found in one of them stands at the same places in all.

So patterns run once for each *shape* (the line with every digit made a 0), and the fields of all other lines of that
shape are cut out by position, which is several times faster. It holds for patterns that know digits only as ``\\d``,
never a certain one; where a key has digits of its own (``lr_0``), they are *pinned*: they have to be the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from ampdebug.logs._format import Fields, LogFormat, number, rank_place
from ampdebug.logs._plan import ANY_DIGIT, COUNTERS, Part, Plan, plan_of, words_with_digits

DIGITS = bytes.maketrans(b"123456789", b"000000000")

_WIDE = re.compile(rb"[0.][eE][-+]?0{3}|0{100}")
"""In the shape of a line: numbers that may be too large for a float, although they are spelt with digits."""

_COUNTERS = ("step", "epoch", "epoch_step", "epoch_steps", "rank", "optimizer_step")
_STILL = ("overflow", "skipped", "nan_losses")
_PLAIN = frozenset((*_COUNTERS, *_STILL, "loss", "scale", "grad_norm", "lr"))
Span = tuple[int, int]


class Shape:
    """Where the fields of a line stand.

    Attributes:
        row: The format.
        pins: ``(begin, end, text)`` that a line must hold to be of this shape.
        plain: Nothing in such a line is remarkable, as far as the shape shows: numbers are finite, no overflow.
        still: ``(begin, end, text)`` that a line must hold to be plain: no overflow, nothing skipped.
        scale, step, epoch, within, length, rank, updates: ``(begin, end)`` of these fields, None where there is none.
        overflow, norm: The line has that field.
        read_scale: Makes a number of the text of the scale.
    """

    __slots__ = (
        *("_count", "_finish", "_parts", "epoch", "length", "norm", "overflow", "pins", "plain", "rank", "read_scale"),
        *("row", "scale", "step", "still", "updates", "within"),
    )

    def __init__(self, row: LogFormat, line: bytes, plan: Plan) -> None:
        self.row = row
        self._finish = plan.finish
        self._parts: tuple[Part, ...] = tuple(_sped_up(part, line) for part in plan.parts)
        self._count = 0
        fields = self.fields(line) or {}
        if "rank" not in fields:
            place = rank_place(line)
            if place is not None:
                self._parts = (*self._parts, ("rank", int, *place))
                fields["rank"] = int(line[slice(*place)])
        self._count = len(fields)
        self.pins = tuple((begin, end, line[begin:end]) for begin, end in plan.pins)
        spans: dict[str, Span] = {name: (begin, end) for name, _, begin, end in self._parts}
        if "epoch_step" in fields and "epoch_step" not in spans and "step" in spans:
            spans["epoch_step"] = spans.pop("step")
        if "epoch_steps" in fields and "epoch_steps" not in spans and "total" in spans:
            spans["epoch_steps"] = spans["total"]
        get = spans.get
        self.scale, self.step, self.epoch, self.within = get("scale"), get("step"), get("epoch"), get("epoch_step")
        self.length, self.rank, self.updates = get("epoch_steps"), get("rank"), get("optimizer_step")
        self.overflow, self.norm = "overflow" in fields, "grad_norm" in fields
        self.read_scale: Callable[[bytes], Any] = {name: make for name, make, *_ in self._parts}.get("scale", float)
        self.still = tuple((*spans[name], line[slice(*spans[name])]) for name in _STILL if name in spans)
        self.plain = plan.plain and self._is_plain(line, fields, spans)

    def _is_plain(self, line: bytes, fields: Fields, spans: dict[str, Span]) -> bool:
        loss, norm = fields.get("loss"), fields.get("grad_norm", 0.0)
        needed = [name for name in _COUNTERS if name in fields]
        if self.row.steps_restart and "epoch" in spans:
            needed.append("epoch")
        counters = [spans.get(name) for name in needed]
        return (
            loss is not None
            and math.isfinite(loss)
            and math.isfinite(norm)
            and fields.keys() <= _PLAIN
            and not any(fields.get(name) for name in _STILL)
            and ("overflow" not in fields or "overflow" in spans or "skipped" in spans)
            and all(span is not None and line[slice(*span)].isdigit() and span[1] - span[0] <= 15 for span in counters)
            and _WIDE.search(line.translate(DIGITS)) is None
        )

    def holds(self, line: bytes) -> bool:
        """The pinned text stands in a line of this shape."""
        return all(line[begin:end] == text for begin, end, text in self.pins)

    def fields(self, line: bytes) -> Fields | None:
        """The fields of a line of this shape, None where they have to be read in full."""
        fields: Fields = {}
        for name, convert, begin, end in self._parts:
            value = convert(line[begin:end])
            if value is not None:
                fields[name] = value
        if self._finish is not None:
            self._finish(fields, line)
        return fields if self._count in (0, len(fields)) else None


def _sped_up(part: Part, line: bytes) -> Part:
    """The part with the fastest converter that makes the same of all texts of its shape."""
    name, convert, begin, end = part
    text = line[begin:end]
    if convert in COUNTERS and text.isdigit() and len(text) <= 15:
        convert = int
    elif convert is number and number(text) is not None:
        convert = float
    return name, convert, begin, end


def has_shapes(row: LogFormat) -> bool:
    """Whether lines of a format can be read by their shape."""
    if type(row) is not LogFormat:
        return True
    pattern = row.pattern.pattern + (b"" if row.pairs is None else row.pairs.pattern)
    for word in sorted(words_with_digits(row), key=len, reverse=True):
        pattern = pattern.replace(word, b"")
    return row.strict and knows_no_digit(pattern)


def knows_no_digit(pattern: bytes) -> bool:
    """The pattern means any digit where it means one, so that it says the same of all lines of one shape."""
    return re.search(rb"\d", ANY_DIGIT.sub(b"", pattern)) is None


def shape_of(row: LogFormat, line: bytes) -> Shape | None:
    """The shape of a line of the format ``row``, None where it can only be read in full."""
    plan = plan_of(row, line)
    if plan is None:
        return None
    shape = Shape(row, line, plan)
    fields, known = shape.fields(line), row.read(line)
    if not fields or not known:
        return None
    if "rank" not in known:
        fields.pop("rank", None)  # that of the prefix
    # The proof that the plan is right; NaN is not equal to itself, its repr is.
    return shape if {k: repr(v) for k, v in fields.items()} == {k: repr(v) for k, v in known.items()} else None
