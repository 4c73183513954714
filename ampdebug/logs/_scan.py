"""The scanner: blocks of lines in, step lines and messages out to the assembler.

Two ways through a block. While few lines are of interest, the block is searched for the trigger words only, and no
other line is ever cut out: that is the speed of ``bytes.find``. Where most lines match, it is split into lines, and
lines like one that was read before are read by its shape.
"""

from __future__ import annotations

from ampdebug.logs._assemble import Assembler
from ampdebug.logs._format import Fields, LogFormat
from ampdebug.logs._keyed import GENERIC_LIMIT
from ampdebug.logs._kinds import Kinds
from ampdebug.logs._markers import MARKERS
from ampdebug.logs._pattern import Deadline
from ampdebug.logs._shape import DIGITS
from ampdebug.logs._source import LINE_LIMIT, Block
from ampdebug.logs._table import GENERIC
from ampdebug.logs._tabular import table_header

WORDS = (
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


_HEAD = 1 << 15


class Scanner:
    """Reads blocks.

    Args:
        assembler: Gets what the lines say.
        rows: The formats to try.
        generic: The catch-all is tried too.
        own: The user's format, which takes the place of all others.

    Attributes:
        matched: Lines (and pieces between carriage returns) that were of some format or marker.
        cut: Over-long lines whose tail was not looked at.
        deadline: Stops the user's pattern.
    """

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
        self._specific = 0
        self._signed: dict[tuple[str, ...], int] = {}
        self._table = False
        self._kinds = Kinds()

    def block(self, block: Block) -> None:
        """Read one."""
        if self.dense:
            self._split(block)
            return
        # The way through the rest is chosen by the first lines.
        end = block.data.find(b"\n", _HEAD) + 1
        head = Block(block.data[:end], block.line) if end else block
        self._search(head)
        if end < len(block.data) and end:
            rest = Block(block.data[end:], block.line + head.data.count(b"\n"))
            if self.dense:
                self._split(rest)
            else:
                self._search(rest)

    def _split(self, block: Block) -> None:
        before = self.matched
        lines = block.data.split(b"\n")
        if self.own is not None:
            for number, line in enumerate(lines, block.line):
                self._line(line, number)
            return
        if b"\r" in block.data:
            for number, line in enumerate(lines, block.line):
                self._lines(line.split(b"\r"), number, 0)
        else:
            self._lines(lines, block.line, 1)
        if not self._table and (self.matched - before) * 4 < len(lines):
            self.dense = False

    def _lines(self, lines: list[bytes], number: int, advance: int) -> None:
        """Read some lines, or the pieces of one; ``advance`` is what is between the numbers of two."""
        assembler, history = self.assembler, self.assembler.history
        plain_line, step_line = assembler.plain_line, assembler.step_line
        shapes, silent = self._kinds.shapes, self._kinds.silent
        for line in lines:
            kind = line.translate(DIGITS)
            shape = shapes.get(kind)
            if shape is None:
                if kind not in silent and line:
                    self._unknown(line, number)
            elif shape.pins and not shape.holds(line):
                self._piece(line, number)
            elif not history.exact and shape.plain and plain_line(shape, line, number):
                self.matched += 1
            else:
                fields = shape.fields(line)
                if fields is None:
                    self._piece(line, number)
                else:
                    self.matched += 1
                    step_line(shape.row, fields, number, line, prefix=False)
            number += advance

    def _unknown(self, line: bytes, number: int) -> None:
        """A line unlike those before: it is read in full and, where that is possible, remembered by its shape."""
        if len(line) > LINE_LIMIT:
            self._piece(line, number)
            return
        found = self._markers(line, number)
        row, fields = self._format(line)
        if row is not None and fields is not None:
            if not found and (row is not GENERIC or max(self._signed.values()) >= 3):
                self._kinds.learn(row, line, number)
            self.assembler.step_line(row, fields, number, line)
            found = True
        elif not found and not self._table and not (self._catches_all(line) and GENERIC.trigger in line):
            self._kinds.learn_silent(line)
        if found:
            self.matched += 1

    def _search(self, block: Block) -> None:
        data = block.data
        before = self.matched
        starts: dict[int, int] = {}
        for word in WORDS:
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
                    if row is not self.rows[0]:
                        self.rows.remove(row)
                        self.rows.insert(0, row)
                    self._specific += 1
                    if self._specific == 3:
                        self._kinds.forget(GENERIC)
                    return row, fields
        # A catch-all beside a known format would take its summaries and validation lines for steps.
        # Its pattern tries every word "step" of the line against every "loss", so it is kept to lines of usual length.
        if self._catches_all(line) and GENERIC.trigger in line:
            fields, keys = GENERIC.read_signed(line)
            if fields is not None and self._same_kind(keys):
                return GENERIC, fields
        return None, None

    def _catches_all(self, line: bytes) -> bool:
        return self.generic and self._specific < 3 and len(line) <= GENERIC_LIMIT

    def _same_kind(self, keys: tuple[str, ...]) -> bool:
        """Whether a line of the catch-all is of the kind that has been read so far; the first three times any is."""
        seen = self._signed
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
