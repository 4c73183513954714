"""Lines that differ in nothing but digits: where a pattern matched one of them, it matches all at the same places.

So the regular expression runs once for each *shape* (the line with every digit made a 0), and the fields of all other
lines of that shape are cut out by position, which is several times faster. It holds for patterns that know digits only
as ``\\d``, never a certain one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ampdebug.logs._format import CONVERTERS, Fields, LogFormat

DIGITS = bytes.maketrans(b"123456789", b"000000000")
SHAPES = 4096
"""Shapes that are kept of one log; beyond, they are learnt anew."""

_CERTAIN_DIGIT = re.compile(rb"\\.|\{[\d,]+\}|\[[^\]]*\]")


class Shape:
    """Where the fields of a line stand.

    Attributes:
        plain: Nothing in such a line is remarkable, as far as the shape shows: numbers are finite, no overflow.
        scale, step, epoch, within, length: ``(begin, end)`` of these fields, None where the line has none.
        overflow, norm: The line has that field.
    """

    __slots__ = ("_finish", "_plan", "epoch", "length", "norm", "overflow", "plain", "scale", "step", "within")

    def __init__(self, row: LogFormat, match: re.Match[bytes]) -> None:
        plan: tuple[tuple[int, str, Callable[[bytes], Any]], ...] = row._plan  # type: ignore[attr-defined]
        found = [
            (name, convert, *match.span(group + 1)) for group, name, convert in plan if match.start(group + 1) >= 0
        ]
        if row.pairs is not None:
            known = {name for name, *_ in found}
            for pair in row.pairs.finditer(match.string):
                field = row.keys.get(pair.group(1).strip())
                if field is not None and field not in known and CONVERTERS[field](pair.group(2)) is not None:
                    known.add(field)
                    found.append((field, CONVERTERS[field], *pair.span(2)))
        self._plan = tuple(found)
        self._finish = row.finish
        spans = {name: (begin, end) for name, _, begin, end in self._plan}
        self.scale = spans.get("scale")
        self.step, self.epoch = spans.get("step"), spans.get("epoch")
        self.within, self.length = spans.get("epoch_step"), spans.get("epoch_steps")
        self.overflow, self.norm = "overflow" in spans, "grad_norm" in spans
        text = match.string
        numbers = [text[slice(*spans[name])][-1:] for name in ("loss", "grad_norm") if name in spans]
        self.plain = (
            row.has_plain_path
            and "loss" in spans
            and "rank" not in spans
            and all(last in b"0123456789." for last in numbers)
            and (not self.overflow or text[slice(*spans["overflow"])] == b"False")
            and (self.step is not None or (self.within is not None and self.length is not None))
            and all(e - b <= 15 for b, e in (self.step or (0, 0), self.within or (0, 0), self.length or (0, 0)))
            and (self.epoch is None or self.epoch[1] - self.epoch[0] <= 9)
        )

    def fields(self, line: bytes) -> Fields:
        """The fields of a line of this shape."""
        fields: Fields = {}
        for name, convert, begin, end in self._plan:
            value = convert(line[begin:end])
            if value is not None:
                fields[name] = value
        if self._finish is not None:
            self._finish(fields, line)
        return fields


def has_shapes(row: LogFormat) -> bool:
    """Whether lines of a format can be read by their shape."""
    patterns = row.pattern.pattern + (row.pairs.pattern if row.pairs is not None else b"") + b"".join(row.keys)
    return type(row) is LogFormat and row.strict and not re.search(rb"\d", _CERTAIN_DIGIT.sub(b"", patterns))
