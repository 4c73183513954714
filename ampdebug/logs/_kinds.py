"""What is remembered of the lines of one log: shapes of step lines, and lines that say nothing."""

from __future__ import annotations

from ampdebug.logs._format import LogFormat
from ampdebug.logs._markers import MARKERS
from ampdebug.logs._plan import words_with_digits
from ampdebug.logs._shape import DIGITS, Shape, has_shapes, knows_no_digit, shape_of
from ampdebug.logs._table import FORMATS

SHAPES = 4096
"""Shapes that are kept; beyond, they are learnt anew."""

_BYTES = 4 << 20  # of the lines they were learnt from
_FAILURES = 100

_CERTAIN = tuple(
    {row.trigger.translate(DIGITS) for row in FORMATS if not has_shapes(row) or words_with_digits(row)}
    | {m.trigger.translate(DIGITS) for m in MARKERS if not knows_no_digit(m.pattern.pattern + m.trigger)}
)
"""A line with one of these in its shape may be of a kind that depends on certain digits."""


class Kinds:
    """Remembers kinds of lines, with bounded memory.

    Attributes:
        shapes: Step lines, by the line with every digit made a 0.
        silent: Such lines that are neither steps nor messages.
    """

    def __init__(self) -> None:
        self.shapes: dict[bytes, Shape] = {}
        self.silent: set[bytes] = set()
        self._bytes = self._silent_bytes = 0
        self._begun = 0
        self._paused_until = 0
        self._failures: dict[str, int] = {}

    def learn(self, row: LogFormat, line: bytes, number: int) -> None:
        """Remember the shape of a line, which is of the format ``row``, where its lines can be read by shape."""
        failures = self._failures.get(row.name, 0)
        if failures > _FAILURES or number < self._paused_until:
            return
        kind = line.translate(DIGITS)
        shape = shape_of(row, line) if has_shapes(row) else None
        if shape is None:
            self._failures[row.name] = failures + 1
            return
        if len(self.shapes) >= SHAPES or self._bytes > _BYTES:
            if number - self._begun < 4 * len(self.shapes):
                # Hardly a line is like another: learning takes longer than reading. Try again later.
                self._paused_until = number + 64 * SHAPES
            self.shapes.clear()
            self._bytes, self._begun = 0, number
        self._failures[row.name] = 0
        self.shapes[kind] = shape
        self._bytes += len(kind)

    def learn_silent(self, line: bytes) -> None:
        """Remember a line that is no step and no message."""
        kind = line.translate(DIGITS)
        if (b"{" in line and b"oss" in line) or any(word in kind for word in _CERTAIN):
            return
        if len(self.silent) >= SHAPES or self._silent_bytes > _BYTES:
            self.silent.clear()
            self._silent_bytes = 0
        self.silent.add(kind)
        self._silent_bytes += len(kind)

    def forget(self, row: LogFormat) -> None:
        """Lines of this format are no longer read."""
        for kind in [kind for kind, shape in self.shapes.items() if shape.row is row]:
            del self.shapes[kind]
