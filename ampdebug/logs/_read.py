"""The reader: one pass over a log, lines to records.

Two ways through a block. While few lines are of interest, the block is searched for the trigger words only, and no
other line is ever cut out: that is the speed of ``bytes.find``. Where most lines match, it is split into lines and each
is tried against the format that matched last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from ampdebug._errors import ArgumentError, FormatError
from ampdebug.logs._assemble import Assembler
from ampdebug.logs._document import Documents
from ampdebug.logs._format import Fields, LogFormat
from ampdebug.logs._keyed import GENERIC_LIMIT, table_header
from ampdebug.logs._markers import MARKERS
from ampdebug.logs._pattern import Deadline, user_format
from ampdebug.logs._shape import DIGITS, SHAPES, Shape, has_shapes
from ampdebug.logs._source import LINE_LIMIT, Block, Source
from ampdebug.logs._table import BY_NAME, FORMATS, GENERIC
from ampdebug.rules._history import History

_WORDS = (
    b"oss",  # loss, Loss, loss_scale
    b"verflow",
    b"kipp",  # skipped=, Skipping
    b"_norm/",
    b"Error",
    b"esum",  # Resume, resuming
    b"heckpoint",
    b"ckpt",
    b"bf16",
    b"float16",
    b"level",
    b"outputs are ",  # the BERT callback
    b"%|",  # progress bars
    b"ound inf",
)
"""A line without any of these is of no interest. Every trigger of the two tables is covered by one (tested)."""

Progress = Callable[[int, int | None], None]
"""Called now and then with the bytes read so far and the size of the file (None where unknown)."""


@dataclass
class Coverage:
    """What was read and what was not.

    Attributes:
        name: The source.
        formats: ``{format: step lines}``.
        lines: Lines in the input.
        matched: Lines that were of some format or marker.
        bytes: Bytes after decompression.
        cut_lines: Over-long lines whose tail was not looked at.
        damage: Why the input ended early, else "".
        slow_lines: Lines on which the user's pattern was stopped.
    """

    name: str
    formats: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    matched: int = 0
    bytes: int = 0
    cut_lines: int = 0
    damage: str = ""
    slow_lines: int = 0


class _Scanner:
    def __init__(
        self, assembler: Assembler, rows: tuple[LogFormat, ...], *, generic: bool, own: LogFormat | None
    ) -> None:
        self.assembler = assembler
        self.rows = list(rows)
        self.generic = generic
        self.own = own
        self.deadline = Deadline()
        self.matched = 0
        self.cut = 0
        self.dense = own is not None
        self._last: LogFormat | None = None
        self._specific = 0
        self._kinds: dict[tuple[str, ...], int] = {}
        self._table = False
        self._known_shapes: dict[str, dict[bytes, Shape] | None] = {}

    def block(self, block: Block) -> None:
        if self.dense:
            self._split(block)
        else:
            self._search(block)

    def _split(self, block: Block) -> None:
        before = self.matched
        number = block.line
        lines = block.data.split(b"\n")
        last = self._last
        assembler = self.assembler
        history = assembler.history
        shapes = self._shapes(last)
        for line in lines:
            if shapes is not None:
                shape = shapes.get(line.translate(DIGITS)) if len(line) <= LINE_LIMIT else None
                if shape is None:
                    shape = self._learn(line, shapes)
                if shape is not None:
                    assert last is not None
                    self.matched += 1
                    if history.exact or not shape.plain or not assembler.plain_line(last, shape, line, number):
                        assembler.step_line(last, shape.fields(line), number, line)
                    number += 1
                    continue
            elif last is not None and last.trigger in line and len(line) <= LINE_LIMIT and not last.repeats:
                fields = last.read(line)
                if fields:
                    self.matched += 1
                    assembler.step_line(last, fields, number, line)
                    number += 1
                    continue
            if line:
                self._line(line, number)
                if last is not self._last:
                    last = self._last
                    shapes = self._shapes(last)
            number += 1
        if self.own is None and not self._table and (self.matched - before) * 4 < len(lines):
            self.dense = False

    def _shapes(self, row: LogFormat | None) -> dict[bytes, Shape] | None:
        """The shapes seen of a format, None where it is not read by shape."""
        if row is None or row.repeats or self.own is not None:
            return None
        if row.name not in self._known_shapes:
            self._known_shapes[row.name] = {} if has_shapes(row) else None
        return self._known_shapes[row.name]

    def _learn(self, line: bytes, shapes: dict[bytes, Shape]) -> Shape | None:
        """The shape of a line of the format read last, None where it is of another kind."""
        row = self._last
        assert row is not None
        if row.trigger not in line or len(line) > LINE_LIMIT:
            return None
        match = row.pattern.search(line)
        if match is None:
            return None
        if len(shapes) >= SHAPES:
            shapes.clear()
        shape = shapes[line.translate(DIGITS)] = Shape(row, match)
        return shape

    def _search(self, block: Block) -> None:
        data = block.data
        before = self.matched
        starts: dict[int, int] = {}
        for word in _WORDS:
            at = data.find(word)
            while at >= 0:
                begin = data.rfind(b"\n", 0, at) + 1
                end = data.find(b"\n", at)
                if end < 0:
                    end = len(data)
                starts[begin] = end
                at = data.find(word, end)
        number, at = block.line, 0
        for begin in sorted(starts):
            number += data.count(b"\n", at, begin)
            at = begin
            self._line(data[begin : starts[begin]], number)
        if (self.matched - before) * 600 > len(data):
            # More than one match in 600 bytes or so: cutting every line is cheaper than searching for words.
            self.dense = True

    def _line(self, line: bytes, number: int) -> None:
        if b"\r" in line:
            for piece in line.split(b"\r"):
                if piece:
                    self._piece(piece, number)
            return
        self._piece(line, number)

    def _piece(self, line: bytes, number: int) -> None:
        if len(line) > LINE_LIMIT:
            line = line[:LINE_LIMIT]
            self.cut += 1
        found = self._markers(line, number)
        row, fields = self._format(line)
        if row is not None and fields is not None:
            found = True
            self.assembler.step_line(row, fields, number, line)
        if found:
            self.matched += 1

    def _markers(self, line: bytes, number: int) -> bool:
        found = False
        for marker in MARKERS:
            if marker.trigger in line:
                fields = marker.read(line)
                if fields is not None:
                    self.assembler.marker_line(marker, fields, number, line)
                    found = True
        return found

    def _format(self, line: bytes) -> tuple[LogFormat | None, Fields | None]:
        if self.own is not None:
            fields = self.deadline.read(self.own, line)
            return (self.own, fields) if fields else (None, None)
        for row in self.rows:
            if row.trigger in line:
                fields = row.read(line)
                if fields:
                    if row is not self._last:
                        self.rows.remove(row)
                        self.rows.insert(0, row)
                        self._last = row
                    self._specific += 1
                    return row, fields
        # A catch-all beside a known format would take its summaries and validation lines for steps.
        # Its pattern tries every word "step" of the line against every "loss", so it is kept to lines of usual length.
        if self.generic and self._specific < 3 and len(line) <= GENERIC_LIMIT and GENERIC.trigger in line:
            fields, keys = GENERIC.read_signed(line)
            if fields is not None and self._same_kind(keys):
                return GENERIC, fields
        return None, None

    def _same_kind(self, keys: tuple[str, ...]) -> bool:
        """Whether a line of the catch-all is of the kind that has been read so far; the first three times any is."""
        seen = self._kinds
        count = seen.get(keys, 0)
        if not count and sum(seen.values()) >= 3:
            return False
        seen[keys] = count + 1
        return count + 1 >= 3 or max(seen.values()) < 3

    def header(self, head: bytes) -> None:
        """Look for the header of a table among the first lines of the log."""
        for line in head[:16_384].split(b"\n")[:50]:
            table = table_header(line)
            if table is not None:
                self.rows.insert(0, table)
                self.generic = False
                self._table = self.dense = True
                return


def read_log(
    source: str | os.PathLike[str] | IO[Any],
    *,
    format: str | None = None,
    pattern: str | None = None,
    progress: Progress | None = None,
) -> tuple[History, Coverage]:
    """Read a training log in one pass.

    Args:
        source: A path (plain, .gz, .bz2, .xz), ``"-"`` for standard input, or an open file.
        format: Name of the only format to read; None recognises each line by itself.
        pattern: A regular expression with named groups step, loss, scale, overflow, grad_norm, lr, rank, epoch for a
            private format; takes the place of the table of formats.
        progress: Called after each block.

    Returns:
        The history, and what was covered.

    Raises:
        ArgumentError: An unknown format, both ``format`` and ``pattern``, or a pattern that can't be used.
        FormatError: The log cannot be opened.
    """
    rows: tuple[LogFormat, ...] = FORMATS
    generic, own = True, None
    if pattern is not None:
        if format is not None:
            raise ArgumentError(f"format={format!r} and pattern={pattern!r} exclude each other; give one of them")
        own = user_format(pattern)
    elif format is not None:
        if format not in BY_NAME:
            raise ArgumentError(
                f"format={format!r} is not a known log format; choose one of {', '.join(sorted(BY_NAME))}"
            )
        rows, generic = ((), True) if format == GENERIC.name else ((BY_NAME[format],), False)
    opened = Source(source)
    history = History(name=opened.name)
    assembler = Assembler(history)
    scanner = _Scanner(assembler, rows, generic=generic, own=own)
    coverage = Coverage(opened.name)
    try:
        with scanner.deadline.installed():
            documents = Documents()
            for block in _counted(opened, coverage):
                if block.line == 1 and own is None and format is None:
                    documents.look(block.data)
                    scanner.header(block.data)
                for piece in documents.lines(block) if documents.found else (block,):
                    scanner.block(piece)
                if progress is not None:
                    done = opened.position()
                    progress(coverage.bytes if done is None else done, opened.size)
    except OSError as error:
        raise FormatError(f"cannot read the log {opened.name!r}: {error}") from error
    finally:
        opened.close()
    assembler.finish()
    coverage.formats = dict(assembler.formats)
    coverage.matched = scanner.matched
    coverage.cut_lines = opened.cut_lines + scanner.cut
    coverage.damage = opened.damage
    coverage.slow_lines = scanner.deadline.slow_lines
    return history, coverage


def _counted(source: Source, coverage: Coverage) -> Iterator[Block]:
    for block in source.blocks():
        coverage.bytes += len(block.data)
        coverage.lines = block.line + block.data.count(b"\n") - (1 if block.data.endswith(b"\n") else 0)
        yield block
